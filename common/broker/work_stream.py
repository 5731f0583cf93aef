"""The protocol's verbs, typed: what workers do with a stream, and what everybody may read.

The functions themselves run on the server (functions.lua). A worker's life of an entry:

    take or reclaim -> renew while working -> handoff, give_back, fail (try again) or bury (give up)

What only the learner does is in learner/streams/learner_queue.py.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.common.broker.connection import BLOCK_MS, Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import Purpose, TicketId
from penstock.common.wire.messages import Verdict, Weights

BEGINNING = "0-0"
"""The position before a stream's first entry."""

_LOOK_EVERY_S = 0.2

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """Work taken from a stream; `attempts` failed before, `doomed` is to be buried at once."""

    id: str
    ticket: TicketId
    payload: bytes
    attempts: int = 0
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an open ticket lies at the instant of an audit; idle_ms since its lease was renewed."""

    ticket: TicketId
    stream: str
    entry: str
    first_version: str
    attempts: int
    consumer: str
    idle_ms: int
    exists: bool


class WorkStream:
    """One stream of work, as one consumer sees it."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        stream: str,
        consumer: str,
        lease_s: float,
        max_attempts: int,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self.max_attempts = max_attempts
        self._connection = connection
        self._keys = keys
        self._lease_ms = int(lease_s * 1000)

    def take(self, count: int, block_ms: int = 0) -> list[Entry]:
        """Up to `count` entries nobody has taken yet; waits up to `block_ms` for the first."""
        block = ("BLOCK", min(block_ms, BLOCK_MS)) if block_ms > 0 else ()
        reply = self._connection.execute(
            "XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", count, *block,
            "STREAMS", self.stream, ">",
        )  # fmt: skip
        return _read_entries(reply)

    def reclaim(self, count: int) -> list[Entry]:
        """Up to `count` entries whose lease ran out; each counts as a failed attempt."""
        server, up_ms = self._connection.uptime()
        reply = self._connection.call(
            "reclaim",
            [self._keys.fence, self.stream],
            [self.consumer, self._lease_ms, count, self.max_attempts, server, up_ms],
        )
        return [
            Entry(text(entry), TicketId(text(ticket)), payload, int(attempts), bool(doomed))
            for entry, ticket, payload, attempts, doomed in reply
        ]

    def runs_alone(self, entry: Entry) -> bool:
        """Whether this is the ticket's last attempt, to be made without company."""
        return entry.attempts >= self.max_attempts - 1 and entry.attempts > 0

    def mark_alone(self, entry: Entry) -> bool:
        """Record that the ticket runs without company: if its lease is lost now, it is the cause.

        False if the lease is lost already: the ticket is somebody else's.
        """
        reply = self._connection.call(
            "mark_alone", [self._keys.fence, self.stream], [self.consumer, entry.id]
        )
        return bool(reply)

    def renew(self, entries: Iterable[str]) -> list[bool]:
        """Extend the leases; False for an entry that is no longer this consumer's."""
        reply = self._connection.call(
            "renew", [self._keys.fence, self.stream], [self.consumer, *entries]
        )
        return [bool(owned) for owned in reply]

    def handoff(self, entry: Entry, destination: str, payload: bytes) -> bool:
        """Replace the entry by `payload` on the next stream. Return False if another was first."""
        return self.handoff_all([(entry, payload)], destination)[0]

    def handoff_all(self, finished: Sequence[tuple[Entry, bytes]], destination: str) -> list[bool]:
        """Hand off several entries in one round trip. Return for each what `handoff` returns."""
        replies = self._connection.call_each(
            "handoff",
            [self._keys.fence, self._keys.open, self.stream, destination],
            [[entry.id, entry.ticket, payload] for entry, payload in finished],
        )
        return [bool(reply) for reply in replies]

    def give_back(self, entry: Entry) -> bool:
        """Put the entry back, counting no attempt; False if it is somebody else's by now."""
        return self._put_back(entry, failures=0) >= 0

    def fail(self, entry: Entry, purpose: Purpose, reason: str) -> bool:
        """Count a failed attempt and put the entry back, or bury it after the last; True if buried."""
        attempts = self._put_back(entry, failures=1)
        return attempts >= self.max_attempts and self.bury(entry, purpose, reason)

    def _put_back(self, entry: Entry, failures: int) -> int:
        return self._connection.call(
            "put_back",
            [self._keys.fence, self._keys.open, self.stream],
            [self.consumer, entry.id, entry.ticket, failures, self.max_attempts],
        )

    def bury(self, entry: Entry, purpose: Purpose, reason: str) -> bool:
        """End the ticket as dead: payload and reason to `dead`, a verdict to the learner.

        False if the entry is somebody else's by now.
        """
        verdict = encode(Verdict(entry.ticket, "dead", reason))
        reply = self._connection.call(
            "bury",
            [
                self._keys.fence, self._keys.open, self.stream, self._keys.outcomes_for(purpose),
                self._keys.dead,
            ],
            [self.consumer, entry.id, entry.ticket, entry.payload, verdict, reason],
        )  # fmt: skip
        return bool(reply)

    def leave(self) -> None:
        """Remove this consumer, unless it still owns work."""
        self._connection.call("remove_consumer", [self.stream], [self.consumer])


