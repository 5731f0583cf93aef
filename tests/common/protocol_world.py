"""A run on a real queue server, and beside each of its parts what the model says of it.

The random machine's ground: how a verb is called and compared, and what must hold after it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.lease_watch import Lease, LeaseWatch
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.errors import RunNotReady, RunTaken
from penstock.common.wire.codec import decode_outcome, encode
from penstock.common.wire.messages import Verdict, Version
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.protocol_learner import Learner, ask
from tests.common.protocol_model import (
    ISSUED,
    OUTCOMES,
    STREAMS,
    WORK,
    Books,
    Contents,
    Item,
    Killed,
    LearnerModel,
    ServerModel,
    purpose_of,
)
from tests.helpers import is_alone

MOST_ATTEMPTS = 3
CONSUMERS = {
    "tickets": ("actor-1", "actor-2"),
    "eval_tickets": ("actor-1", "actor-2"),
    "rollouts": ("rewarder-1", "rewarder-2"),
}


LOOK = f"""
local streams = {{}}
for i = 1, {len(STREAMS)} do
  local pending = redis.pcall('XPENDING', KEYS[i], '{GROUP}', '-', '+', 1000)
  table.insert(streams, {{redis.call('XRANGE', KEYS[i], '-', '+'), pending.err and {{}} or pending}})
end
local i = {len(STREAMS)}
return {{streams, redis.call('XRANGE', KEYS[i + 1], '-', '+'), redis.call('HGETALL', KEYS[i + 2]),
  redis.call('HGETALL', KEYS[i + 3]), redis.call('HGET', KEYS[i + 4], 'incarnation')}}
"""
DUMP = "local all = {} for i, k in ipairs(KEYS) do all[i] = redis.call('DUMP', k) end return all"
RESTORE = """
for i, k in ipairs(KEYS) do
  redis.call('DEL', k)
  if ARGV[i] ~= '' then redis.call('RESTORE', k, 0, ARGV[i]) end
