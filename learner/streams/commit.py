"""The order in which the learner commits decisions: ledger, journal, queue server.

A decision is entered in the ledger, written to the journal and synced, and only then acknowledged on
the queue server. A kill at any point therefore loses no group and trains none twice.
"""

from typing import Any, cast

from penstock.common.broker.work_stream import BEGINNING, Entry
from penstock.common.journal.claims import Position
from penstock.common.wire.ids import Purpose, TicketId
from penstock.common.wire.messages import EndState
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.learner_queue import LearnerQueue


class CommitLog:
    """Reads outcomes, writes decisions to the journal, then acknowledges them on the queue server.

    `position` is the end of the journal, `recorded` the ledger as of there. A checkpoint stores these
    two: `ledger` may hold decisions that are not in the journal yet. `journal` is new and without
    records, and the first `read` begins with the first outcome.
    """

    def __init__(self, ledger: Ledger, journal: Journal, queue: LearnerQueue) -> None:
        self.ledger = ledger
        self._journal = journal
        self._queue = queue
        self._entries: dict[Purpose, dict[str, TicketId]] = {"train": {}, "eval": {}}  # by stream entry
        self.read_again()
        self.position = Position(journal.incarnation, 0)
        self.recorded = ledger.snapshot()

    def read(self, purpose: Purpose, count: int = 64) -> list[Entry]:
        """Return the next outcomes of tickets of `purpose`, at most `count`, after those read before.

        Do not wait: [] if there is none. Malformed entries are deleted and left out. `record` deletes
        outcomes on the server once their tickets end. Those of tickets whose end is in the journal, or
        that were never issued, are returned too, and deleted at once. Raise RunTaken, ServerUnavailable
        or another error of Connection.call.
        """
        entries = self._queue.outcomes(purpose, self._read_up_to[purpose], count)
        known = self.ledger.open.keys() | self.ledger.unrecorded.keys() if entries else ()
        for entry in entries:
            self._read_up_to[purpose] = entry.id
            if entry.ticket in known:
                self._entries[purpose][entry.id] = entry.ticket
        if spent := [entry.id for entry in entries if entry.ticket not in known]:
            self._queue.close(purpose, {}, spent)
        return entries

    def read_again(self) -> None:
        """Let the next `read` of each purpose begin with the first outcome that the server still has."""
        self._read_up_to: dict[Purpose, str] = {"train": BEGINNING, "eval": BEGINNING}

    def record(self, kind: str, **fields: Any) -> None:
        """Write and sync a record to the journal, then end on the server the tickets that ended.

        These are the tickets that ended since the last record; outcomes read of them are deleted. `kind`
        is the record's, such as "batch", with `fields` of its own. The ends, the ledger and the answers
        of an evaluation since the last record are added.
        `position` and `recorded` are set. Raise DiskFull before anything is acknowledged, RunTaken,
        ServerUnavailable or another error of Connection.call.
        """
        ends = self.ledger.take_unrecorded()
        if self.ledger.answers:
            fields["answers"], self.ledger.answers = self.ledger.answers, []
        self.recorded = self.ledger.snapshot()
        self.position = self._journal.append(kind, **fields, ends=ends, ledger=self.recorded)
        self._queue.journal_length = self.position.offset
        self._acknowledge(ends)

    def _acknowledge(self, ends: dict[TicketId, list[str]]) -> None:
        """End the tickets of `ends`, mapped to [state, reason], on the server; delete read outcomes.

        Deleted there and forgotten here are the outcomes whose tickets are not open in the ledger. Raise
        RunTaken, ServerUnavailable or another error of Connection.call.
        """
        for purpose, read in self._entries.items():
            ended = [ticket for ticket in ends if ticket.purpose == purpose]
            states = {ticket: cast(EndState, ends[ticket][0]) for ticket in ended}
            spent = [entry for entry, ticket in read.items() if ticket not in self.ledger.open]
            if states or spent:
                self._queue.close(purpose, states, spent)
            for entry in spent:
                del read[entry]
