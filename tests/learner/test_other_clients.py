"""Single writes of another client to a running learner's keys: each is corrected, or ends it by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from penstock.common.broker import run_view
from penstock.common.broker.connection import Connection
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError, DeadlineExceeded, RunNotReady, RunTaken
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.monitor.snapshot import read_consumers
from penstock.common.phases import Phases
from penstock.common.wire.codec import decode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Ticket, Version
from penstock.learner.start import _naming_the_successor
from penstock.learner.streams import learner_queue
from penstock.learner.streams.heartbeat import Heartbeat
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.helpers import wait_until
from tests.learner.builders import claim_next
from tests.learner.test_flow import Bench

MANY = 1500


@pytest.fixture
def bench(tmp_path, connection, keys):
    bench = Bench(tmp_path, connection, keys)
    bench.publish(0)
    bench.flow.issue_tickets(0)
    return bench


def check(bench: Bench) -> None:
    """What the learner does four times per lease."""
    bench.flow._check_at = 0.0
    bench.flow._check_server()


def hset(key: str, field: str | bytes, value: Any) -> Callable[[Bench], None]:
    return lambda bench: bench.connection.execute("HSET", getattr(bench.keys, key), field, value)


def place(bench: Bench, ticket: str = "train:2") -> bytes:
    return bench.connection.execute("HGET", bench.keys.open, ticket)


def at_place_of_2(ticket: str | bytes) -> Callable[[Bench], None]:
    return lambda bench: bench.connection.execute("HSET", bench.keys.open, ticket, place(bench))


def other_version(version: bytes) -> Callable[[Bench], None]:
    def write(bench: Bench) -> None:
        forged = place(bench).rpartition(b"|")[0] + b"|" + version
        bench.connection.execute("HSET", bench.keys.open, "train:2", forged)

    return write


def many(bench: Bench) -> None:
    flat = [part for number in range(1000, 1000 + MANY) for part in (f"train:{number}", place(bench))]
    bench.connection.execute("HSET", bench.keys.open, *flat)


def command(name: str, *parts: Any) -> Callable[[Bench], None]:
    """A command on the run's keys, which are named in braces."""
    return lambda bench: bench.connection.execute(
        name, *(part.format(**vars(bench.keys)) if isinstance(part, str) else part for part in parts)
    )


def on(stream: str) -> Callable[[Bench], None]:
    """An entry of train:2 on a stream, as its place."""

    def write(bench: Bench) -> None:
        key = getattr(bench.keys, stream)
        entry = bench.connection.execute("XADD", key, "*", "t", "train:2", "d", b"x").decode()
        bench.connection.execute("HSET", bench.keys.open, "train:2", f"{key}|{entry}|1.0")

    return write


LARGEST = "18446744073709551615-18446744073709551615"
OPEN_WRITES: dict[str, Callable[[Bench], None]] = {
    "another ticket at a place": at_place_of_2("train:999"),
    "an eval ticket": at_place_of_2("eval:1.0:1"),
    "leading zeros": at_place_of_2("train:007"),
    "an exponent": at_place_of_2("train:1e3"),
    "10^18": at_place_of_2(f"train:{10**18}"),
    "19 digits": at_place_of_2("train:" + "9" * 19),
    "no text": at_place_of_2(b"\xff\xfe"),
    "no name": at_place_of_2(b""),
    "no place": hset("open", "train:2", b"nonsense"),
    "an empty place": hset("open", "train:2", b""),
    "another run's stream": hset("open", "train:2", b"penstock:{other}:tickets|1-1|1.0"),
    "no entry": hset("open", "train:2", b"penstock:{x}:tickets|1-1|1.0"),
    "a version of 3x10^8": other_version(b"1.300000000"),
    "a version of words": other_version(b"newest"),
    "1500 tickets": many,
    "a ticket less": command("HDEL", "{open}", "train:2"),
    "no open": command("DEL", "{open}"),
    "open as a string": command("SET", "{open}", "x"),
    "on the stream of evaluations": on("evaluated"),
    "on the stream of eval tickets": on("eval_tickets"),
    "no entries": command("XTRIM", "{tickets}", "MAXLEN", 0),
    "no stream": command("DEL", "{tickets}"),
    "the stream as a string": command("SET", "{tickets}", "x"),
    "the largest id": command("XADD", "{tickets}", LARGEST, "x", "y"),
}
LEDGER_WRITES: dict[str, Callable[[Bench], None]] = {
    "too many": hset("ledger", "issued", 300_000_000),
    "nonsense": hset("ledger", "issued", "x"),
    "another count": hset("ledger", "more", 5),
    "no ledger": command("DEL", "{ledger}"),
    "ledger as a stream": command("XADD", "{ledger}", "*", "x", "y"),
}


