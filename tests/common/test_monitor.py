from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.command import execute_command
from penstock.common.errors import RunNotReady
from penstock.common.files.lock import hold_lock
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor.snapshot import read_audit, read_dead, read_status
from penstock.common.queues import Queues
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from tests.common.builders import Run
from tests.common.test_connection import closed_port


def queues(arguments: list[str]) -> int:
    return execute_command(Queues, "queues", arguments)


def contract() -> Contract:
    return Contract("model", "hash", "float32", 64, (RewardSpec("accuracy"),), True, 2, 8)


@pytest.fixture
def busy(run: Run, monkeypatch: pytest.MonkeyPatch, queue_server: LocalServer) -> Run:
    """Five tickets: one closed, one scored, one on its way, one held, one not taken yet."""
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    run.learner.publish_contract(encode(contract()))
    run.learner.announce(Weights(Version(1, 3), "path", "hash", ""))
    run.learner.set_state("running")
    run.issue(1, 2, 3, 4, 5)
    first, second, third, _ = run.actor("actor-1").take(4)
    for entry in (first, second, third):
        run.actor().handoff(entry, run.keys.rollouts, b"group")
    run.rewarder().handoff(run.rewarder().take(1)[0], run.keys.scored, b"scored")
    run.learner.close("train", {"train:2": "stale"})
    return run


def test_the_status_counts_what_lies_where(busy: Run, run_name: str) -> None:
    status = read_status(busy.connection, run_name)
    streams = {stream.name: stream for stream in status.streams}
    assert (status.state, status.incarnation, status.version) == ("running", 1, "1.3")
    assert (status.credit, status.outstanding, status.open, status.dead) == (8, 4, 4, 0)
    assert status.ledger == {"issued": 5, "stale": 1}
    tickets = streams["tickets"]
    assert (tickets.depth, tickets.pending, tickets.undelivered) == (2, 1, 1)
    assert [(one.name, one.held) for one in tickets.consumers] == [("actor-1", 1)]
    assert (streams["rollouts"].depth, streams["scored"].depth) == (1, 1)
    assert tickets.holder == "actor-1"
    assert tickets.held_s is not None
    assert (streams["rollouts"].holder, streams["rollouts"].held_s) == ("", None)
    assert tickets.oldest_s is not None
    assert streams["evaluated"].oldest_s is None


def test_the_audit_names_each_ticket_in_flight(busy: Run, run_name: str) -> None:
    audit = read_audit(busy.connection, run_name)
    found = {one.ticket: (one.stream, one.holder, one.attempt) for one in audit.in_flight}
    assert found == {
        "train:1": ("scored", "", 1),
        "train:3": ("rollouts", "", 1),
        "train:4": ("tickets", "actor-1", 1),
        "train:5": ("tickets", "", 1),
    }
    assert audit.faults == ()


def test_the_audit_says_which_ticket_lost_its_entry(busy: Run, run_name: str) -> None:
    busy.connection.execute("XTRIM", busy.keys.scored, "MAXLEN", 0)
    (fault,) = read_audit(busy.connection, run_name).faults
    assert fault.startswith("ticket train:1 is open, but its entry")


def test_the_tickets_in_flight_come_oldest_first(busy: Run, run_name: str) -> None:
    order = ["9-0", "9-2", "9-10", "10-0"]
    for number, entry in enumerate(reversed(order), 6):
        place = f"{busy.keys.tickets}|{entry}|1.0"
        busy.connection.execute("HSET", busy.keys.open, f"train:{number}", place)
    found = [one.entry for one in read_audit(busy.connection, run_name).in_flight]
    assert found[:4] == order


def test_a_forged_entry_of_any_length_ends_no_audit(busy: Run, run_name: str) -> None:
    """Python refuses to read a number of over 4,300 digits."""
    before = read_audit(busy.connection, run_name).in_flight
    for number, entry in enumerate((f"{'9' * 5000}-0", f"0-{'9' * 5000}"), 6):
        place = f"{busy.keys.tickets}|{entry}|1.0"
        busy.connection.execute("HSET", busy.keys.open, f"train:{number}", place)
    after = read_audit(busy.connection, run_name).in_flight
    assert sorted(one.ticket for one in after) == sorted(one.ticket for one in before)


@pytest.mark.parametrize(("amount", "sentence"), [(2, "2 missing"), (-1, "1 too many")])
def test_the_audit_says_how_many_tickets_are_off(
    busy: Run, run_name: str, amount: int, sentence: str
) -> None:
    busy.connection.execute("HINCRBY", busy.keys.ledger, "issued", amount)
    (fault,) = read_audit(busy.connection, run_name).faults
    assert fault.endswith(sentence)


def test_a_run_that_is_not_there_is_named(connection: Connection) -> None:
    with pytest.raises(RunNotReady, match="no run named nobody"):
        read_status(connection, "nobody")


def test_dead_tickets_are_listed_with_their_reason(run: Run, run_name: str) -> None:
    run.issue(1)
    worker = run.actor()
    worker.bury(worker.take(1)[0], "train", "killed three engines")
    assert read_dead(run.connection, run_name, 10) == [("train:1", "killed three engines")]


