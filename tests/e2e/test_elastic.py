"""Actors come and go in one run: by scale, by hand on another host, by SIGTERM, by kill -9.

With NIGHTLY=1 the other host is a network namespace, and throughput is measured.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import started_server
from penstock.common.broker.scale import Scale
from penstock.common.errors import RunNotReady
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor.overview import read_overview
from penstock.common.monitor.snapshot import read_audit
from tests.chaos.tokens import read_diary
from tests.e2e.forked import Forked, ForkedSite
from tests.e2e.site import FAKE_PROCFILE, ROOT, Site
from tests.e2e.test_two_hosts import FAKE, LEARNER, Hosts, hosts
from tests.helpers import NIGHTLY, nightly, wait_until
from tests.judge import judge

__all__ = ["hosts"]

URL = f"redis://:secret@{LEARNER}:6399"
MEASURED_S = 45
VARIABLES = {
    "LEARNER_MAX_STEPS": "100000", "LEARNER_EVAL_DATASET": "", "LEARNER_MAX_STALENESS": "8",
    "LEARNER_NUM_GENERATIONS": "2", "ACTOR_MAX_NUM_SEQS": "2", "FAKE_TOKEN_DELAY_S": "0.1",
    "OMP_NUM_THREADS": "1",
    "ACTOR_GRACE_S": "10",  # they give back at once
    "RUN_LEASE_S": "10",  # a lease that runs out on a slow machine would cost tokens too
}  # fmt: skip
DIARY = "diary.jsonl"
A_SECOND_EACH = {
    "LEARNER_MAX_COMPLETION_LENGTH": "1", "FAKE_TOKEN_DELAY_S": "1.0", "LEARNER_GROUPS_PER_STEP": "8",
}  # fmt: skip
"""Of a run whose groups take an actor a second each, to measure how many it makes."""


class Fleet:
    """A run that goes on at `site`, as its queue server shows it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        folder = RunFolder(site.run_folder)
        wait_until(folder.server_url.is_file, "the queue server's address")
        self.connection = Connection(started_server(folder), 60, 60)
        self.scale = Scale(self.connection, Keys("e2e"))
        wait_until(self.scale.running, "the status of `penstock up`")

    def ask(self, actors: int) -> None:
        self.scale.request(self.scale.choose("", "actor"), "actor", actors)

    def joined(self) -> int:
        """How many actors work for the run; 0 before the run."""
        try:
            return len(read_overview(self.connection, "e2e").running("actor"))
        except RunNotReady:
            return 0

    def wait_for(self, actors: int) -> None:
        self.site.wait_for(lambda: self.joined() == actors, f"{actors} actors")

    def started(self, child: str) -> int:
        lines = [line for line in list(self.site.lines) if "-- Started as process" in line]
        return sum(line.startswith(f"{child} ") for line in lines)

    def ended(self, child: str) -> bool:
        lines = [line for line in list(self.site.lines) if "-- Ended with exit code 0" in line]
        return any(line.startswith(f"{child} ") for line in lines)

    def rate(self) -> float:
        """Groups per second that the actors hand on."""
        before, then = self._handed_on(), time.monotonic()
        time.sleep(MEASURED_S)
        return (self._handed_on() - before) / (time.monotonic() - then)

    def _handed_on(self) -> int:
        return int(self.connection.execute("XINFO", "STREAM", Keys("e2e").rollouts)[b"entries-added"])