@pytest.mark.parametrize("name", [*OPEN_WRITES, *LEDGER_WRITES])
def test_what_another_client_wrote_about_tickets_is_restored_from_the_ledger(bench, name):
    if name == "ledger as a stream":
        bench.connection.execute("DEL", bench.keys.ledger)
    open_before, totals_before = dict(bench.ledger.open), dict(bench.ledger.totals)
    (OPEN_WRITES | LEDGER_WRITES)[name](bench)
    bench.queue.restore()
    with structlog.testing.capture_logs() as logs:
        check(bench)
        check(bench)
    totals, tickets = bench.balance()
    assert tickets == sorted(open_before)
    assert bench.ledger.open == open_before
    assert {name: count for name, count in totals.items() if count} == totals_before
    assert bench.flow._difference(bench.queue.places()) == ""
    assert len(logs) <= 2
    bench.work()
    assert len(bench.train(0)) == 2
    assert len(bench.train(1)) == 2
    bench.balance()


def test_a_forged_place_costs_the_other_ticket_no_work(bench):
    """Withdrawn by its place, train:999 would take the entry that train:2 is answered on."""
    entry = place(bench)
    at_place_of_2("train:999")(bench)
    check(bench)
    assert place(bench) == entry


def test_a_calm_server_is_left_alone(bench):
    before = bench.connection.execute("HGETALL", bench.keys.open)
    bench.work(limit=2)
    with structlog.testing.capture_logs() as logs:
        check(bench)
        bench.train(0)
        bench.flow.issue_tickets(1)
        check(bench)
        bench.queue.restore()
    assert logs == []
    assert place(bench, "train:3") == before[b"train:3"]


def test_ends_that_are_not_in_the_journal_yet_are_no_difference(bench):
    bench.ledger.close(next(iter(bench.ledger.open)), "filtered", "no spread")
    assert bench.flow._difference(bench.queue.places()) == ""


def test_the_server_is_checked_no_more_than_four_times_per_lease(bench):
    check(bench)
    at_place_of_2("train:999")(bench)
    bench.flow._check_server()
    assert b"train:999" in bench.connection.execute("HGETALL", bench.keys.open)


# Contract, weights, state, and the claim's texts

TEXTS = {"contract": b"x", "weights": b"\xff", "state": b"ended"}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("how", ["SET", "DEL", "LPUSH"])
def test_what_the_learner_published_is_restored_and_logged_once(bench, name, how):
    key = getattr(bench.keys, name)
    before = bench.connection.execute("GET", key)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            if how == "LPUSH":
                bench.connection.execute("DEL", key)
            bench.connection.execute(how, key, *([] if how == "DEL" else [TEXTS[name]]))
            bench.queue.restore()
            assert bench.connection.execute("GET", key) == before
    assert len(logs) == 1


def test_the_heartbeat_restores_them_while_the_main_loop_is_busy(bench):
    view = RunView(bench.connection, bench.keys)
    with Heartbeat(bench.queue, Phases(), 0.4, stall_timeout_s=600.0):
        wait_until(lambda: view.learner().phase == "starting", "a heartbeat")
        bench.connection.execute("SET", bench.keys.state, "ended")
        assert not view.ended()  # its learner holds the lease
        wait_until(lambda: bench.connection.execute("GET", bench.keys.state) == b"running", "the state")