def test_queues_audit_exits_with_0_while_the_books_balance_and_1_otherwise(
    busy: Run, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queues(["audit", "--run.name", run_name]) == 0
    assert "balances: 5 = 1 ended + 4 in flight" in capsys.readouterr().out
    busy.connection.execute("HINCRBY", busy.keys.ledger, "stale", 1)
    assert queues(["audit", "--run.name", run_name]) == 1
    assert "1 too many" in capsys.readouterr().out


def test_queues_prints_json_for_scripts(
    busy: Run, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queues(["status", "--json", "--run.name", run_name]) == 0
    assert json.loads(capsys.readouterr().out)["open"] == 4
    assert queues(["audit", "--run.name", run_name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


def test_dead_tickets_are_printed_as_json_one_per_line(
    run: Run,
    run_name: str,
    queue_server: LocalServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    run.learner.set_state("running")
    assert queues(["dead", "--run.name", run_name]) == 0
    assert capsys.readouterr().out == "none\n"
    assert queues(["dead", "--json", "--run.name", run_name]) == 0
    assert capsys.readouterr().out == ""
    run.issue(1, 2)
    worker = run.actor()
    for entry in worker.take(2):
        worker.bury(entry, "train", "killed three engines")
    assert queues(["dead", "--json", "--run.name", run_name]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["ticket"] for row in rows} == {"train:1", "train:2"}
    assert {row["reason"] for row in rows} == {"killed three engines"}


def test_dead_tickets_are_shown_by_reason_and_dropped_when_asked(
    run: Run,
    run_name: str,
    queue_server: LocalServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    run.issue(1, 2, 3, 4, 5)
    worker = run.actor()
    for entry in worker.take(5):
        who = f" (reported by rewarder-{entry.ticket[-1]})"
        worker.bury(entry, "train", "another\nline" if entry.ticket == "train:3" else f"no file x{who}")
    assert queues(["dead", "--drop", "--run.name", run_name]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "    4  train:5, train:4, train:2, ...: no file x", r"    1  train:3: another\nline"
    ]  # fmt: skip
    assert queues(["dead", "--run.name", run_name]) == 0
    assert capsys.readouterr().out == "none\n"


def test_queues_status_takes_the_runs_name_from_the_environment(
    busy: Run, run_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUN_NAME", run_name)
    assert queues(["status"]) == 0
    out = capsys.readouterr().out
    assert f"run {run_name} on" in out
    assert "actor-1: holds 1" in out
    assert " s old, held by actor-1" in out
    assert "held: those that a process works on" in out


def test_queues_takes_the_run_from_its_folder(
    busy: Run, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "runs" / run_name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert queues(["status", f"runs/{run_name}/", "--run.name", "another"]) == 0
    assert f"run {run_name} on" in capsys.readouterr().out
    assert queues(["status", run_name]) == 78
    assert f"there is no folder {run_name}; did you mean runs/{run_name}?" in capsys.readouterr().err


def test_a_folder_with_a_name_that_no_run_can_have_discards_nothing(
    busy: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queues(["discard", "--yes", str(tmp_path / "*")]) == 78
    assert busy.view.incarnation() == 1
    assert "RUN_NAME: String should match pattern" in capsys.readouterr().err


def test_queues_discard_deletes_the_data_of_an_own_server_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", "")
    run = tmp_path / "mine"
    with LocalServer(run) as server:
        Connection(server.url, 10.0, 10.0).execute("SET", "a key", "a value")
    data = run / "queue" / "appendonlydir"
    assert queues(["discard", str(run)]) == 78
    assert "repeat the command with --yes" in capsys.readouterr().err
    with hold_lock(RunFolder(run).up_lock, "`penstock up`"):
        assert queues(["discard", "--yes", str(run)]) == 73
    assert data.is_dir()
    assert queues(["discard", "--yes", str(run)]) == 0
    assert f"has ended: its data {data} are deleted" in capsys.readouterr().out
    with LocalServer(run) as server:
        assert Connection(server.url, 10.0, 10.0).execute("GET", "a key") is None


def test_queues_discard_deletes_only_when_told_yes_and_only_this_run(
    busy: Run, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run(busy.connection, type(busy.keys)(f"{run_name}-other"))
    other.issue(1)
    assert queues(["discard", "--run.name", run_name]) == 78
    assert busy.view.incarnation() == 1
    assert queues(["discard", "--yes", "--run.name", run_name]) == 0
    assert busy.connection.execute("EXISTS", *busy.keys.all) == 0
    assert len(other.entries(other.keys.tickets)) == 1
    assert "--yes" in capsys.readouterr().err


def test_queues_without_a_server_exits_with_69(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{closed_port()}")
    assert queues(["status", "--run.connect-timeout-s", "0.2"]) == 69
    assert "did not answer for 0.2 s" in capsys.readouterr().err


def test_queues_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert queues([]) == 0
    assert "audit" in capsys.readouterr().out
    assert queues(["audti"]) == 78
    said = capsys.readouterr().err
    assert "invalid choice: 'audti'" in said
    for name in ("status", "audit", "watch", "dead", "discard"):
        assert name in said