def come_and_go(fleet: Fleet, start_by_hand, measures: bool) -> tuple[float, float]:
    """1 -> 4 -> 1 -> 3 actors; groups per second with one and with four, if it `measures`, else 0."""
    fleet.wait_for(1)
    fleet.site.wait_for(lambda: fleet.site.steps() >= 1, "a step")
    alone = fleet.rate() if measures else 0.0
    fleet.ask(3)
    hand = start_by_hand()
    try:
        fleet.wait_for(4)
        together = fleet.rate() if measures else 0.0
        hand.send_signal(signal.SIGTERM)
        fleet.ask(1)
        fleet.wait_for(1)
        assert hand.wait(60) == 0
    finally:
        hand.kill()
    again = ("actor.2", "actor.3")
    fleet.site.wait_for(
        lambda: all(map(fleet.ended, again)), "both to end, so that their names are free"
    )
    fleet.ask(3)
    fleet.wait_for(3)
    assert read_diary(fleet.site.folder / DIARY).lost == 0  # three actors were told to end
    fleet.site.kill("actor.2")
    os.kill(fleet.site.pid_of("actor.3"), signal.SIGTERM)
    fleet.site.wait_for(lambda: sum(map(fleet.started, again)) == 6, "both to be started again")
    fleet.wait_for(3)
    step = fleet.site.steps()
    fleet.site.wait_for(lambda: fleet.site.steps() >= step + 3, "three steps more")
    return alone, together


@pytest.mark.e2e
@pytest.mark.parametrize("host", ["same", *(["namespace"] if NIGHTLY else [])])
def test_actors_come_and_go_in_one_run_and_nothing_is_lost(
    host: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if host == "same":
        diary = {"FAKE_DIARY": str(tmp_path / DIARY)}
        site: Site = ForkedSite(tmp_path, FAKE_PROCFILE, **VARIABLES, **diary)
        site.start()
        elsewhere = os.environ | site.variables | {"RUN_DIR": str(tmp_path / "elsewhere")}
        fleet = Fleet(site)
        elsewhere["REDIS_URL"] = started_server(RunFolder(site.run_folder))
        by_hand = lambda: Forked(FAKE, [], ROOT, elsewhere)  # noqa: E731
    else:
        other: Hosts = request.getfixturevalue("hosts")
        (password := tmp_path / "password").write_text("secret\n")
        password.chmod(0o600)
        variables = VARIABLES | A_SECOND_EACH | {"RUN_QUEUE_PASSWORD_FILE": str(password)}
        site = Site(tmp_path, FAKE_PROCFILE, **variables)
        site.command = ["ip", "netns", "exec", other.learner, *site.command]
        other.variables |= {"ACTOR_MAX_NUM_SEQS": "2", "FAKE_TOKEN_DELAY_S": "1.0"}
        site.start("--listen", f"{LEARNER}:6399")
        fleet = Fleet(site)
        by_hand = lambda: other.start_worker(URL, FAKE)  # noqa: E731
    with site:
        alone, together = come_and_go(fleet, by_hand, host == "namespace")
        audit = read_audit(fleet.connection, "e2e")
    assert not audit.faults
    faults = judge(site.run_folder)["faults"]  # a run that was stopped has no end, and open tickets
    assert [one for one in faults if "never ended" not in one and "no end record" not in one] == []
    children = ("queue.1", "learner.1", "rewarder.1", "actor.1")
    assert [fleet.started(child) for child in children] == [1, 1, 1, 1], site.lines
    assert [fleet.started(child) for child in ("actor.2", "actor.3")] == [3, 3]
    print(f"groups/s: {alone:.3f} with 1 actor, {together:.3f} with 4")
    assert together >= 0.95 * 4 * alone


@pytest.mark.e2e
@nightly
def test_autoscale_adds_actors_while_the_learner_waits(tmp_path: Path) -> None:
    site = ForkedSite(tmp_path, FAKE_PROCFILE, **VARIABLES | {"LEARNER_MAX_STALENESS": "2"})
    site.start()
    fleet = Fleet(site)
    arguments = ["autoscale", "--max", "3", "--target-wait", "0.3"]
    scaling = Forked("penstock.deploy", arguments, ROOT, os.environ | site.variables)
    try:
        fleet.wait_for(3)
        scaling.send_signal(signal.SIGTERM)
        said = scaling.read(60)
        assert scaling.wait(60) == 0, said
        assert "-> 3 actors, as the learner waits" in said
        assert fleet.started("learner.1") == 1
    finally:
        scaling.kill()
        site.stop()
    assert not [one for one in judge(site.run_folder)["faults"] if "times" in one]