def test_a_run_has_ended_when_its_learner_left(bench):
    view = RunView(bench.connection, bench.keys)
    with Heartbeat(bench.queue, Phases(), 600.0, stall_timeout_s=600.0):
        wait_until(lambda: view.learner().phase == "starting", "a heartbeat")
        bench.flow.release_workers()
        bench.queue.restore()
        assert not view.ended()
    assert view.ended()


def test_a_run_has_ended_when_its_learner_was_killed_after_it_said_so(bench, connection, keys):
    LearnerQueue(connection, keys, 2).claim("nonce", "killed", 0.2)
    connection.execute("SET", keys.state, "ended")
    view = RunView(connection, keys)
    assert not view.ended()
    wait_until(view.ended, "its lease to run out")


@pytest.mark.parametrize("written", [("HSET", "lease", "x"), ("HDEL", "lease"), ("DEL",), ("SET", "x")])
def test_a_lease_that_no_learner_wrote_does_not_end_the_run(
    bench, connection, keys, monkeypatch, written
):
    """Another client writes the state too. A learner that lives restores both soon."""
    command, *values = written
    connection.execute(command, keys.fence, *values)
    connection.execute("SET", keys.state, "ended")
    view = RunView(connection, keys)
    assert not view.ended()
    assert not view.ended()
    monkeypatch.setattr(run_view, "_UNREADABLE_LEASE_S", 0.2)
    wait_until(view.ended, "as long as nobody sends a heartbeat")


@pytest.mark.parametrize("field", ["nonce", "holder"])
def test_the_claims_texts_are_restored(bench, field):
    before = bench.connection.execute("HGET", bench.keys.fence, field)
    hset("fence", field, "x")(bench)
    bench.queue.restore()
    assert bench.connection.execute("HGET", bench.keys.fence, field) == before


@pytest.mark.parametrize("name", ["tickets", "ledger"])
def test_a_forged_nonce_does_not_end_the_learner_that_claims_again(bench, name):
    """It claims again for another damage before the heartbeat restores the nonce."""
    before = bench.connection.execute("HGET", bench.keys.fence, "nonce")
    hset("fence", "nonce", "x")(bench)
    bench.connection.execute("SET", getattr(bench.keys, name), "a text")
    bench.flow.join()
    bench.queue.set_totals({"issued": 1})
    assert bench.connection.execute("HGET", bench.keys.fence, "nonce") == before


def test_a_claim_on_another_server_finds_the_run_of_another_folder(bench):
    hset("fence", "nonce", "x")(bench)
    bench.connection.restarts += 1
    with pytest.raises(ConfigError, match="another folder"):
        bench.flow.join()


def take_all(bench: Bench) -> WorkStream:
    worker = WorkStream(bench.connection, bench.keys, bench.keys.tickets, "w", 30.0, 3)
    assert len(worker.take(9)) == 4
    return worker


STOLEN: dict[str, Callable[[Bench], None]] = {
    "the consumer is deleted": command("XGROUP", "DELCONSUMER", "{tickets}", "workers", "w"),
    "the group is set past all entries": command("XGROUP", "SETID", "{tickets}", "workers", "$"),
    "another group hides that": lambda bench: [
        bench.connection.execute("XGROUP", *words)
        for words in (
            ("CREATE", bench.keys.tickets, "a", "0"),
            ("SETID", bench.keys.tickets, "workers", "$"),
        )
    ],
}


@pytest.mark.parametrize("name", STOLEN)
def test_an_entry_that_nobody_holds_and_nobody_will_get_is_issued_again(bench, name):
    if "consumer" in name:
        take_all(bench)
    STOLEN[name](bench)
    check(bench)
    take_all(bench)
    assert bench.balance()[1] == sorted(bench.ledger.open)


def test_a_deleted_group_is_made_again_and_its_work_given_out(bench):
    bench.connection.execute("XGROUP", "DESTROY", bench.keys.tickets, "workers")
    worker = WorkStream(bench.connection, bench.keys, bench.keys.tickets, "w", 30.0, 3)
    with pytest.raises(RunNotReady):
        worker.take(1)
    bench.queue.restore()
    assert len(worker.take(9)) == 4


# Consumers


