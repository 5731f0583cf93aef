"""A queue server that loses what it acknowledged, or everything: only work in flight is done again."""

from __future__ import annotations

import os
import shutil
import signal

import psutil
import pytest

from penstock.common.broker.keys import Keys
from tests.chaos.plan import Floors, Plan
from tests.chaos.run import run_chaos
from tests.chaos.victims import SERVER
from tests.e2e.aof import added, read_file
from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE
from tests.e2e.slow_disk import build_slow_disk
from tests.helpers import NIGHTLY, is_dead, wait_until
from tests.judge import judge, read_records

pytestmark = pytest.mark.e2e


def test_kills_of_a_server_on_a_slow_disk_that_lost_what_it_had_acknowledged(tmp_path):
    kills, steps = (20, 30) if NIGHTLY else (8, 14)
    floors = Floors(kills=kills, server=kills, learner=0, groups=12 * steps, updates=steps)
    plan = Plan({SERVER: kills + 6}, steps=steps, limit_s=900, floors=floors)
    site = tmp_path / "site"
    site.mkdir()
    verdict = run_chaos(site, plan, seed=1, preload=build_slow_disk(tmp_path, delay_s=1.5))
    assert verdict.faults == []
    assert verdict.entries_lost > 0, "nothing was ever lost: this test shows nothing"


def test_after_the_servers_folder_is_gone_exactly_the_tickets_in_flight_are_issued_again(tmp_path):
    site = ForkedSite(tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS="40", FAKE_TOKEN_DELAY_S="0.05")
    site.start()
    site.wait_for(lambda: site.steps() >= 10, "step 10")
    kill_all(site)
    before, ended = issued(site), ended_in_journal(site)
    shutil.rmtree(site.run_folder / "queue")
    with site.start():
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    after = issued(site)
    assert len(ended) >= 40
    assert before - ended
    assert after & before == before - ended
    everything = before | after | ended  # the slow disk of a busy machine may lack the last issued
    assert everything == set(range(len(everything)))
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], verdict["states"]["trained"]) == (40, 160)


def kill_all(site: ForkedSite) -> None:
    """kill -9 of the supervisor; what it started follows."""
    assert site.process is not None
    whole = psutil.Process(site.process.pid)
    everybody = [site.process.pid, *(child.pid for child in whole.children(recursive=True))]
    os.kill(site.process.pid, signal.SIGKILL)
    site.wait(10)
    wait_until(lambda: all(map(is_dead, everybody)), "all processes to end")


def issued(site: ForkedSite) -> set[int]:
    """Numbers of the training tickets that ever lay on the server's stream."""
    stream = Keys(site.variables["RUN_NAME"]).tickets
    return {number(ticket) for _, ticket in added(read_file(site.run_folder), stream)}


def ended_in_journal(site: ForkedSite) -> set[int]:
    """Numbers of the training tickets whose end is written down."""
    ends = (ticket for _, record in read_records(site.run_folder) for ticket in record["ends"])
    return {number(ticket) for ticket in ends if ticket.startswith("train:")}


def number(ticket: str) -> int:
    return int(ticket.partition(":")[2])
