"""What every process may read of a run, and the wait for a learner to set the run up."""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, MalformedMessage, NotPermitted, WrongType
from penstock.common.log import get_logger, shorten
from penstock.common.phases import SETUP_PHASES
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import Contract
from penstock.common.wire.ids import TicketId, is_number
from penstock.common.wire.messages import Weights

_POLL_S = 0.2
_UNREADABLE_LEASE_S, _LONGEST_LEASE_MS = 60.0, 86_400_000
_SLICE = 1000  # tickets in one call, which blocks the server for some 50 ms
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,14}")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an open ticket at the instant of an audit; idle_ms since its lease was renewed.

    `exists` is False if the server lost the entry: the learner will issue the ticket again.
    """

    ticket: TicketId
    stream: str
    entry: str
    first_version: str
    attempts: int
    consumer: str
    idle_ms: int
    exists: bool


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """The learner's last heartbeat: the process, its phase, and a time that changes each time."""

    holder: str
    incarnation: int
    seen: str
    phase: str

    def __str__(self) -> str:
        """Return "the learner is process 7 (incarnation 2, when last seen: making an Update)".

        Without a phase the last part is missing; without a holder the text is "no learner has claimed
        the run".
        """
        if not self.holder:
            return "no learner has claimed the run"
        doing = f", when last seen: {self.phase}" if self.phase else ""
        return f"the learner is {self.holder} (incarnation {self.incarnation}{doing})"