def consumers(bench: Bench) -> set[str]:
    return {one.name for one in read_consumers(bench.connection, bench.keys.tickets)}


def test_consumers_that_do_nothing_for_a_day_are_removed_unless_they_hold_work(bench, monkeypatch):
    holder, idle = (
        WorkStream(bench.connection, bench.keys, bench.keys.tickets, name, 30.0, 3)
        for name in ("holder", "idle")
    )
    (entry,) = idle.take(1)
    assert idle.give_back(entry)
    taken = holder.take(9)
    assert len(taken) == 4
    bench.queue.restore()
    assert consumers(bench) == {"holder", "idle"}
    monkeypatch.setattr(learner_queue, "_FORGOTTEN_S", 0.05)
    with structlog.testing.capture_logs() as logs:
        wait_until(lambda: bench.queue.restore() or consumers(bench) == {"holder"}, "the removal")
    assert logs == []
    assert not bench.queue.damaged
    assert holder.give_back(taken[0])
    assert len(idle.take(1)) == 1  # it lives: it is made again
    assert consumers(bench) == {"holder", "idle"}


# Outcomes


def wait_longer(bench: Bench) -> None:
    """Let the learner wait for up to a minute, with a short lease."""
    bench.flow._run = RunSettings(name="x", lease_s=0.2)
    bench.flow._deadline = Deadline(60.0)


def hide_new_outcomes(bench: Bench) -> None:
    """Let the learner read an id of tomorrow, then begin the stream anew."""
    ahead_ms = 1000 * bench.connection.execute("TIME")[0] + 80_000_000
    bench.connection.execute("XADD", bench.keys.scored, f"{ahead_ms}-0", "t", "train:99", "d", "x")
    bench.commit_log.read("train")
    bench.connection.execute("DEL", bench.keys.scored)


def place_an_old_outcome(bench: Bench) -> None:
    """An entry that was read before its ticket was issued, as the ticket's place."""
    ticket = bench.ledger.next_train_ticket()
    entry = bench.connection.execute("XADD", bench.keys.scored, "*", "t", ticket, "d", "x").decode()
    bench.commit_log.read("train")
    bench.flow._issue([ticket])
    bench.connection.execute("HSET", bench.keys.open, ticket, f"{bench.keys.scored}|{entry}|1.0")
    bench.ledger.close(TicketId.train(0), "unused")  # both batches need the ticket


@pytest.mark.parametrize("write", [hide_new_outcomes, place_an_old_outcome])
def test_an_outcome_that_the_learner_has_passed_by_is_not_waited_for_in_vain(bench, write):
    wait_longer(bench)
    write(bench)
    bench.work()
    bench.train(0)
    check(bench)
    bench.work()
    bench.train(1)


def test_outcomes_of_tickets_that_are_not_open_are_deleted_and_are_no_progress(bench):
    def write_another() -> None:
        bench.connection.execute("XADD", bench.keys.scored, "*", "t", "train:99", "d", "x")
        bench.connection.execute("XADD", bench.keys.evaluated, "*", "t", "eval:1.0:99", "d", "x")

    bench.flow.evaluator.start(Version(1, 0))
    bench.flow._phases.poll = write_another
    with pytest.raises(DeadlineExceeded, match="no results for"):
        bench.train(0)
    for stream in bench.keys.outcome_streams:  # the last poll wrote after the last read
        assert bench.connection.execute("XLEN", stream) <= 1


# A raised fence


@pytest.mark.parametrize("fence", [2, 1002, 1003, 300_000_000, 999_999_999_999_999])
def test_a_raised_fence_ends_the_learner_and_the_next_one_claims_above_it(bench, tmp_path, fence):
    view = RunView(bench.connection, bench.keys)
    bench.connection.execute("HSET", bench.keys.fence, "incarnation", fence)
    folder = LearnerFolder(tmp_path, 1)
    found = rf"no file in .* claims incarnation {fence}.*start this one again"
    with pytest.raises(RunTaken, match=found), _naming_the_successor(folder, 1, view):
        check(bench)
    assert RunTaken.exit_code == 73
    following = Bench(tmp_path, bench.connection, bench.keys)
    assert following.claim.incarnation == (fence + 1 if fence <= 1002 else 2)
    assert following.balance()[1] == sorted(bench.ledger.open)


