"""The protocol as plain data, written from docs/protocol.md and not from the functions.

An entry keeps one number (`uid`) for as long as it lies on a stream, in place of the server's id for
it; a later entry has a higher one. Refusals are the errors that the real verbs raise.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from penstock.common.errors import RunNotReady, RunTaken

WORK = ("tickets", "eval_tickets", "rollouts")
OUTCOMES = {"train": "scored", "eval": "evaluated"}
ISSUED = {"train": "tickets", "eval": "eval_tickets"}
STREAMS = (*WORK, *OUTCOMES.values())

Issued = list[tuple[str, str, bytes]]
"""Tickets to issue: id, version, payload."""

Seen = tuple[int, str, bytes, int, bool, bytes]
"""An entry as a worker gets it: uid, ticket, payload, attempts, whether it is doomed, partial group."""


@dataclass
class Item:
    """An entry of a stream. `holder` works on it, or did when its lease ran out (`late`).

    `attempts` failed in this stage, `before` of them before this entry was added; `alone` says that the
    holder works on nothing else. `partial` is what an actor sampled of it before it had to end.
    """

    uid: int
    ticket: str
    payload: bytes
    attempts: int = 0
    holder: str = ""
    late: bool = False
    alone: bool = False
    before: int = 0
    partial: bytes = b""


@dataclass
class Contents:
    """What a server holds of a run; `places` are stream, uid and first version of open tickets."""

    incarnation: int | None = None
    streams: dict[str, list[Item]] = field(default_factory=lambda: {name: [] for name in STREAMS})
    dead: list[tuple[str, bytes, str]] = field(default_factory=list)
    places: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)


class ServerModel:
    """A queue server."""

    def __init__(self) -> None:
        self.now = Contents()
        self._uids = itertools.count()

    def find(self, stream: str, uid: int) -> Item | None:
        """The entry, if it still lies there."""
        return next((item for item in self.now.streams[stream] if item.uid == uid), None)

    # One learner (rules 10 to 12)

    def claim(self, incarnation: int) -> None:
        if self.now.incarnation is not None and self.now.incarnation > incarnation:
            raise RunTaken
        self.now.incarnation = incarnation

    def _fence(self, incarnation: int) -> None:
        if self.now.incarnation is None or self.now.incarnation < incarnation:
            raise RunNotReady
        if self.now.incarnation > incarnation:
            raise RunTaken

    def _ready(self) -> None:
        if self.now.incarnation is None:
            raise RunNotReady

    # Tickets and credit (rules 1 to 4)

    def issue(self, incarnation: int, stream: str, tickets: Issued) -> list[str]:
        self._fence(incarnation)
        firsts = []
        for ticket, version, payload in tickets:
            place = self.now.places.get(ticket)
            self.now.totals["issued"] += place is None
            first = place[2] if place else version
            item = self.find(place[0], place[1]) if place else None
            if place and item and place[0] == stream and item.payload != payload:
                self._drop(stream, item.uid)  # its answer would end stale
                item = None
            if item is None:
                self._put(stream, ticket, payload, first)
            firsts.append(first)
        return firsts

    def outcomes(self, incarnation: int, stream: str, after: int, count: int) -> list[Item]:
        self._fence(incarnation)
        return [item for item in self.now.streams[stream] if item.uid > after][:count]

    def close(
        self, incarnation: int, stream: str, ends: Mapping[str, str], uids: Iterable[int] = ()
    ) -> int:
        self._fence(incarnation)
        closed = [ticket for ticket in ends if ticket in self.now.places]
        for ticket in closed:
            place, uid, _ = self.now.places.pop(ticket)
            self._drop(place, uid)
            self.now.totals[ends[ticket]] += 1
        for uid in uids:
            self._drop(stream, uid)
        return len(closed)

    def put(self, incarnation: int) -> None:
        self._fence(incarnation)

    def set_totals(self, incarnation: int, totals: Mapping[str, int]) -> None:
        self._fence(incarnation)
        self.now.totals = Counter(totals)

    # Hand-off and leases (rules 13 to 16)

    def take(self, stream: str, consumer: str, count: int) -> list[Seen]:
        self._ready()
        fresh = [item for item in self.now.streams[stream] if not item.holder][:count]
        for item in fresh:
            item.holder, item.late = consumer, False
        return [self._seen(item, False) for item in fresh]

    def renew(self, stream: str, consumer: str, uids: list[int]) -> list[bool]:
        self._ready()
        items = [self.find(stream, uid) for uid in uids]
        owned = [item for item in items if item is not None and item.holder == consumer]
        for item in owned:
            item.late = False
        return [item in owned for item in items]

    def reclaim(self, stream: str, consumer: str, count: int, most: int) -> list[Seen]:
        self._ready()
        late = [item for item in self.now.streams[stream] if item.late][:count]
        for item in late:
            item.holder, item.late = consumer, False
            item.attempts += 1
            if item.attempts >= most and not item.alone:
                item.attempts = max(item.before, most - 1, 1)  # it gets its attempt alone first
        return [self._seen(item, item.alone) for item in late]

    def mark_alone(self, stream: str, consumer: str, uid: int) -> bool:
        self._ready()
        item = self._held(stream, consumer, uid)
        if item is not None:
            item.alone, item.late = True, False
        return item is not None

    def handoff(self, stream: str, uid: int, destination: str, payload: bytes) -> bool:
        """Who holds the entry does not matter: the first to finish wins."""
        self._ready()
        item = self.find(stream, uid)
        if item is None:
            return False
        self._move(stream, item, destination, payload)
        return True

    def give_back(self, stream: str, consumer: str, uid: int, partial: bytes) -> bool:
        self._ready()
        item = self._held(stream, consumer, uid)
        if item is None:
            return False
        self._move(stream, item, stream, item.payload, item.attempts, partial or item.partial)
        return True

    def fail(self, stream: str, consumer: str, uid: int, most: int) -> int:
        """Attempts so far, -1 if not the consumer's; after the last the entry stays, to be buried."""
        self._ready()
        item = self._held(stream, consumer, uid)
        if item is None:
            return -1
        item.attempts += 1
        item.alone = item.late = False
        if item.attempts < most:
            self._move(stream, item, stream, item.payload, item.attempts)
        return item.attempts

    def bury(self, stream: str, consumer: str, uid: int, verdict: bytes, reason: str) -> bool:
        self._ready()
        item = self._held(stream, consumer, uid)
        if item is None:
            return False
        self._move(stream, item, OUTCOMES[purpose_of(item.ticket)], verdict)
        self.now.dead.append((item.ticket, item.payload, reason))
        return True

    def leave(self) -> None:
        self._ready()

    def _seen(self, item: Item, doomed: bool) -> Seen:
        return item.uid, item.ticket, item.payload, item.attempts, doomed, item.partial

    def _held(self, stream: str, consumer: str, uid: int) -> Item | None:
        """The entry if this consumer holds it."""
        item = self.find(stream, uid)
        return item if item is not None and item.holder == consumer else None

    def _put(
        self,
        stream: str,
        ticket: str,
        payload: bytes,
        first: str,
        attempts: int = 0,
        partial: bytes = b"",
    ) -> None:
        item = Item(next(self._uids), ticket, payload, attempts, before=attempts, partial=partial)
        self.now.streams[stream].append(item)
        self.now.places[ticket] = (stream, item.uid, first)

    def _move(
        self, stream: str, item: Item, destination: str, payload: bytes, attempts: int = 0,
        partial: bytes = b"",
    ) -> None:  # fmt: skip
        self._drop(stream, item.uid)
        self._put(destination, item.ticket, payload, self.now.places[item.ticket][2], attempts, partial)

    def _drop(self, stream: str, uid: int) -> None:
        self.now.streams[stream] = [item for item in self.now.streams[stream] if item.uid != uid]