end
"""


class WorldWatch(LeaseWatch):
    """In place of a worker's watch: leases run out when the machine says so, for all workers at once.

    It also names leases that were renewed after they had run out, which the server must refuse.
    """

    def __init__(self, world: ProtocolWorld, stream: str) -> None:
        super().__init__(1.0)
        self._world, self._stream = world, stream

    def look(self, leases: Iterable[Lease]) -> list[Lease]:
        present = list(leases)
        ran_out = [lease for lease in self._world.ran_out[self._stream] if lease not in present]
        return [one for one in present if one in self._world.ran_out[self._stream]] + ran_out


@dataclass
class Hand:
    """What a worker believes to hold: an entry it once took, whatever became of it."""

    stream: str
    worker: WorkStream
    entry: Entry
    uid: int


@dataclass
class Snapshot:
    """What a server had on disk when it was killed."""

    keys: list[bytes | None]
    model: Contents
    misissued: frozenset[str] = frozenset()


class ProtocolWorld(RuleBasedStateMachine):
    """One run: its server, workers and learner, and beside each what the model says."""

    numbers = itertools.count()
    steps: ClassVar[Counter[str]] = Counter()

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.ran_out: dict[str, list[Lease]] = {name: [] for name in WORK}
        self.keys = Keys(f"machine-{next(self.numbers)}")
        self.names = {getattr(self.keys, name): name for name in STREAMS}
        self.view = RunView(connection, self.keys)
        self.model = ServerModel()
        self.model_journal: list[Books] = []
        self.ledgers: list[dict] = []
        self.ids: dict[int, str] = {}  # uid of the model -> id on the server
        self.workers = [
            (stream, self._worker(stream, name)) for stream in WORK for name in CONSUMERS[stream]
        ]
        self.hands: list[Hand] = []
        self.snapshots = [Snapshot([None] * len(self.keys.all), Contents())]
        self.superseded: list[LearnerQueue] = []
        self.trained: set[str] = set()
        self.misissued: set[str] = set()  # closed numbers that were issued against the rules
        self.repair_due = False
        self.calm = 0
        self.payloads = itertools.count()
        self.versions = itertools.count(1)
        self.learner, self.learner_model = self._new_learner(1)
        self._agree(self.learner.join, self.learner_model.join)

    def teardown(self) -> None:
        self.connection.execute("DEL", *self.keys.all)

    # What must hold

    def _check_server(self) -> None:
        """The server holds what the model says; at the end of every verb."""
        self.steps["verbs"] += 1
        self.calm += 1
        names = [*STREAMS, "dead", "open", "ledger", "fence"]
        keys = [getattr(self.keys, name) for name in names]
        streams, dead, places, totals, incarnation = self.connection.execute(
            "EVAL", LOOK, len(keys), *keys
        )
        now = self.model.now
        for name, (entries, pending) in zip(STREAMS, streams, strict=True):
            holders = {entry.decode(): holder.decode() for entry, holder, _, _ in pending}
            found = [(f[1].decode(), f[3], holders.pop(i.decode(), ""), *f[7:]) for i, f in entries]
            assert found == [
                (item.ticket, item.payload, item.holder, *filter(None, [item.partial]))
                for item in now.streams[name]
            ]
            held = [Lease(i.decode(), who.decode(), count) for i, who, _, count in pending]
            late = {one.entry for one in held if one in self.ran_out.get(name, [])}
            assert late == {self.ids[item.uid] for item in now.streams[name] if item.late}
            alone = {one.entry for one in held if is_alone(one.deliveries)}
            assert alone == {self.ids[item.uid] for item in now.streams[name] if item.alone}
            assert not holders, f"pending, and gone: {holders}"
            for item, (entry, _) in zip(now.streams[name], entries, strict=True):
                assert self.ids.setdefault(item.uid, entry.decode()) == entry.decode()
        assert [(f[1].decode(), f[3], f[5].decode()) for _, f in dead] == now.dead
        assert texts(places) == {
            ticket: f"{getattr(self.keys, stream)}|{self.ids[uid]}|{first}"
            for ticket, (stream, uid, first) in now.places.items()
        }
        assert +Counter({name: int(count) for name, count in texts(totals).items()}) == +now.totals
        assert (incarnation and int(incarnation)) == now.incarnation
        self._check_one_place(
            {name: entries for name, (entries, _) in zip(STREAMS, streams, strict=True)}
        )

    def _check_one_place(self, streams: dict[str, list]) -> None:
        """Without the model: an open ticket has one entry, no other has any, and the books balance."""
        found = Counter(fields[1].decode() for entries in streams.values() for _, fields in entries)
        totals, places, _ = self.view.audit()
        assert set(found) <= {place.ticket for place in places}
        for place in places:
            there = [entry.decode() for entry, _ in streams[self.names[place.stream]]]
            assert place.exists == (place.entry in there)
            assert found[place.ticket] == place.exists
            assert place.exists or place.ticket in self.misissued
            item = self.model.find(*self.model.now.places[place.ticket][:2])
            assert place.consumer == (item.holder if item else "")
            assert place.attempts == (item.attempts if item else 0)
        ended = sum(count for name, count in totals.items() if name != "issued")
        assert totals.get("issued", 0) == ended + len(places)

    @invariant()
    def the_books_are_what_the_model_says(self) -> None:
        self.steps["rules"] += 1
        ledger, expected = self.learner.ledger, self.learner_model.books
        assert ledger.next_number == expected.next_number
        assert {ticket: str(first) for ticket, first in ledger.open.items()} == expected.open
        assert +Counter(ledger.totals) == +expected.totals
        assert ledger.totals["issued"] == sum(ledger.totals.values()) / 2 + len(ledger.open) / 2
        assert not self.trained & set(ledger.open)

    # How the rules do it

    def _worker(self, stream: str, name: str) -> WorkStream:
        key = getattr(self.keys, stream)
        worker = WorkStream(self.connection, self.keys, key, name, 1.0, MOST_ATTEMPTS)
        worker._watch = WorldWatch(self, stream)
        return worker

    def _new_learner(self, incarnation: int) -> tuple[Learner, LearnerModel]:
        return (
            Learner(self.connection, self.keys, incarnation, self.ledgers),
            LearnerModel(self.model, self.model_journal, incarnation, ask),
        )

    def _restart(self) -> None:
        """The next incarnation goes on from the journal."""
        self.superseded.append(self.learner.queue)
        incarnation = 1 + max(self.learner.incarnation, self.view.incarnation())
        self.learner, self.learner_model = self._new_learner(incarnation)
        self._repair()

    def _repair(self) -> None:
        """Join again; then server and books agree on every ticket."""
        self._agree(self.learner.join, self.learner_model.join)
        self.repair_due, self.calm = False, 0
        totals, places, _ = self.view.audit()
        assert {place.ticket for place in places} == set(self.learner.ledger.open)
        assert +Counter(totals) == +self.learner.ledger.totals
        self.misissued.clear()

    def _agree(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """Both say the same, or refuse alike; returns the refusal, if it is one."""
        found, expected = answer_of(real), answer_of(model)
        assert found == expected
        self._check_server()
        return found if isinstance(found, type) else None

    def _learn(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """The same; a learner that is refused or killed is followed by the next one."""
        refusal = self._agree(real, model)
        if refusal is not None:
            self._restart()
        return refusal

    def _issue_by_name(self, ticket: str) -> None:
        """With a version and a payload that must not replace those of a ticket that is alive."""
        purpose, version = purpose_of(ticket), Version(99, 99)
        self._learn(
            lambda: [str(v) for v in self.learner.queue.issue(purpose, [(ticket, version, b"anew")])],
            lambda: self.model.issue(
                self.learner_model.incarnation, ISSUED[purpose], [(ticket, str(version), b"anew")]
            ),
        )

    def _closed(self) -> list[str]:
        books = self.learner_model.books
        return [
            ticket
            for ticket in (f"train:{number}" for number in range(books.next_number))
            if ticket not in books.open
        ]

    def _end(self, tickets: list[str], state: str, killed: bool) -> None:
        """Decide, write down, acknowledge; maybe die before the last."""
        for ticket in tickets:
            self.learner.end(ticket, state)
            self.learner_model.end(ticket, state)
        self.learner.journal.kills = killed
        self._learn(
            lambda: self.learner.commit_log.record("batch"),
            lambda: self.learner_model.record(dies=killed),
        )

    def _receive(
        self,
        stream: str,
        worker: WorkStream,
        real: Callable[[], list[Entry]],
        model: Callable[[], list[tuple]],
    ) -> None:
        taken: list[Entry] = []

        def received() -> list[tuple]:
            taken.extend(real())
            return [
                (*known, entry.attempts, entry.doomed, entry.partial)
                for known, entry in zip(self._known(stream, taken), taken, strict=True)
            ]

        self._agree(received, model)
        self.hands += [Hand(stream, worker, entry, self._uid(stream, entry.id)) for entry in taken]

    def _known(self, stream: str, entries: list[Entry]) -> list[tuple[int, str, bytes]]:
        return [(self._uid(stream, entry.id), entry.ticket, entry.payload) for entry in entries]

    def _uid(self, stream: str, entry: str) -> int:
        """The model's number for an entry that was seen after the step that made it."""
        (uid,) = (item.uid for item in self.model.now.streams[stream] if self.ids[item.uid] == entry)
        return uid

    def _hand(self, pick: int) -> Hand:
        return choose(self.hands[::-1], pick)

    def _busy(self) -> list[Hand]:
        """Hands whose entry is still to be finished, by them or by whoever took it over."""
        return [hand for hand in self.hands if self.model.find(hand.stream, hand.uid)]

    def _lonely(self) -> list[Hand]:
        """Those with a ticket on its last attempt, whoever has its lease by now."""
        return [hand for hand in self._busy() if hand.worker.runs_alone(hand.entry)]

    def _attempts(self, hand: Hand) -> int:
        item = self.model.find(hand.stream, hand.uid)
        return item.attempts if item else -1

    def _unread(self) -> list[str]:
        positions = self.learner_model.position
        return [
            purpose
            for purpose, stream in OUTCOMES.items()
            if any(item.uid > positions[purpose] for item in self.model.now.streams[stream])
        ]

    def _fresh(self, stream: str) -> bool:
        return any(not item.holder for item in self.model.now.streams[stream])

    def _streams_with(self, kind: Callable[[Item], bool]) -> list[str]:
        return [name for name in WORK if any(map(kind, self.model.now.streams[name]))]

    def _worker_of(self, streams: list[str], pick: int) -> tuple[str, WorkStream]:
        return choose([worker for worker in self.workers if worker[0] in streams], pick)

    def _fail(self, hand: Hand, killed: bool) -> None:
        reason, purpose = f"reason {next(self.payloads)}", purpose_of(hand.entry.ticket)
        if not killed:
            self._agree(
                lambda: hand.worker.fail(hand.entry, purpose, reason),
                lambda: self._fail_model(hand, reason),
            )
            return
        self._agree(
            lambda: self.connection.call(
                "put_back",
                [self.keys.fence, self.keys.open, hand.worker.stream],
                [hand.worker.consumer, hand.entry.id, hand.entry.ticket, 1, MOST_ATTEMPTS],
            ),
            lambda: self.model.fail(hand.stream, hand.worker.consumer, hand.uid, MOST_ATTEMPTS),
        )

    def _take(self, stream: str, worker: WorkStream, count: int) -> None:
        self._receive(
            stream,
            worker,
            lambda: worker.take(count),
            lambda: self.model.take(stream, worker.consumer, count),
        )

    def _reclaim(self, stream: str, worker: WorkStream, count: int) -> None:
        self._receive(
            stream,
            worker,
            lambda: worker.reclaim(count),
            lambda: self.model.reclaim(stream, worker.consumer, count, MOST_ATTEMPTS),
        )

    def _let_leases_run_out(self, taken: list[tuple[str, Item]]) -> None:
        for stream, item in taken:
            key, entry = getattr(self.keys, stream), self.ids[item.uid]
            rows = self.connection.call("leases", [self.keys.fence, key], [])
            self.ran_out[stream] += [
                Lease(entry, holder.decode(), count)
                for at, holder, count in rows
                if at.decode() == entry
            ]
            item.late = True
        self._check_server()

    def _mark_alone(self, hand: Hand) -> None:
        self._agree(
            lambda: hand.worker.mark_alone(hand.entry),
            lambda: self.model.mark_alone(hand.stream, hand.worker.consumer, hand.uid),
        )

    def _bury(self, hand: Hand) -> None:
        reason, purpose = f"reason {next(self.payloads)}", purpose_of(hand.entry.ticket)
        self._agree(
            lambda: hand.worker.bury(hand.entry, purpose, reason), lambda: self._bury_model(hand, reason)
        )

    def _work(self, at: tuple[str, WorkStream], count: int, filtered: bool = False) -> None:
        """Take entries and finish them: an actor together, a rewarder each in a call of its own."""
        known = len(self.hands)
        self._take(*at, count)
        hands = self.hands[known:]
        if at[0] != "rollouts":
            self._hand_off_all(hands, False)
            return
        for hand in hands:
            payload = b"group %d" % next(self.payloads)
            if filtered:
                payload = encode(Verdict(hand.entry.ticket, "filtered", payload.decode()))
            self._hand_off(hand, self._next_stream(hand), payload, False)

    def _next_stream(self, hand: Hand) -> str:
        return OUTCOMES[purpose_of(hand.entry.ticket)] if hand.stream == "rollouts" else "rollouts"

    def _hand_off(self, hand: Hand, destination: str, payload: bytes, twice: bool) -> None:
        key = getattr(self.keys, destination)
        for _ in range(1 + twice):
            self._agree(
                lambda: hand.worker.handoff(hand.entry, key, payload),
                lambda: self.model.handoff(hand.stream, hand.uid, destination, payload),
            )

    def _hand_off_all(self, hands: list[Hand], twice: bool) -> None:
        """Of one worker, in one call."""
        if not hands:
            return
        worker, destination = hands[0].worker, self._next_stream(hands[0])
        groups = [(hand, b"group %d" % next(self.payloads)) for hand in hands]
        finished = [(hand.entry, payload) for hand, payload in groups]
        for _ in range(1 + twice):
            self._agree(
                lambda: worker.handoff_all(finished, getattr(self.keys, destination)),
                lambda: [
                    self.model.handoff(hand.stream, hand.uid, destination, payload)
                    for hand, payload in groups
                ],
            )

    def _give_back(self, hand: Hand, sampled: bool = False) -> None:
        partial = b"partial %d" % next(self.payloads) if sampled else b""
        self._agree(
            lambda: hand.worker.give_back(hand.entry, partial),
            lambda: self.model.give_back(hand.stream, hand.worker.consumer, hand.uid, partial),
        )

    def _now_ms(self) -> int:
        seconds, microseconds = self.connection.execute("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def _fail_model(self, hand: Hand, reason: str) -> bool:
        attempts = self.model.fail(hand.stream, hand.worker.consumer, hand.uid, MOST_ATTEMPTS)
        return attempts >= MOST_ATTEMPTS and self._bury_model(hand, reason)

    def _bury_model(self, hand: Hand, reason: str) -> bool:
        verdict = encode(Verdict(hand.entry.ticket, "dead", reason))
        return self.model.bury(hand.stream, hand.worker.consumer, hand.uid, verdict, reason)

    def _leased(self) -> list[tuple[str, Item]]:
        """Taken entries; those with most attempts first, and those that run alone before them."""
        taken = [(name, item) for name in WORK for item in self.model.now.streams[name] if item.holder]
        return sorted(taken, key=lambda at: (not at[1].alone, -at[1].attempts))


def state_of(payload: bytes) -> str:
    """What an outcome ends its ticket as, sooner or later."""
    return "trained" if payload.startswith(b"group") else decode_outcome(payload).state


def choose(among: Any, pick: int) -> Any:
    """One of several; 0 is the first."""
    options = list(among)
    return options[pick % len(options)]


def plain(items: list[Item]) -> list[tuple[int, str, bytes]]:
    return [(item.uid, item.ticket, item.payload) for item in items]


def texts(flat: list[bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}


def answer_of(call: Callable[[], Any]) -> Any:
    """What a call returned, or the kind of its refusal."""
    try:
        return call()
    except (RunTaken, RunNotReady, Killed) as refusal:
        return type(refusal)