def test_a_learner_with_a_successor_in_the_folder_names_its_claim(bench, tmp_path):
    claim_next(tmp_path, known=1)
    LearnerQueue(bench.connection, bench.keys, 2).claim("nonce", "next")
    view = RunView(bench.connection, bench.keys)
    folder = LearnerFolder(tmp_path, 1)
    with (
        pytest.raises(RunTaken, match=r"incarnation 2 claimed .* too"),
        _naming_the_successor(folder, 1, view),
    ):
        check(bench)


@pytest.mark.parametrize("text", [b"x", b"-1", b"", b"9" * 30, b"1e9", b"0"])
@pytest.mark.parametrize("more", [(), ("nonce", "x"), ("holder", "thief", "lease", 86_400_000)])
def test_a_learner_claims_again_over_nonsense_in_the_fence(bench, text, more):
    """Ended, its successor would trust what else another client wrote: the nonce, a thief's lease."""
    bench.connection.execute("HSET", bench.keys.fence, "incarnation", text, *more)
    check(bench)
    assert bench.connection.execute("HGET", bench.keys.fence, "incarnation") == b"1"
    assert bench.queue.damaged
    check(bench)
    bench.queue.restore()
    assert bench.connection.execute("HGET", bench.keys.fence, "nonce") == b"nonce"
    assert bench.connection.execute("HGET", bench.keys.fence, "holder") != b"thief"
    assert bench.balance()[1] == sorted(bench.ledger.open)


@pytest.mark.parametrize("written", [("SET", "x"), ("DEL",)])
def test_a_learner_claims_again_where_its_fence_was(bench, written):
    """Neither write tells workers that the learner has left, although the state says "ended"."""
    command, *values = written
    bench.queue.own("here:/runs/x", "process 7")
    bench.connection.execute(command, bench.keys.fence, *values)
    bench.connection.execute("SET", bench.keys.state, "ended")
    view = RunView(bench.connection, bench.keys)
    check(bench)
    assert view.incarnation() == 1
    assert not view.ended()
    bench.queue.restore()
    assert bench.connection.execute("GET", bench.keys.state) == b"running"
    assert bench.connection.execute("HGET", bench.keys.fence, "folder") == b"here:/runs/x"


@pytest.mark.parametrize("lease_ms", [10**14, 86_400_001, "-1", "x", ""])
def test_a_lease_that_no_learner_wrote_does_not_block_the_next_start(bench, lease_ms):
    bench.connection.execute("HSET", bench.keys.fence, "holder", "thief", "lease", lease_ms)
    LearnerQueue(bench.connection, bench.keys, 2).claim("nonce", "next", 30.0)
    assert bench.connection.execute("HGET", bench.keys.fence, "holder") == b"next"


def test_the_longest_lease_is_respected(bench):
    first = LearnerQueue(bench.connection, bench.keys, 1)
    first.claim("nonce", "first", 86_400.0)
    threading.Timer(0.5, first.beat, [86_400.0, "working"]).start()
    with pytest.raises(RunTaken, match="lease of 86400 s"):
        LearnerQueue(bench.connection, bench.keys, 2).claim("nonce", "next", 30.0)


# A resumed learner


def forge(bench: Bench, number: int, version: str = "1.0", entry: bool = True) -> None:
    """A ticket as issued by nobody, with an entry of its own."""
    where = b"1-1"
    if entry:
        where = bench.connection.execute(
            "XADD", bench.keys.tickets, "*", "t", f"train:{number}", "d", b"forged"
        )
    text = b"%s|%s|%s" % (bench.keys.tickets.encode(), where, version.encode())
    bench.connection.execute("HSET", bench.keys.open, f"train:{number}", text)


def resumed(bench: Bench) -> Bench:
    return Bench(bench.folder, bench.connection, bench.keys)


