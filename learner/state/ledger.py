"""The learner's table of tickets and versions: what is open, what ended, what was published.

Tickets are numbered. A number below `next_number` that is not open has ended. Example: next_number 5,
open 3 and 4: tickets 0, 1 and 2 have ended. The counters on the queue server are a copy of this table.

A ticket asks the question at the position of its number in the data set, until a dropped question is
asked again. That question takes a number but no new position. From then on the table stores positions of
open tickets, and a new position is the number minus the repeats. Example: question 3 was dropped, and
ticket 7 asks it again (1 repeat): ticket 8 asks question 7.

`versions` has the hash of each published version whose tokens an open ticket may bring, those of earlier
incarnations included. The table follows the chain of claims: it never has a version that a superseded
learner published after its successor's claim.
"""

from collections import Counter
from typing import TypedDict

from penstock.common.wire.codec import fields_as
from penstock.common.wire.ids import LARGEST, TicketId, Version
from penstock.common.wire.limits import check_range
from penstock.common.wire.messages import END_STATES, EndState


class LedgerTable(TypedDict):
    """The ledger as plain data, in each record of the journal and in checkpoints."""

    next_number: int
    open: dict[str, str]  # ticket to version
    totals: dict[str, int]
    total_dropped: int
    positions: dict[str, int]
    to_repeat: list[int]
    repeats: int
    versions: dict[str, str]  # version to the hash of its weights


class RecordedAnswer(TypedDict):
    """An answer to a held-out question in the journal.

    `asked` is the hash of what was asked, `weights` that of the version, `answer` an encoded Answer.
    """

    asked: str
    weights: str
    answer: bytes