class RunView:
    """The state of a run that every process may read. Each method but `report` asks the queue server.

    A value that no learner wrote reads as a missing one, and is logged once: the learner writes its own
    again within a quarter of its lease, so the reader may ask again. The methods raise the errors of
    Connection.execute, such as ServerUnavailable.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.keys = keys
        self._connection = connection
        self._logged: set[tuple[str, str]] = set()
        self._last_beat: tuple[bytes | None, float] | None = None  # since the state is "ended"

    def contract(self) -> bytes | None:
        """Return the contract that the learner published, still encoded and not checked.

        None before a learner's setup, or if the key has another type, which is logged once. Raise
        ServerUnavailable or another error of Connection.execute.
        """
        return cast(bytes | None, self._read("GET", self.keys.contract))

    def weights(self) -> Weights | None:
        """Return the announced weights; None if there are none.

        A value that cannot be decoded, or a key of another type, is logged once and gives None. Raise
        ServerUnavailable or another error of Connection.execute.
        """
        data = self._read("GET", self.keys.weights)
        try:
            return None if data is None else decode(data, Weights)
        except MalformedMessage as error:
            self.report(f"No weights are announced in {self.keys.weights}: {error}")
            return None

    def delta_part(self, field: str) -> bytes | None:
        """Return a part of a delta, by its name in the hash `deltas`; None if it is not there.

        None too, which is logged once, for a user without the right. Raise the other errors of
        Connection.execute.
        """
        try:
            return cast(bytes | None, self._read("HGET", self.keys.deltas, field))
        except NotPermitted as error:
            self.report(f"What changed in the weights cannot be read from the queue server: {error}")
            return None

    def begins_again(self) -> bool:
        """Return whether the state is "ended" and a learner is in its setup, from which it goes on.

        Raise ServerUnavailable or another error of Connection.execute.
        """
        return self._read("GET", self.keys.state) == b"ended" and self.learner().phase in SETUP_PHASES

    def ended(self) -> bool:
        """Return whether the learner has ended the run, and left. False unless the state is "ended".

        With this state, True if the learner gave its lease back: the lease is 0. Otherwise another
        client may have written the state, or the learner was killed before it gave the lease back. Then
        True only if calls of this method have seen no new heartbeat for longer than the lease, by this
        process's clock; the last heartbeat and its time are stored for that. A lease that is missing, or
        that no learner wrote, counts as 60 s. A key of another type is logged once and counts as
        missing. Raise ServerUnavailable or another error of Connection.execute.
        """
        if self._read("GET", self.keys.state) != b"ended":
            self._last_beat = None
            return False
        seen, lease = self._read("HMGET", self.keys.fence, "seen", "lease") or (None, None)
        if lease == b"0":
            return True
        lease_s = _UNREADABLE_LEASE_S
        if lease and _NUMBER.fullmatch(lease) and int(lease) <= _LONGEST_LEASE_MS:
            lease_s = int(lease) / 1000
        now = time.monotonic()
        if self._last_beat is None or self._last_beat[0] != seen:
            self._last_beat = (seen, now)
        return now - self._last_beat[1] > lease_s

    def incarnation(self) -> int:
        """Return the number of the learner's newest incarnation; 0 before any claim.

        A stored text that is no number, or a key of another type, is logged once and gives 0. Raise
        ServerUnavailable or another error of Connection.execute.
        """
        return self._incarnation_of(self._read("HGET", self.keys.fence, "incarnation") or b"")

    def learner(self) -> LearnerStatus:
        """Return the learner's last heartbeat; before a claim its texts are "" and its incarnation is 0.

        A key of another type gives the same, and is logged once. Raise ServerUnavailable or another
        error of Connection.execute.
        """
        names = ("holder", "incarnation", "seen", "phase")
        found = self._read("HMGET", self.keys.fence, *names) or (None,) * len(names)
        holder, incarnation, seen, phase = (value or b"" for value in found)
        return LearnerStatus(text(holder), self._incarnation_of(incarnation), text(seen), text(phase))

    def newest_folder(self) -> tuple[int, int, str, str]:
        """Return the incarnation that was last claimed in a folder of the run, and three facts of it.

        These are the bytes of its journal, the holder that its claim names, and the folder as HOST:PATH.
        0, 0, "" and "" if the server does not know, or for numbers that no learner wrote. Raise
        ServerUnavailable or another error of Connection.execute.
        """
        names = ("claimed", "journal", "claimant", "folder")
        found = self._read("HMGET", self.keys.fence, *names) or (None,) * len(names)
        claimed, journal, claimant, folder = (text(value or b"") for value in found)
        if not (is_number(claimed) and is_number(journal)):
            return 0, 0, "", ""
        return int(claimed), int(journal), claimant, folder

    def open_tickets(self) -> int:
        """Return how many tickets are open on the server, 0 if their key has another type.

        Raise ServerUnavailable or another error of Connection.execute.
        """
        return int(self._read("HLEN", self.keys.open) or 0)

    def malformed(self) -> dict[str, int]:
        """Return by cause how many entries were deleted because no role can read them; {} if none were.

        Counts that are no number are left out. A key of another type is logged once and gives {}. Raise
        ServerUnavailable or another error of Connection.execute.
        """
        flat = self._read("HGETALL", self.keys.malformed) or {}
        return {text(cause): int(count) for cause, count in flat.items() if _NUMBER.fullmatch(count)}

    def _incarnation_of(self, found: bytes) -> int:
        """Return the number in `found`, the text of the fence's field incarnation; 0 for b"".

        Another text, which no learner wrote and the next claim overwrites, is logged once and gives 0.
        """
        if not found or _NUMBER.fullmatch(found):
            return int(found or 0)
        expected = f"field incarnation of {self.keys.fence} is {text(found)!r}, expected a number"
        self.report(f"No learner holds the run: {expected}. Start the learner again.")
        return 0

    def _read(self, *command: str) -> Any:
        """Send a command, such as "GET" and a key, and return its reply.

        None if the key has another type, which is logged once. Raise the other errors of
        Connection.execute, such as ServerUnavailable.
        """
        try:
            return self._connection.execute(*command)
        except WrongType as error:
            self.report(str(error))
            return None

    def report(self, fault: str, cause: str = "") -> None:
        """Log the text `fault` as an error with its cause, unless this view has logged both before."""
        if (fault, cause) not in self._logged:
            self._logged.add((fault, cause))
            log.error(shorten(fault), **({"cause": cause} if cause else {}))

    def audit(self) -> tuple[dict[str, int], list[Place], int]:
        """Return the ledger's totals, the open tickets in no order, and how many are open.

        Totals and count are of one instant. The totals are by name ("issued" and the end states),
        without those that were never counted. The tickets are read a thousand or so at a time, as each
        call keeps the server from all else: of a thousand or fewer, they are of that instant too. All
        are empty for an unknown run. Raise RunNotReady if no learner has loaded its functions on the
        server, or a stream lacks its group, WrongType for a key of another type, or another error of
        Connection.call.
        """
        keys = [self.keys.open, self.keys.ledger, *self.keys.work_streams]
        found: dict[TicketId, Place] = {}
        strange, cursor = 0, "0"
        while True:
            args: list[str | int] = [text(cursor), _SLICE]
            cursor, totals, names, others, rows = self._connection.call("audit", keys, args)
            strange += others
            found |= {place.ticket: place for place in map(_read_place, rows)}
            if text(cursor) == "0":
                counts = zip(totals[::2], totals[1::2], strict=True)
                ledger = {text(name): int(count) for name, count in counts}
                return ledger, list(found.values()), names - strange


def _read_place(row: Sequence[Any]) -> Place:
    """Return the place in a row of the server's answer, whose values are in the order of its fields."""
    ticket, stream, entry, version, attempts, consumer, idle_ms, exists = row
    return Place(
        TicketId(text(ticket)), text(stream), text(entry), text(version), int(attempts), text(consumer),
        int(idle_ms), bool(exists),
    )  # fmt: skip