@pytest.mark.parametrize(
    ("number", "version", "entry"),
    [
        (999, "1.0", True),
        (10**14, "1.0", True),
        (6, "1.0", True),
        (4, "1.0", False),
        (4, "1.300000000", True),
        (4, "300000000.0", True),
        (4, "x", True),
    ],
)
def test_a_resumed_learner_adopts_no_ticket_that_none_can_have_issued(bench, number, version, entry):
    issued = sorted(bench.ledger.open)
    forge(bench, number, version, entry)
    following = resumed(bench)
    assert following.balance()[1] == issued
    assert following.ledger.next_number == 4


def test_a_resumed_learner_adopts_a_bounded_number_of_tickets(bench):
    for number in range(4, 304):
        forge(bench, number)
    following = resumed(bench)
    assert 4 <= following.ledger.train_open < 200
    assert following.balance()[1] == sorted(following.ledger.open)


def test_what_it_adopts_is_issued_as_itself(bench):
    forge(bench, 4)
    following = resumed(bench)
    work = WorkStream(bench.connection, bench.keys, bench.keys.tickets, "w", 30.0, 3)
    payloads = {
        entry.ticket: entry.payload for entry in work.take(9) if entry.ticket in following.ledger.open
    }
    assert decode(payloads["train:4"], Ticket).version == Version(1, 0)


# The eviction policy


def test_a_changed_eviction_policy_ends_the_learner_and_is_logged_in_an_update(
    tmp_path, private_server, keys
):
    connection = Connection(private_server.url, 10, 10)
    bench = Bench(tmp_path, connection, keys)
    check(bench)
    connection.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with (
        structlog.testing.capture_logs() as logs,
        Heartbeat(bench.queue, Phases(), 0.2, stall_timeout_s=600.0),
    ):
        wait_until(lambda: [line for line in logs if "allkeys-lru" in line["event"]], "the heartbeat")
    with pytest.raises(
        ConfigError, match=r"maxmemory-policy allkeys-lru.*set maxmemory-policy noeviction"
    ):
        check(bench)


def test_a_malformed_result_and_a_damaged_count_of_such_do_not_end_the_learner(bench):
    bench.connection.execute("SET", bench.keys.malformed, "x")
    bench.connection.execute("XADD", bench.keys.scored, "*", "x", "y")
    bench.work(limit=2)
    assert len(bench.train(0)) == 2
    bench.queue.restore()
    assert bench.connection.execute("TYPE", bench.keys.malformed) == b"none"


def test_a_place_for_the_next_ticket_is_withdrawn(bench):
    """Adopted with its version, which never comes, actors would hold the ticket for ever."""
    bench.work()
    assert len(bench.train(0)) == 2
    name = TicketId.train(bench.ledger.next_number)
    forged = f"{bench.keys.tickets}|0-1|1.999999999999999"
    bench.connection.execute("HSET", bench.keys.open, name, forged)
    bench.flow.issue_tickets(1)
    assert str(bench.ledger.open[name]) == "1.0"
    check(bench)
    assert place(bench, name).endswith(b"|1.0")
    bench.balance()


def test_a_learner_of_another_folder_claims_nothing_over_the_runs_own(bench, connection, keys):
    """It stood still while the run was discarded and begun anew."""
    stalled = LearnerQueue(connection, keys, 7)
    stalled.claim("nonce", "stalled")
    connection.execute("DEL", *keys.all)
    LearnerQueue(connection, keys, 1).claim("new nonce", "new", 60.0)
    with pytest.raises(ConfigError, match="another folder"):
        stalled.beat(15.0, "busy")
    assert connection.execute("HGET", keys.fence, "nonce") == b"new nonce"


def test_a_superseded_learner_claims_no_fence_that_another_client_deleted(connection, keys):
    first = LearnerQueue(connection, keys, 1)
    first.claim("nonce", "first")
    LearnerQueue(connection, keys, 2).claim("nonce", "second")
    with pytest.raises(RunTaken):
        first.beat(15.0, "busy")
    connection.execute("DEL", keys.fence)
    with pytest.raises(RunNotReady):
        first.beat(15.0, "busy")
    assert not connection.execute("EXISTS", keys.fence)