class Ledger:
    """Open tickets with the version they were first issued at, and the counts of ended tickets.

    A new ledger is empty. All methods change or read memory only: the journal and the checkpoints store
    what `snapshot` returns.
    """

    def __init__(self) -> None:
        self.next_number = 0
        self.open: dict[TicketId, Version] = {}
        self.versions: dict[Version, str] = {}
        self.totals: Counter[str] = Counter()
        self.total_dropped = 0
        self.owes_record = False  # True: before a ticket is issued, the journal needs a record, see drop
        self.unrecorded: dict[TicketId, list[str]] = {}  # ended since the last record: [state, reason]
        self.answers: list[RecordedAnswer] = []  # to held-out questions, since the last record
        self.earlier_answers: list[RecordedAnswer] = []  # of an evaluation that a restart cut off
        self._positions: dict[TicketId, int] = {}
        self._to_repeat: list[int] = []
        self._repeats = 0

    @property
    def train_open(self) -> int:
        """Number of open training tickets."""
        return sum(1 for ticket in self.open if ticket.purpose == "train")

    def opened(self, ticket: TicketId, version: Version) -> None:
        """Add an issued ticket as open since `version`, and count it in totals["issued"].

        If the ticket is open already, nothing changes: its first version stays.
        """
        if ticket not in self.open:
            self.open[ticket] = version
            self.totals["issued"] += 1

    def publish(self, version: Version, weights_hash: str) -> None:
        """Store the hash of a published version's weights; forget versions older than all open tickets.

        Forgotten are those with a step below that of `version` and of all first issues: no ticket is
        sampled by a version before its issue. Example: the oldest open ticket was issued at 1.5:
        versions from step 5 on are kept.
        """
        self.versions[version] = weights_hash
        oldest = min([version.step, *(first.step for first in self.open.values())])
        self.versions = {made: found for made, found in self.versions.items() if made.step >= oldest}

    def is_of_earlier_incarnation(self, ticket: TicketId) -> bool:
        """Return whether an open ticket was first issued by an earlier incarnation of the learner.

        Earlier is one before the newest incarnation that has published weights; before any weights
        return False. Raise KeyError if the ticket is not open.
        """
        newest = max((version.incarnation for version in self.versions), default=0)
        return self.open[ticket].incarnation < newest

    def next_train_ticket(self) -> TicketId:
        """Return the next training ticket, which is not open yet: the caller opens it with `opened`.

        Its number is `next_number`, which grows by 1. The ticket is for the oldest dropped question that
        is to be asked again or, if there is none, for the next position of the data set. `position` of
        the ticket returns which.
        """
        number = self.next_number
        self.next_number += 1
        ticket = TicketId.train(number)
        if self._to_repeat:
            self._positions[ticket] = self._to_repeat.pop(0)
            self._repeats += 1
        elif self._repeats:
            self._positions[ticket] = number - self._repeats
        return ticket

    def position(self, ticket: TicketId) -> int:
        """Return the data set's position, over all epochs, of the question of a training ticket.

        The ticket is open, or the latest of `next_train_ticket`. Example: with 100 questions, position
        105 is the sixth of the second epoch. A ticket that has ended or was never made gives its number.
        """
        return self._positions.get(ticket, ticket.number)

    def close(self, ticket: TicketId, state: EndState, reason: str = "") -> None:
        """End an open ticket, count its end `state` in `totals`, and store the end in `unrecorded`.

        `reason`, for people, is stored too, until the next record of the journal. Raise KeyError if the
        ticket is not open.
        """
        del self.open[ticket]
        self._positions.pop(ticket, None)
        self.totals[state] += 1
        self.unrecorded[ticket] = [state, reason]

    def drop(self, ticket: TicketId, ask_again: bool) -> None:
        """End as stale an open ticket whose group is over max_staleness; count it in `total_dropped`.

        With `ask_again` a later ticket asks its question again, and `owes_record` becomes True: the
        journal then needs a record before a ticket is issued, because after a crash the questions of
        tickets issued after the last record are derived from that record. Raise KeyError if the ticket
        is not open.
        """
        self.total_dropped += 1
        if ask_again:
            self._to_repeat.append(self.position(ticket))
            self.owes_record = True
        repeated = ", its question is asked again" if ask_again else ""
        self.close(ticket, "stale", f"over max_staleness{repeated}")

    def take_unrecorded(self) -> dict[TicketId, list[str]]:
        """Return the tickets that ended since the last call, each with [state, reason], and forget them.

        `owes_record` becomes False: the caller writes these ends to the journal.
        """
        ends, self.unrecorded = self.unrecorded, {}
        self.owes_record = False
        return ends

    def snapshot(self) -> LedgerTable:
        """Return a copy of the table as plain data, without `unrecorded` (the reasons of ends).

        `totals` has "issued" and every end state, also those with 0.
        """
        return {
            "next_number": self.next_number,
            "open": {ticket: str(version) for ticket, version in self.open.items()},
            "totals": {name: self.totals[name] for name in ("issued", *END_STATES)},
            "total_dropped": self.total_dropped,
            "positions": {str(ticket): at for ticket, at in self._positions.items()},
            "to_repeat": list(self._to_repeat),
            "repeats": self._repeats,
            "versions": {str(version): found for version, found in self.versions.items()},
        }

    def restore(self, snapshot: LedgerTable) -> None:
        """Replace the ledger by a table that `snapshot` returned, and forget unrecorded ends.

        Raise MalformedMessage for a wrong field, number, ticket or version; half may be replaced then.
        """
        found = fields_as(LedgerTable, snapshot, "ledger")
        single = [found[name] for name in ("next_number", "total_dropped", "repeats")]
        many = [*found["to_repeat"], *found["positions"].values(), *found["totals"].values()]
        for number in single + many:
            check_range("ledger: a number", number, 0, LARGEST)
        self.next_number = found["next_number"]
        self.open = {TicketId(name): Version.parse(text) for name, text in found["open"].items()}
        self.totals = Counter(found["totals"])
        self.total_dropped = found["total_dropped"]
        self._positions = {TicketId(name): at for name, at in found["positions"].items()}
        self._to_repeat = list(found["to_repeat"])
        self._repeats = found["repeats"]
        versions = found["versions"].items()
        self.versions = {Version.parse(text): made for text, made in versions}
        self.unrecorded, self.owes_record = {}, False

    def eval_open(self) -> list[TicketId]:
        """Return the open evaluation tickets, in the order in which they were opened."""
        return [ticket for ticket in self.open if ticket.purpose == "eval"]
