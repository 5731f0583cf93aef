"""The learner's books: the ledger, the journal it is written to, the acknowledgement that follows.

The order is the promise: a decision is entered in the ledger, written to the journal and synced, and
only then acknowledged in Redis. So a kill at any point loses no payload and trains nothing twice.
"""

from collections import defaultdict
from typing import Any

from penstock.common.broker.work_stream import Entry
from penstock.common.journal.claims import Position
from penstock.common.wire.ids import Purpose, TicketId
from penstock.common.wire.messages import EndState
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.learner_queue import LearnerQueue


class CommitLog:
    """Writes down what was decided, then acknowledges it.

    `position` and `recorded` are the journal's end and the ledger as it was written there: what a
    checkpoint may rely on, unlike the ledger itself, which runs ahead of the journal.
    """

    def __init__(self, ledger: Ledger, journal: Journal, queue: LearnerQueue) -> None:
        self.ledger = ledger
        self._journal = journal
        self._queue = queue
        self._entries: dict[TicketId, list[str]] = defaultdict(list)
        self.position = Position(journal.incarnation, 0)
        self.recorded = ledger.snapshot()

    def saw(self, entry: Entry) -> None:
        """Remember an outcome's entry, to be deleted when its ticket has ended."""
        if entry.id not in self._entries[entry.ticket]:
            self._entries[entry.ticket].append(entry.id)

    def record(self, kind: str, **fields: Any) -> None:
        """Append and sync a record with all that ended since the last one, then acknowledge it."""
        ends = self.ledger.take_unrecorded()
        self.recorded = self.ledger.snapshot()
        self.position = self._journal.append(kind, **fields, ends=ends, ledger=self.recorded)
        self._acknowledge(ends)

    def _acknowledge(self, ends: dict[TicketId, list[str]]) -> None:
        purposes: tuple[Purpose, ...] = ("train", "eval")
        for purpose in purposes:
            states: dict[TicketId, EndState] = {
                ticket: state  # type: ignore[misc]
                for ticket, (state, _) in ends.items()
                if ticket.purpose == purpose
            }
            spent = [
                ticket
                for ticket in self._entries
                if ticket.purpose == purpose and ticket not in self.ledger.open
            ]
            entries = [entry for ticket in spent for entry in self._entries.pop(ticket)]
            if states or entries:
                self._queue.close(purpose, states, entries)