@dataclass(frozen=True, slots=True)
class LearnerSign:
    """The learner's last sign of life: who, what it was doing, and a stamp that changes with each."""

    holder: str
    incarnation: int
    seen: str
    phase: str

    def __str__(self) -> str:
        if not self.holder:
            return "no learner has claimed the run"
        doing = f", when last seen: {self.phase}" if self.phase else ""
        return f"the learner is {self.holder} (incarnation {self.incarnation}{doing})"


class RunView:
    """What every process may read of a run."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.keys = keys
        self._connection = connection

    def contract(self) -> bytes | None:
        """The published contract, or None before the learner set the run up."""
        return self._connection.execute("GET", self.keys.contract)

    def weights(self) -> Weights | None:
        """The announced version, or None before the first."""
        data = self._connection.execute("GET", self.keys.weights)
        return None if data is None else decode(data, Weights)

    def ended(self) -> bool:
        """Whether the run is over and workers may leave."""
        return self._connection.execute("GET", self.keys.state) == b"ended"

    def incarnation(self) -> int:
        """The learner's present incarnation on this server; 0 before the first."""
        return int(self._connection.execute("HGET", self.keys.fence, "incarnation") or 0)

    def learner(self) -> LearnerSign:
        """Who leads the run, and its last sign of life; empty before the first claim."""
        found = self._connection.execute(
            "HMGET", self.keys.fence, "holder", "incarnation", "seen", "phase"
        )
        holder, incarnation, seen, phase = (text(value or b"") for value in found)
        return LearnerSign(holder, int(incarnation or 0), seen, phase)

    def audit(self) -> tuple[dict[str, int], list[Place]]:
        """Totals and open tickets in one instant; raises RunNotReady."""
        totals, places = self._connection.call(
            "audit",
            [self.keys.open, self.keys.ledger, *self.keys.work_streams],
            [],
        )
        counts = dict(zip(totals[::2], totals[1::2], strict=True))
        return (
            {text(name): int(count) for name, count in counts.items()},
            [_read_place(place) for place in places],
        )


def wait_for_contract(view: RunView, timeout_s: float, stopping: threading.Event) -> bytes | None:
    """The run's contract; None if told to stop first.

    Raises DeadlineExceeded when none was published and no learner gave a sign of life in time.
    """
    deadline = Deadline(timeout_s)
    while not stopping.is_set():
        contract = view.contract()
        if contract is not None:
            return contract
        sign = view.learner()
        if deadline.expired(progress=sign):  # not while a learner reads data or fetches its model
            raise DeadlineExceeded(
                f"no learner set up the run within {timeout_s:g} s ({sign}): start `learner` with the "
                "same RUN_NAME and REDIS_URL, or raise RUN_JOIN_TIMEOUT_S"
            )
        if deadline.report_due():
            waited_s = round(deadline.waited_s)
            log.warning("waiting for the run to be set up", waited_s=waited_s, learner=str(sign))
        stopping.wait(_LOOK_EVERY_S)
    return None


def _read_entries(reply: Any) -> list[Entry]:
    streams = reply.items() if isinstance(reply, dict) else (reply or [])
    entries = []
    for _, items in streams:
        for entry, fields in items:
            if fields is None:  # deleted between delivery and reading
                continue
            pairs = (
                fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            )
            attempts = int(pairs.get(b"a", 0))
            entries.append(Entry(text(entry), TicketId(text(pairs[b"t"])), pairs[b"d"], attempts))
    return entries


def _read_place(place: list[Any]) -> Place:
    ticket, stream, entry, version, attempts, consumer, idle_ms, exists = place
    return Place(
        TicketId(text(ticket)),
        text(stream),
        text(entry),
        text(version),
        int(attempts),
        text(consumer),
        int(idle_ms),
        bool(exists),
    )


def text(value: bytes | str) -> str:
    """What the server sent as a string."""
    return value.decode() if isinstance(value, bytes) else value
