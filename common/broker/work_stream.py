"""One stream of work, as a worker of the run uses it; the server's part is in functions.lua.

The life of an entry: take or reclaim -> renew while working -> handoff, give_back, fail (try again) or
bury (give up). Calls that only the learner makes are in learner/streams/learner_queue.py.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from penstock.common.broker.connection import BLOCK_MS, Connection, text
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.lease_watch import Lease, LeaseWatch
from penstock.common.errors import MalformedMessage, RunNotReady, ValueTooLarge
from penstock.common.log import get_logger, shorten
from penstock.common.text import SHOWN, encodable
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import LARGEST, Purpose, TicketId
from penstock.common.wire.messages import Verdict

log = get_logger(__name__)

_WRITER = "No role of Penstock writes that: see who else may write to the queue server"

_ATTEMPTS = re.compile("0|[1-9][0-9]{0,5}")
_DEAD_BYTES = 1 << 16

BEGINNING = "0-0"
"""The position before a stream's first entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry taken from a stream, for one ticket. `attempts` counts the attempts that failed before.

    `version` is that of the ticket's first issue, for an entry of a work stream. A doomed entry lost its
    lease while its ticket ran alone: the consumer must bury the ticket. `partial` is what an actor that
    had to end gave back with the ticket, b"" for nothing.
    """

    id: str
    ticket: TicketId
    payload: bytes
    attempts: int = 0
    doomed: bool = False
    version: str = ""
    partial: bytes = b""


def read_entry(
    entry: bytes, ticket: bytes | None, payload: bytes | None, attempts: bytes | int = 0, doomed: int =
    0, partial: bytes | None = None,
) -> Entry:  # fmt: skip
    """Return an entry of a stream from its id (`entry`) and fields, as the server sends them.

    `ticket` is field t, `payload` field d (None if missing), `attempts` field a, the failed attempts;
    `doomed` is 1 if the ticket lost its lease while it ran alone; `partial` is field p. Raise
    MalformedMessage for fields that no role writes, with one of four texts: the cause by which they are
    counted.
    """
    if ticket is None:
        raise MalformedMessage("no field t, expected a ticket")
    if payload is None:
        raise MalformedMessage("no field d, expected a message")
    try:
        name = TicketId(text(ticket))
    except MalformedMessage as error:
        raise MalformedMessage("field t is no ticket, such as train:7") from error
    if not _ATTEMPTS.fullmatch(str(attempts) if isinstance(attempts, int) else text(attempts)):
        raise MalformedMessage("field a is no count of attempts, such as 1")
    return Entry(text(entry), name, payload, int(attempts), bool(doomed), partial=partial or b"")


class EntryReader:
    """Reader of the entries of one stream (its key is `stream`) that deletes those no role can read.

    They were written by another client: the server acknowledges, deletes and counts them by cause for
    `queues audit`, and the first of each cause is logged. With a `purpose`, an entry for a ticket of the
    other purpose is one of them; None allows both.
    """

    def __init__(
        self, connection: Connection, keys: Keys, stream: str, purpose: Purpose | None = None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._stream = stream
        self._purpose = purpose
        self._logged: set[str] = set()

    def read(self, rows: Iterable[Sequence[Any]]) -> list[Entry]:
        """Return the entries in `rows`, in order. A row has the arguments of `read_entry`, in its order.

        Left out are rows that `read_entry` refuses, or of another purpose than the reader's. The server
        deletes and counts them by cause; the first of each cause is logged as an error. Raise
        ServerUnavailable or another error of Connection.call.
        """
        entries: list[Entry] = []
        malformed: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            try:
                entry = read_entry(*row)
                if self._purpose is not None and entry.ticket.purpose != self._purpose:
                    raise MalformedMessage("a ticket of another purpose than its stream's")
                entries.append(entry)
            except MalformedMessage as error:
                malformed[str(error)].append(text(row[0]))
        for cause, found in malformed.items():
            self.drop(cause, found)
        return entries

    def drop(self, cause: str, entries: list[str]) -> None:
        """Delete the entries with these ids from the stream, and count those that were still there.

        `cause` is the text by which the server counts them. The first time that this reader deletes any
        for this cause, an error is logged. `entries` has at least one id. While a key is missing or of
        another type, which the learner restores, nothing is deleted. Raise ServerUnavailable or another
        error of Connection.call but RunNotReady.
        """
        keys, dropped = [self._keys.fence, self._stream, self._keys.malformed], 0
        with contextlib.suppress(RunNotReady):
            dropped = self._connection.call("drop", keys, [cause, *entries])
        if dropped and cause not in self._logged:
            self._logged.add(cause)
            where = f"Deleted entry {entries[0]} of {self._stream}: {cause}"
            log.error(shorten(f"{where}. {_WRITER}. `queues audit` counts such entries."))


class WorkStream:
    """The calls by which one process, `consumer`, takes work from one stream and hands it on.

    `stream` is the stream's key. A lease expires `lease_s` seconds after it was last renewed. A ticket
    is dead after `max_attempts` failed attempts, or if its payload has over `largest` bytes after this
    process's work. Creating a WorkStream calls nothing.
    """

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        stream: str,
        consumer: str,
        lease_s: float,
        max_attempts: int,
        largest: int = LARGEST,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self.max_attempts = max_attempts
        self._largest = largest
        self._connection = connection
        self._keys = keys
        self._lease_keys = (keys.fence, stream)
        self._ticket_keys = (keys.fence, keys.open, stream)
        self._watch = LeaseWatch(lease_s)
        self._interruptions = self._asked_at = connection.interruptions
        purposes: dict[str, Purpose] = {keys.tickets: "train", keys.eval_tickets: "eval"}
        self._reader = EntryReader(connection, keys, stream, purposes.get(stream))

    def take(self, count: int, block_ms: int = 0) -> list[Entry]:
        """Take up to `count` entries that no process has taken; [] if none comes within `block_ms`.

        `count` is above 0. The wait is at most 1 s, and 0 does not wait. Entries that no role can read,
        or that no learner issued, are deleted, counted and left out; so [] may come before the wait's
        end. If a reply of the server may have been lost since the last call, all entries that this
        consumer holds come first, also such as the caller knows. Raise ServerUnavailable or another
        error of Connection.execute.
        """
        block = ("BLOCK", min(block_ms, BLOCK_MS)) if block_ms > 0 else ()
        reply = self._connection.execute(
            "XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", count, *block,
            "STREAMS", self.stream, ">",
        )  # fmt: skip
        taken = [
            (entry, fields.get(b"t"), fields.get(b"d"), fields.get(b"a", 0), 0, fields.get(b"p"))
            for _, items in reply
            for entry, fields in items
        ]
        interruptions = self._connection.interruptions
        if interruptions != self._asked_at:
            known = {row[0] for row in taken}
            held = self._connection.call("held", self._lease_keys, [self.consumer])
            taken = [*(tuple(row) for row in held if row[0] not in known), *taken]
            self._asked_at = interruptions
        return self._placed(self._reader.read(taken))

    def _placed(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries that a learner issued, each with the version of its ticket's first issue.

        The server's hash `open` names them as their tickets' places. Other clients wrote the rest: the
        server deletes and counts them, and the first are logged. The order stays. Raise
        ServerUnavailable or another error of Connection.execute.
        """
        if not entries:
            return []
        places = self._connection.execute("HMGET", self._keys.open, *(entry.ticket for entry in entries))
        issued, others = [], []
        for entry, place in zip(entries, places, strict=True):
            here, _, version = text(place or b"").rpartition("|")
            if here == f"{self.stream}|{entry.id}":
                issued.append(replace(entry, version=version))
            else:
                others.append(entry.id)
        if others:
            self._reader.drop("no place of a ticket", others)
        return issued

    def has_expired(self) -> bool:
        """Return whether a lease expired, as `reclaim` would find. Nothing is taken over.

        A process that has no room for work calls this as often as `reclaim`: without looks in between,
        `reclaim` could not tell how long a lease was unchanged. Raise ServerUnavailable or another error
        of Connection.call.
        """
        return bool(self._expired())

    def _expired(self) -> list[Lease]:
        """Look at the stream's leases, and return those that expired, oldest entry first.

        Raise ServerUnavailable or another error of Connection.call.
        """
        rows = self._connection.call("leases", self._lease_keys, [])
        if self._interruptions != self._connection.interruptions:
            self._interruptions = self._connection.interruptions
            self._watch.skip()
        return self._watch.look(
            Lease(text(entry), text(holder), int(count)) for entry, holder, count in rows
        )

    def reclaim(self, count: int) -> list[Entry]:
        """Take over up to `count` entries whose lease expired, whoever held them.

        A lease has expired if calls of this method, or of `has_expired`, saw it unchanged for a lease,
        so the first call finds none. A time when the server was away or took no writes is left out: no
        holder could renew one then. The expired lease counts as a failed attempt, but not as the last
        one: for its last attempt a ticket runs alone. If the lease of such a run (`mark_alone`) expired,
        the entry has `doomed` True, and the caller must bury it. Return [] if no lease expired. Entries
        that no role can read, or no learner issued, are deleted, counted and left out. Raise
        ServerUnavailable or another error of Connection.call.
        """
        server = self._connection.server_id  # before the look, which may notice another one
        expired = self._expired()[:count]
        if not expired:
            return []
        args = (self.consumer, self.max_attempts, server, *(part for one in expired for part in one))
        return self._placed(self._reader.read(self._connection.call("reclaim", self._lease_keys, args)))

    def runs_alone(self, entry: Entry) -> bool:
        """Return whether the entry failed before and this is its last attempt. Nothing is changed.

        The consumer must then work on no other entry. With max_attempts 3, an entry whose first two
        attempts failed runs alone. A first attempt never does.
        """
        return entry.attempts >= self.max_attempts - 1 and entry.attempts > 0

    def mark_alone(self, entry: Entry) -> bool:
        """Record on the server that the consumer works on this entry alone, and renew its lease.

        If the lease expires later, `reclaim` gives the entry to a consumer as `doomed`: to be buried,
        not tried again. Return False, with no effect, if this consumer does not hold it. Raise
        ServerUnavailable or another error of Connection.call.
        """
        return bool(self._connection.call("mark_alone", self._lease_keys, [self.consumer, entry.id]))

    def renew(self, entries: Iterable[str]) -> list[bool]:
        """Renew the leases of the entries with these ids. Return for each, in order, if it is held.

        Held means by this consumer: not if another process took the entry, or it is gone. Raise
        ServerUnavailable or another error of Connection.call.
        """
        reply = self._connection.call("renew", self._lease_keys, [self.consumer, *entries])
        return [bool(owned) for owned in reply]

    def handoff(self, entry: Entry, destination: str, payload: bytes) -> bool:
        """Replace the entry by `payload` on the stream `destination`. The lease need not be valid.

        Return False, and add nothing, if the ticket ended or another process handed it on. If the
        payload is too large to send, log an error, bury the ticket (end it as dead) and return False.
        Raise ServerUnavailable or another error of Connection.call.
        """
        return self.handoff_all([(entry, payload)], destination)[0]

    def handoff_all(self, finished: Sequence[tuple[Entry, bytes]], destination: str) -> list[bool]:
        """Replace each entry by its payload on the stream `destination`, in one round trip.

        Return for each, in order, whether it was replaced: False if the ticket ended or was handed on
        before, or if the payload is too large to send. In the last case an error is logged, and the
        ticket buried (ended as dead). The leases need not be valid. Raise ServerUnavailable or another
        error of Connection.call.
        """
        fits = [self._fits(entry, payload) for entry, payload in finished]
        replies = self._connection.call_each(
            "handoff",
            [*self._ticket_keys, destination],
            [[entry.id, entry.ticket, payload] for entry, payload in compress(finished, fits)],
        )
        answers = iter(replies)
        return [fit and bool(next(answers)) for fit in fits]

    def _fits(self, entry: Entry, payload: bytes) -> bool:
        """Return whether run and server take the payload; if not, log an error and bury the ticket.

        To bury is to end the ticket as dead, if this consumer holds the entry. Raise ServerUnavailable
        or another error of Connection.call.
        """
        try:
            self.check_size(payload, f"the group of ticket {entry.ticket}")
        except ValueTooLarge as error:
            remedy = "lower LEARNER_NUM_GENERATIONS or LEARNER_MAX_COMPLETION_LENGTH"
            log.error(f"Ticket {entry.ticket} is dead: {error}. To avoid this, {remedy}.")
            self.bury(entry, entry.ticket.purpose, f"{error}: {remedy}")
            return False
        return True

    def check_size(self, payload: bytes, what: str) -> None:
        """Raise ValueTooLarge, naming `what`, for a payload that run or server does not take.

        Raise ServerUnavailable or another error of Connection.call if the server, asked for its limit,
        does not answer.
        """
        if len(payload) > self._largest:
            raise ValueTooLarge(
                f"{what} has {len(payload):,} bytes, but the run takes at most {self._largest:,} "
                "(LEARNER_MAX_GROUP_MIB)"
            )
        self._connection.check_size(payload, what)

    def give_back(self, entry: Entry, partial: bytes = b"") -> bool:
        """Put the entry back at the end of its stream. The attempt does not count as failed.

        `partial` is what was sampled for the ticket, which passed `check_size`. With b"" the entry keeps
        what an earlier actor gave back. Return False if this consumer does not hold the entry. Raise
        ServerUnavailable or another error of Connection.call.
        """
        return self._put_back(entry, 0, partial) >= 0

    def discard(self, entry: Entry, cause: str) -> None:
        """Delete an entry that another client changed. The learner issues its ticket again.

        It is counted by `cause`, and the first is logged. Raise ServerUnavailable or another error of
        Connection.call.
        """
        self._reader.drop(cause, [entry.id])

    def fail(self, entry: Entry, purpose: Purpose, reason: str) -> bool:
        """Count a failed attempt and put the entry back; after the last attempt bury the ticket.

        `purpose` is the ticket's; `reason` is stored only if the ticket is buried. Return True if it was
        buried, False if not, also if this consumer does not hold the entry. Raise ServerUnavailable or
        another error of Connection.call.
        """
        attempts = self._put_back(entry, 1)
        return attempts >= self.max_attempts and self.bury(entry, purpose, reason)

    def _put_back(self, entry: Entry, failures: int, partial: bytes = b"") -> int:
        """Put the entry back at the end of its stream, with `failures` (0 or 1) more failed attempts.

        Without a failure it has `partial` then, or if that is b"" what it had. Return the failed
        attempts so far, -1 if this consumer does not hold the entry. If a failure was the last attempt,
        the entry stays, for `bury`. Raise ServerUnavailable or another error of
        Connection.call.
        """
        args = (self.consumer, entry.id, entry.ticket, failures, self.max_attempts, partial)
        return int(self._connection.call("put_back", self._ticket_keys, args))

    def bury(self, entry: Entry, purpose: Purpose, reason: str) -> bool:
        """End the ticket as dead. Payload and reason go to the stream `dead`, a verdict to the learner.

        `purpose` is the ticket's. 64 KiB of the payload and 2000 characters of `reason` are kept; "" is
        "no reason was given". Return True; False, with nothing stored, if this consumer does not hold
        the entry. Raise ServerUnavailable or another error of Connection.call.
        """
        # The text of an error has any length and form.
        reason = encodable(reason[:SHOWN])[:SHOWN] or "no reason was given"
        verdict = encode(Verdict(entry.ticket, "dead", reason))
        keys = (*self._ticket_keys, self._keys.outcomes_for(purpose), self._keys.dead)
        payload = entry.payload[:_DEAD_BYTES]
        args = (self.consumer, entry.id, entry.ticket, payload, verdict, reason)
        return bool(self._connection.call("bury", keys, args))

    def leave(self) -> None:
        """Remove this consumer from the stream's group on the server; do nothing if it holds entries.

        Raise ServerUnavailable or another error of Connection.call.
        """
        self._connection.call("remove_consumer", [self.stream], [self.consumer])
