"""Entries, fields and keys that another client wrote: no role fails at them, or keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import structlog

from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.broker.work_stream import BEGINNING, Entry, WorkStream
from penstock.common.errors import MalformedMessage, WrongType
from penstock.common.monitor.snapshot import read_audit
from penstock.common.monitor.status_text import format_audit
from penstock.common.wire.codec import encode
from penstock.common.wire.messages import Verdict
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.builders import V0, Run
from tests.helpers import wait_until
from tests.learner.builders import CONTRACT

Fields = tuple[str | bytes | int, ...]

NO_T, NO_D, BAD_T = (
    "no field t, expected a ticket",
    "no field d, expected a message",
    "field t is no ticket, such as train:7",
)
BAD_A, OTHER = (
    "field a is no count of attempts, such as 1",
    "a ticket of another purpose than its stream's",
)


def with_t(ticket: str | bytes) -> Fields:
    return ("t", ticket, "d", b"ask")


def with_a(attempts: str | bytes | int) -> Fields:
    return ("t", "train:9", "d", b"ask", "a", attempts)


ENTRIES: dict[str, tuple[str, Fields]] = {
    "no t": (NO_T, ("d", b"ask")),
    "neither": (NO_T, ("x", "y")),
    "t in capitals": (NO_T, ("T", "train:9", "d", b"ask")),
    "no d": (NO_D, ("t", "train:9")),
    "empty t": (BAD_T, with_t("")),
    "t not UTF-8": (BAD_T, with_t(b"train:\xff")),
    "t of zeros": (BAD_T, with_t(b"\0\0")),
    "t of words": (BAD_T, with_t("nonsense")),
    "no number": (BAD_T, with_t("train:")),
    "negative": (BAD_T, with_t("train:-1")),
    "leading zeros": (BAD_T, with_t("train:007")),
    "exponent": (BAD_T, with_t("train:1e3")),
    "decimal": (BAD_T, with_t("train:1.0")),
    "hexadecimal": (BAD_T, with_t("train:0x1")),
    "16 digits": (BAD_T, with_t("train:" + "9" * 16)),
    "19 digits": (BAD_T, with_t("train:" + "9" * 19)),
    "5000 digits": (BAD_T, with_t("train:" + "9" * 5000)),
    "line end": (BAD_T, with_t("train:9\n")),
    "space": (BAD_T, with_t(" train:9")),
    "other digits": (BAD_T, with_t("train:\u0661")),
    "eval without version": (BAD_T, with_t("eval:3")),
    "eval with half a version": (BAD_T, with_t("eval:1:3")),
    "eval with zeros": (BAD_T, with_t("eval:01.0:3")),
    "t twice": (BAD_T, ("t", "train:9", "d", b"ask", "t", "nonsense")),
    "a of words": (BAD_A, with_a("three")),
    "a negative": (BAD_A, with_a(-1)),
    "a empty": (BAD_A, with_a("")),
    "a with zeros": (BAD_A, with_a("007")),
    "a nan": (BAD_A, with_a("nan")),
    "a infinite": (BAD_A, with_a("inf")),
    "a decimal": (BAD_A, with_a("1.5")),
    "a exponent": (BAD_A, with_a("1e3")),
    "a of a million": (BAD_A, with_a(10**6)),
    "a of 10^18": (BAD_A, with_a(10**18)),
    "a of 400 digits": (BAD_A, with_a("9" * 400)),
    "a not UTF-8": (BAD_A, with_a(b"\xff")),
    "a twice": (BAD_A, (*with_a(1), "a", "x")),
}


def add(run: Run, stream: str, fields: Fields) -> bytes:
    return run.connection.execute("XADD", stream, "*", *fields)


def add_as_place(run: Run, stream: str, ticket: str, *fields: str | bytes | int) -> None:
    entry = add(run, stream, ("t", ticket, *fields)).decode()
    run.connection.execute("HSET", run.keys.open, ticket, f"{stream}|{entry}|1.0")


def is_clean(run: Run, stream: str) -> bool:
    """Whether a stream has no entry, and none is pending."""
    depth = run.connection.execute("XLEN", stream)
    return depth == 0 and run.connection.execute("XPENDING", stream, "workers")["pending"] == 0


def take_by(worker: WorkStream) -> list[Entry]:
    return worker.take(100)


def reclaim_by(worker: WorkStream) -> list[Entry]:
    """After a consumer that read nothing of what it took was lost."""
    group = ("GROUP", "workers", "lost", "COUNT", 100)
    worker._connection.execute("XREADGROUP", *group, "STREAMS", worker.stream, ">")
    return wait_until(lambda: worker.reclaim(100), "the lease to run out")


WORKERS = {"actor": Run.actor, "rewarder": Run.rewarder}
READS = {"takes": take_by, "reclaims": reclaim_by}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("role", WORKERS)
def test_a_worker_deletes_and_counts_what_it_cannot_read(run: Run, role: str, read: str) -> None:
    worker = WORKERS[role](run, lease_s=0.02) if role == "actor" else WORKERS[role](run)
    for _, fields in ENTRIES.values():
        add(run, worker.stream, fields)
    add_as_place(run, worker.stream, "train:9", "d", b"old", "d", b"ask", "a", 2, "a", 1)
    with structlog.testing.capture_logs() as logs:
        (entry,) = READS[read](worker)
    assert (entry.ticket, entry.payload) == ("train:9", b"ask")  # of a field twice, the last one counts
    assert entry.attempts == 1 + (read == "reclaims")
    causes = [cause for cause, _ in ENTRIES.values()]
    assert run.view.malformed() == {cause: causes.count(cause) for cause in set(causes)}
    assert len(logs) == len(set(causes))
    run.connection.execute("DEL", run.keys.open)
    assert not worker.handoff(entry, run.keys.scored, b"group")
    assert is_clean(run, worker.stream)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", ["", "{stream}|1-1|1.0", "{other}|{entry}|1.0", "nonsense"])
def test_a_worker_deletes_what_is_no_place_of_a_ticket(run: Run, place: str, read: str) -> None:
    run.issue(1)
    worker = run.actor(lease_s=0.02)
    entry = add(run, worker.stream, with_t("train:9")).decode()
    text = place.format(stream=worker.stream, other=run.keys.rollouts, entry=entry)
    run.connection.execute("HSET", run.keys.open, "train:9", text)
    with structlog.testing.capture_logs() as logs:
        assert [(found.ticket, found.version) for found in READS[read](worker)] == [("train:1", "1.0")]
    assert run.view.malformed() == {"no place of a ticket": 1}
    assert len(logs) == 1


@pytest.mark.parametrize("name", ENTRIES)
def test_each_of_them_alone_is_deleted_and_counted(run: Run, name: str) -> None:
    cause, fields = ENTRIES[name]
    add(run, run.keys.rollouts, fields)
    assert run.rewarder().take(1) == []
    assert is_clean(run, run.keys.rollouts)
    assert run.view.malformed() == {cause: 1}


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_the_learner_deletes_and_counts_what_it_cannot_read(run: Run, purpose: str) -> None:
    stream = run.keys.outcomes_for(purpose)
    wanted = {"train": "train:9", "eval": "eval:1.0:9"}
    for cause, fields in ENTRIES.values():
        if cause != BAD_A:  # no outcome has one
            add(run, stream, fields)
    for ticket in wanted.values():
        add(run, stream, ("t", ticket, "d", b"group", "a", "nonsense"))
    found = [entry.ticket for _ in range(2) for entry in run.learner.outcomes(purpose, BEGINNING, 100)]
    assert found == [wanted[purpose]] * 2
    counts = run.view.malformed()
    assert set(counts) == {NO_T, NO_D, BAD_T, OTHER}
    assert sum(counts.values()) == 1 + sum(cause != BAD_A for cause, _ in ENTRIES.values())
    assert len(run.entries(stream)) == 1


@pytest.mark.parametrize("stream", ["tickets", "eval_tickets"])
def test_an_actor_deletes_tickets_of_the_other_purpose(run: Run, stream: str) -> None:
    key = getattr(run.keys, stream)
    add(run, key, with_t("eval:1.0:1" if stream == "tickets" else "train:1"))
    assert WorkStream(run.connection, run.keys, key, "actor", 1.0, 3).take(9) == []
    assert run.view.malformed() == {OTHER: 1}


def test_the_audit_shows_how_many_were_deleted(run: Run, run_name: str) -> None:
    for _ in range(3):
        add(run, run.keys.tickets, ("x", "y"))
    run.actor().take(9)
    found = read_audit(run.connection, run_name)
    assert found.malformed == {NO_T: 3}
    assert f"3 entries that another client wrote were deleted: {NO_T}" in format_audit(found)


@pytest.mark.parametrize("verb", ["give back", "fail", "bury", "handoff"])
def test_an_entry_for_a_ticket_that_is_not_out_ends_with_the_first_verb(run: Run, verb: str) -> None:
    """Without this, each lost lease brings the entry back, at last to one that works on that alone."""
    add_as_place(run, run.keys.tickets, "train:999", "d", b"ask")
    worker = run.actor()
    (entry,) = worker.take(9)
    run.connection.execute("HDEL", run.keys.open, "train:999")
    verbs: dict[str, Callable[[], object]] = {
        "give back": lambda: worker.give_back(entry),
        "fail": lambda: worker.fail(entry, "train", "no message"),
        "bury": lambda: worker.bury(entry, "train", "no message"),
        "handoff": lambda: worker.handoff(entry, run.keys.rollouts, b"group"),
    }
    assert not verbs[verb]()
    assert is_clean(run, run.keys.tickets)
    assert run.entries(run.keys.dead) == run.entries(run.keys.rollouts) == []


# Hashes with nonsense

NONSENSE = ("", "x", "-1", "1e3", "007", "nan", "10.5", "1" * 16, "9" * 19, "9" * 400, b"\xff")


def test_nonsense_in_the_hash_open_is_left_out_of_the_audit(run: Run, run_name: str) -> None:
    run.issue(1)
    place = run.connection.execute("HGET", run.keys.open, "train:1")
    names = [f"train:{number}".encode() for number in ("007", "1e3", 10**18, "9" * 19, "x", "-1")]
    for name in (*names, b"", b"\xff", b"eval:1:2"):
        run.connection.execute("HSET", run.keys.open, name, place)
    other_run = place.replace(run_name.encode(), b"another-run")
    entry = place.split(b"|")[1]
    places = (
        b"",
        b"|||",
        b"x",
        place + b"|",
        place[:-1],
        b"%s|%s|1.0" % (run.keys.fence.encode(), entry),
    )
    places += (other_run, place.replace(b"-", b"x"), place[:-3] + b"1e3", place[:-3] + b"9" * 17 + b".0")
    for number, text in enumerate(places, start=100):
        run.connection.execute("HSET", run.keys.open, f"train:{number}", text)
    assert [found.ticket for found in run.view.audit()[1]] == ["train:1"]


@pytest.mark.parametrize("text", [b"", b"x|y|z", b"|||", b"\xff"])
def test_a_ticket_whose_place_is_nonsense_is_issued_again(run: Run, text: bytes) -> None:
    run.issue(1)
    run.connection.execute("HSET", run.keys.open, "train:1", text)
    assert run.issue(1) == [V0]
    assert run.view.audit()[1][0].exists


def test_a_forged_place_does_not_delete_another_tickets_entry(run: Run) -> None:
    run.issue(2)
    place = run.connection.execute("HGET", run.keys.open, "train:2")
    run.connection.execute("HSET", run.keys.open, "train:999", place)
    run.learner.close("train", {"train:999": "stale"})
    assert run.entries(run.keys.tickets) == [(b"train:2", b"ask")]
    assert [found.ticket for found in run.view.audit()[1]] == ["train:2"]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_in_the_ledger_stops_neither_issuing_nor_closing(run: Run, text: str | bytes) -> None:
    for name in ("issued", "stale", "x"):
        run.connection.execute("HSET", run.keys.ledger, name, text)
    run.issue(1)
    run.learner.close("train", {"train:1": "stale"})
    assert run.view.audit()[0] == {"issued": 1, "stale": 1}


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_in_the_fence_is_no_claim(run: Run, text: str | bytes) -> None:
    for name in ("incarnation", "seen", "lease"):
        run.connection.execute("HSET", run.keys.fence, name, text)
    run.connection.execute("HSET", run.keys.fence, "holder", "someone else")
    assert run.view.incarnation() == run.view.learner().incarnation == 0
    run.issue(1)
    assert run.view.incarnation() == 1  # its learner claimed again
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "next", 1.0)
    assert run.view.incarnation() == 2


# Keys of another type

KEYS = ("tickets", "eval_tickets", "rollouts", "scored", "evaluated", "dead", "open", "ledger", "fence")
VERBS: dict[str, tuple[tuple[str, ...], Callable[[Run, Entry], object]]] = {
    "take": (("tickets",), lambda run, _: run.actor().take(1)),
    "reclaim": (("tickets", "fence"), lambda run, _: run.actor().reclaim(1)),
    "renew": (("tickets", "fence"), lambda run, entry: run.actor().renew([entry.id])),
    "handoff": (
        ("tickets", "open", "fence", "rollouts"),
        lambda run, entry: run.actor().handoff(entry, run.keys.rollouts, b""),
    ),
    "give back": (("tickets", "open", "fence"), lambda run, entry: run.actor().give_back(entry)),
    "bury": (
        ("tickets", "open", "fence", "scored", "dead"),
        lambda run, entry: run.actor().bury(entry, "train", "why"),
    ),
    "audit": (("open", "ledger", "tickets", "rollouts"), lambda run, _: run.view.audit()),
}


@pytest.mark.parametrize(
    ("verb", "name"), [(verb, key) for verb, (keys, _) in VERBS.items() for key in keys]
)
def test_a_key_of_another_type_is_named_with_the_remedy(run: Run, verb: str, name: str) -> None:
    run.issue(1)
    (entry,) = run.actor().take(1)
    key = getattr(run.keys, name)
    run.connection.execute("DEL", key)
    run.connection.execute("SADD", key, "x")
    with pytest.raises(WrongType, match=key) as found:
        VERBS[verb][1](run, entry)
    assert "deletes and restores" in str(found.value)


LEARNERS: dict[str, tuple[tuple[str, ...], Callable[[Run], object]]] = {
    "issue": (("tickets", "open", "ledger", "fence"), lambda run: run.issue(2)),
    "outcomes": (("scored", "fence"), lambda run: run.learner.outcomes("train", BEGINNING, 1)),
    "close": (
        ("open", "ledger", "scored"),
        lambda run: run.learner.close("train", {"train:1": "stale"}),
    ),
    "places": (("open", "ledger"), lambda run: run.learner.places()),
    "put": (("contract",), lambda run: run.learner.publish_contract(b"contract")),
}


@pytest.mark.parametrize(
    ("verb", "name"), [(verb, key) for verb, (keys, _) in LEARNERS.items() for key in keys]
)
def test_the_learner_deletes_a_key_of_another_type_and_goes_on(run: Run, verb: str, name: str) -> None:
    key = getattr(run.keys, name)
    run.connection.execute("DEL", key)
    run.connection.execute("SADD", key, "x")
    with structlog.testing.capture_logs() as logs:
        LEARNERS[verb][1](run)
        LEARNERS[verb][1](run)
    assert run.learner.damaged
    assert [line["event"] for line in logs if key in line["event"]]
    assert len(logs) == 1


def test_a_value_of_another_type_or_of_nonsense_reads_as_none_and_is_logged_once(run: Run) -> None:
    for name in ("contract", "weights", "state", "fence", "malformed"):
        run.connection.execute("DEL", getattr(run.keys, name))
        run.connection.execute("SADD", getattr(run.keys, name), "x")
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert run.view.contract() is run.view.weights() is None
            assert not run.view.ended()
            assert run.view.incarnation() == run.view.learner().incarnation == 0
            assert run.view.malformed() == {}
    assert len(logs) == 6  # HGET and HMGET of the fence each
    run.connection.execute("SET", run.keys.weights, b"\xff\xff")
    assert run.view.weights() is None


def test_a_claim_replaces_a_fence_of_another_type(run: Run) -> None:
    run.connection.execute("SET", run.keys.fence, "x")
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "next", 1.0)
    assert run.view.incarnation() == 2


@pytest.mark.parametrize("data", [b"", b"x", b"\xff", encode(Verdict("train:1", "dead", "lost"))])
def test_workers_wait_for_a_contract_that_can_be_read(run: Run, data: bytes) -> None:
    run.connection.execute("SET", run.keys.contract, data)
    timer = threading.Timer(0.3, lambda: run.learner.publish_contract(encode(CONTRACT)))
    timer.start()
    assert wait_for_contract(run.view, 30.0, threading.Event()) == encode(CONTRACT)
    timer.join()


def test_a_contract_that_stays_unreadable_ends_the_wait_with_its_fault(run: Run) -> None:
    run.connection.execute("SET", run.keys.contract, b"\xc1")
    with pytest.raises(MalformedMessage, match="msgpack"):
        wait_for_contract(run.view, 0.1, threading.Event())


@pytest.mark.parametrize("count", ["", "x", "-1", "9" * 5000])
def test_a_count_that_no_role_wrote_is_left_out(connection, keys, count):
    connection.execute("HSET", keys.malformed, NO_D, 2, NO_T, count)
    assert RunView(connection, keys).malformed() == {NO_D: 2}