def wait_for_run(view: RunView, timeout_s: float, stopping: threading.Event) -> bytes | None:
    """Return the encoded contract of the run that this process joins, as `wait_for_contract` does.

    A run that has ended may be about to go on: wait until a learner is past its setup. Return None if
    none gives a heartbeat for `timeout_s`, or if `stopping` is set. Raise as `wait_for_contract`.
    """
    deadline, logged = Deadline(timeout_s), False
    while view.ended() or view.begins_again():
        if stopping.is_set() or deadline.expired(progress=view.learner()):
            return None
        if not logged or deadline.report_due():
            logged = True
            log.info(f"The run has ended. Waiting {timeout_s:g} s for a learner that goes on with it.")
        stopping.wait(_POLL_S)
    return wait_for_contract(view, timeout_s, stopping)


def wait_for_contract(view: RunView, timeout_s: float, stopping: threading.Event) -> bytes | None:
    """Return the encoded contract of the run, or None if `stopping` is set first.

    The server is asked every 0.2 s, and the wait is logged every 30 s. Raise DeadlineExceeded if for
    `timeout_s` there was no contract and no new heartbeat of a learner. Raise MalformedMessage if for as
    long the contract could not be read: another release's, or another client's, which the learner
    replaces. Raise ServerUnavailable or another error of Connection.execute.
    """
    deadline, unreadable = Deadline(timeout_s), Deadline(timeout_s)
    while not stopping.is_set():
        contract = view.contract()
        try:
            if contract is not None:
                decode(contract, Contract)
                return contract
            unreadable.restart()
        except MalformedMessage as error:
            if unreadable.expired():
                raise
            view.report(f"Waiting for a contract in {view.keys.contract} that can be read: {error}")
        status = view.learner()
        if deadline.expired(progress=status):  # not while a learner reads data or fetches its model
            raise DeadlineExceeded(
                f"no learner set up the run within {timeout_s:g} s ({status}): start `learner` with the "
                "same RUN_NAME and REDIS_URL, or raise RUN_JOIN_TIMEOUT_S"
            )
        if deadline.report_due():
            wait = f"Waiting for the run to be set up for {deadline.waited_s:.0f} s"
            log.warning(shorten(f"{wait}: {status}. Start `learner`."))
        stopping.wait(_POLL_S)
    return None


def wait_for_another_contract(
    view: RunView, contract: bytes, timeout_s: float, stopping: threading.Event
) -> bytes | None:
    """Return the contract that replaces `contract`, which this process cannot serve; None if none does.

    An earlier learner may have left `contract`, and the next one reads its data first. So wait until a
    learner gives a heartbeat and has published its own: it is past its setup; or until none gives
    one for `timeout_s`. A learner that claimed the run meanwhile replaces it also by an equal one: it
    may serve files that were missing. None too if `stopping` is set. Raise ServerUnavailable or another
    error of Connection.execute.
    """
    first, deadline = view.learner(), Deadline(timeout_s)
    while not stopping.is_set():
        status, found = view.learner(), view.contract()
        if deadline.expired(progress=status):
            return None
        if found not in (None, contract):
            return found
        if status.seen != first.seen and status.phase not in SETUP_PHASES:
            return found if status.incarnation > first.incarnation else None
        if deadline.report_due():
            log.warning(shorten(f"Waiting for another contract: {status}. Start `learner`."))
        stopping.wait(_POLL_S)
    return None
