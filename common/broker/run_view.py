"""What every process may read of a run, and the wait for a learner to set the run up."""

import threading
from dataclasses import dataclass
from typing import Any

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Weights

_POLL_S = 0.2

log = get_logger(__name__)


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
        stopping.wait(_POLL_S)
    return None


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