@dataclass
class Books:
    """The learner's table: closed are the numbers below `next_number` that are not open."""

    next_number: int = 0
    open: dict[str, str] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)


class Killed(Exception):
    """The learner was killed between writing its journal and acknowledging."""


class LearnerModel:
    """A learner of one incarnation; `journal` is what a later one goes on from (rules 5 to 9)."""

    def __init__(
        self,
        server: ServerModel,
        journal: list[Books],
        incarnation: int,
        ask: Callable[[str, str], bytes],
    ) -> None:
        self.incarnation = incarnation
        self.books = deepcopy(journal[-1]) if journal else Books()
        self.version = "0.0"
        self.held: dict[str, None] = {}
        self.position = dict.fromkeys(OUTCOMES, -1)
        self._server = server
        self._journal = journal
        self._ask = ask
        self._ended: dict[str, str] = {}
        self._seen: dict[str, list[int]] = {}

    def issue(self, count: int) -> None:
        numbers = range(self.books.next_number, self.books.next_number + count)
        self.books.next_number += count
        self._issue("train", {f"train:{number}": self.version for number in numbers})

    def announce(self, version: str) -> None:
        """The version is in the journal before any actor learns of it (rule 29)."""
        self.version = version
        self.record()
        self._server.put(self.incarnation)

    def evaluate(self, questions: int) -> None:
        tickets = {f"eval:{self.version}:{index}": self.version for index in range(questions)}
        for ticket, version in tickets.items():
            self._open(ticket, version)
        self.record()
        self._issue("eval", tickets)

    def read(
        self, purpose: str, count: int, state_of: Callable[[bytes], str]
    ) -> tuple[list[Item], dict]:
        """What came back, and which tickets it ends how; a group to be trained ends nothing yet."""
        items = self._server.outcomes(self.incarnation, OUTCOMES[purpose], self.position[purpose], count)
        ends: dict[str, str] = {}
        known = self.books.open.keys() | self._ended.keys()
        spent = [item.uid for item in items if item.ticket not in known]
        if spent:
            self._server.close(self.incarnation, OUTCOMES[purpose], {}, spent)
        for item in items:
            self.position[purpose] = item.uid
            if item.uid in spent:
                continue
            seen = self._seen.setdefault(item.ticket, [])
            if item.uid not in seen:
                seen.append(item.uid)
            if item.ticket not in self.books.open or item.ticket in self.held:
                continue
            state = state_of(item.payload)
            if state == "trained":
                self.held[item.ticket] = None
            else:
                ends[item.ticket] = state
                self.end(item.ticket, state)
        return items, ends

    def end(self, ticket: str, state: str) -> None:
        del self.books.open[ticket]
        self.held.pop(ticket, None)
        self.books.totals[state] += 1
        self._ended[ticket] = state

    def record(self, dies: bool = False) -> None:
        """Journal first, then acknowledge (rule 5)."""
        self._journal.append(deepcopy(self.books))
        if dies:
            raise Killed
        ended, self._ended = self._ended, {}
        for purpose, stream in OUTCOMES.items():
            ends = {ticket: state for ticket, state in ended.items() if purpose_of(ticket) == purpose}
            spent = [
                ticket
                for ticket in self._seen
                if purpose_of(ticket) == purpose and ticket not in self.books.open
            ]
            uids = [uid for ticket in spent for uid in self._seen.pop(ticket)]
            if ends or uids:
                self._server.close(self.incarnation, stream, ends, uids)

    def join(self) -> None:
        """Rules 7 and 9: adopt what is beyond the books, remove what is closed, issue what lacks."""
        self._server.claim(self.incarnation)
        if self._ended:
            self.record()
        there = {ticket: first for ticket, (_, _, first) in self._server.now.places.items()}
        self._adopt(there)
        for purpose, stream in OUTCOMES.items():
            gone = [
                name
                for name, first in there.items()
                if purpose_of(name) == purpose and self.books.open.get(name) != first
            ]
            self._server.close(self.incarnation, stream, dict.fromkeys(gone, "stale"))
            opened = {name: v for name, v in self.books.open.items() if purpose_of(name) == purpose}
            self._issue(purpose, opened)
        self._server.set_totals(self.incarnation, self.books.totals)
        self.position = dict.fromkeys(OUTCOMES, -1)

    def _adopt(self, there: dict[str, str]) -> None:
        """The next numbers without a gap, whose entries are there."""
        while (ticket := f"train:{self.books.next_number}") in there:
            if self._server.find(*self._server.now.places[ticket][:2]) is None:
                return
            self._open(ticket, there[ticket])
            self.books.next_number += 1

    def _issue(self, purpose: str, tickets: dict[str, str]) -> None:
        batch = [(name, version, self._ask(name, version)) for name, version in tickets.items()]
        if batch:
            firsts = self._server.issue(self.incarnation, ISSUED[purpose], batch)
            for name, first in zip(tickets, firsts, strict=True):
                self._open(name, first)

    def _open(self, ticket: str, version: str) -> None:
        if ticket not in self.books.open:
            self.books.open[ticket] = version
            self.books.totals["issued"] += 1


def is_train(ticket: str) -> bool:
    """Whether it is a training ticket's id."""
    return ticket.startswith("train:")


def purpose_of(ticket: str) -> str:
    """What a ticket is for."""
    return ticket.partition(":")[0]


def number_of(ticket: str) -> int:
    """A training ticket's number."""
    return int(ticket.partition(":")[2])
