"""The order in which the learner commits decisions: ledger, journal, queue server.

A decision is entered in the ledger, written to the journal and synced, and only then acknowledged on
the queue server. A kill at any point therefore loses no group and trains none twice.
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
    """Writes decisions to the journal, then acknowledges them on the queue server.

    `position` is the end of the journal, `recorded` the ledger as of there. A checkpoint stores these
    two: `ledger` may hold decisions that are not in the journal yet.
    """

    def __init__(self, ledger: Ledger, journal: Journal, queue: LearnerQueue) -> None:
        self.ledger = ledger
        self._journal = journal
        self._queue = queue
        self._entries: dict[TicketId, list[str]] = defaultdict(list)
        self.position = Position(journal.incarnation, 0)
        self.recorded = ledger.snapshot()

    def saw(self, entry: Entry) -> None:
        """Remember the stream entry of an outcome; `record` deletes it once its ticket has ended."""
        if entry.id not in self._entries[entry.ticket]:
            self._entries[entry.ticket].append(entry.id)

    def record(self, kind: str, **fields: Any) -> None:
        """Append a record and sync the journal, then acknowledge the tickets that ended since the last.

        Raise DiskFull, RunTaken or ServerUnavailable.
        """
        ends = self.ledger.take_unrecorded()
        self.recorded = self.ledger.snapshot()
        self.position = self._journal.append(kind, **fields, ends=ends, ledger=self.recorded)
        self._acknowledge(ends)

    def _acknowledge(self, ends: dict[TicketId, list[str]]) -> None:
        """Close ended tickets on the server, and delete the entries of tickets that are not open."""
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
