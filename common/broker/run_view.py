"""What every process may read of a run, and the wait for a learner to set the run up."""

import threading
from dataclasses import dataclass
from typing import cast

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded
from penstock.common.log import get_logger, shorten
from penstock.common.wire.codec import decode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Weights

_POLL_S = 0.2

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
class LearnerSign:
    """The learner's last heartbeat: the process, its phase, and a time that changes each time."""

    holder: str
    incarnation: int
    seen: str
    phase: str

    def __str__(self) -> str:
        """Return "the learner is process 7 (incarnation 2)", or that no learner has claimed the run."""
        if not self.holder:
            return "no learner has claimed the run"
        doing = f", when last seen: {self.phase}" if self.phase else ""
        return f"the learner is {self.holder} (incarnation {self.incarnation}{doing})"


class RunView:
    """The state of a run that every process may read. Each method asks the queue server."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.keys = keys
        self._connection = connection

    def contract(self) -> bytes | None:
        """Return the encoded contract, None before the setup. Raise as Connection.execute does."""
        return cast(bytes | None, self._connection.execute("GET", self.keys.contract))

    def weights(self) -> Weights | None:
        """Return the announced weights or None. Raise MalformedMessage, or as Connection.execute."""
        data = self._connection.execute("GET", self.keys.weights)
        return None if data is None else decode(data, Weights)

    def ended(self) -> bool:
        """Return whether the learner has ended the run. Raise as Connection.execute does."""
        return bool(self._connection.execute("GET", self.keys.state) == b"ended")

    def incarnation(self) -> int:
        """Return the learner's incarnation, 0 before any claim. Raise as Connection.execute does."""
        return int(self._connection.execute("HGET", self.keys.fence, "incarnation") or 0)

    def learner(self) -> LearnerSign:
        """Return the last heartbeat, with holder "" before a claim. Raise as Connection.execute does."""
        names = ("holder", "incarnation", "seen", "phase")
        found = self._connection.execute("HMGET", self.keys.fence, *names)
        holder, incarnation, seen, phase = (text(value or b"") for value in found)
        return LearnerSign(holder, int(incarnation or 0), seen, phase)

    def audit(self) -> tuple[dict[str, int], list[Place]]:
        """Return the ledger's totals and the open tickets, at one instant.

        Raise RunNotReady before setup, MalformedMessage for a wrong ticket id, or as Connection.call.
        """
        totals, places = self._connection.call(
            "audit", [self.keys.open, self.keys.ledger, *self.keys.work_streams], []
        )
        counts = dict(zip(totals[::2], totals[1::2], strict=True))
        return {text(name): int(count) for name, count in counts.items()}, [
            Place(
                TicketId(text(ticket)), text(stream), text(entry), text(version), int(attempts),
                text(consumer), int(idle_ms), bool(exists),
            )
            for ticket, stream, entry, version, attempts, consumer, idle_ms, exists in places
        ]  # fmt: skip


def wait_for_contract(view: RunView, timeout_s: float, stopping: threading.Event) -> bytes | None:
    """Return the encoded contract of the run, or None if `stopping` is set first.

    Raise DeadlineExceeded if for `timeout_s` no contract was published and no learner sent a heartbeat.
    The wait is logged every 30 s. Raise also as Connection.execute does.
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
            wait = f"Waiting for the run to be set up for {deadline.waited_s:.0f} s"
            log.warning(shorten(f"{wait}: {sign}. Start `learner`."))
        stopping.wait(_POLL_S)
    return None
