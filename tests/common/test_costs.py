"""What actors and rewarders cost reaches the learner, as sums on a real queue server."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from penstock.common.broker.costs import FIELDS, CostReport, FleetCosts, Load
from penstock.common.broker.keys import Keys
from tests.common.builders import Run
from tests.helpers import AclUsers

BURN = (
    "import time\nprint(flush=True)\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
)


def spend(seconds: float) -> None:
    """Use the processor for so many seconds."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_all_processes_of_a_role_are_added_up(run: Run) -> None:
    fleet = FleetCosts(run.connection, run.keys.costs)
    for _ in range(2):
        report = CostReport(run.connection, run.keys.costs, "actor")
        report.note("generating")
        spend(0.05)
        report.note("waiting for tickets")
        report.send()
    found = fleet.take()
    assert 0.1 <= found["actor/generating_cpu_s"] <= found["actor/generating_s"] + 0.05
    assert found["actor/waiting_for_tickets_s"] > 0
    assert set(found) <= {field for field in FIELDS if field.startswith("actor/")}
    assert fleet.take() == {}


def test_the_time_of_subprocesses_is_counted_once(run: Run) -> None:
    fleet = FleetCosts(run.connection, run.keys.costs)
    report = CostReport(run.connection, run.keys.costs, "rewarder")
    name = "rewarder/subprocesses_cpu_s"
    report.send()  # other tests of this process may have subprocesses
    fleet.take()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=-1, stdout=-1) as child:
        assert child.stdout
        for _ in range(2):
            child.stdout.readline()
        report.send()
        assert fleet.take()[name] >= 0.25
        report.send()
        assert fleet.take().get(name, 0.0) < 0.25
        child.kill()
    report.send()
    assert fleet.take().get(name, 0.0) < 0.25


def test_a_report_is_sent_only_when_it_is_due(run: Run) -> None:
    fleet = FleetCosts(run.connection, run.keys.costs)
    report = CostReport(run.connection, run.keys.costs, "actor")
    report.send_if_due()
    assert fleet.take() == {}
    report._send_at = 0.0
    report.send_if_due()
    assert fleet.take()["actor/waiting_for_tickets_s"] > 0


def test_a_load_is_the_mean_share_of_places_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    load = Load(2)
    with load.use():
        now = 1.0
        with load.use():
            now = 2.0
        now = 3.0
        assert load.take() == pytest.approx(4 / 6)
        now = 4.0
    now = 5.0
    assert load.take() == pytest.approx(1 / 4), "a place in use before the last call counts from there"
    assert load.take() == 0.0


def test_an_emptied_server_starts_the_sums_again(run: Run) -> None:
    run.connection.execute("HSET", run.keys.costs, "actor/generating_s", "100")
    fleet = FleetCosts(run.connection, run.keys.costs)
    run.connection.execute("DEL", run.keys.costs)
    run.connection.execute("HSET", run.keys.costs, "actor/generating_s", "3")
    assert fleet.take() == {"actor/generating_s": 3.0}


@pytest.mark.parametrize("value", ["nan", "inf", "-5", "text", "", "1e400", "\xff"])
def test_what_no_process_wrote_is_left_out(run: Run, value: str) -> None:
    fleet = FleetCosts(run.connection, run.keys.costs)
    fields = ["actor/generating_s", value, "actor/unknown_s", "5", "rewarder/scoring_s", "2"]
    run.connection.execute("HSET", run.keys.costs, *fields)
    assert fleet.take() == {"rewarder/scoring_s": 2.0}


def test_a_report_that_cannot_be_stored_is_logged_once_and_ends_nothing(run: Run, capsys) -> None:
    report = CostReport(run.connection, run.keys.costs, "actor")
    run.connection.execute("SET", run.keys.costs, "text")
    fleet = FleetCosts(run.connection, run.keys.costs)
    for _ in range(2):
        report.send()
    assert fleet.take() == {}
    assert capsys.readouterr().err.count("lack this process's time") <= 1
    run.learner.restore()
    report.send()
    assert "actor/waiting_for_tickets_s" in fleet.take()


def test_the_users_of_actors_and_rewarders_may_report(acl_users: AclUsers, keys: Keys) -> None:
    fleet = FleetCosts(acl_users.learner, keys.costs)
    CostReport(acl_users.actor, keys.costs, "actor").send()
    CostReport(acl_users.rewarder, keys.costs, "rewarder").send()
    assert set(fleet.take()) >= {"actor/waiting_for_tickets_s", "rewarder/waiting_for_groups_s"}
