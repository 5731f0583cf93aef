"""The learner's own table of tickets: which are open, how many ended how.

Closed are exactly the issued numbers that are not open, so a low-water mark (`next_number`) and the
open set say everything. Redis' counters are a cache that this table overwrites.

A ticket asks the question at its number's position in the data set, until a dropped question is asked
again: that takes a number but no position, so from then on the table also holds the positions of the
open tickets, and the next new position is the number less the repeats so far.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import END_STATES, EndState


class Ledger:
    """Open tickets with the version they were first issued at, and counts of the ended ones."""

    def __init__(self) -> None:
        self.next_number = 0
        self.open: dict[TicketId, Version] = {}
        self.totals: Counter[str] = Counter()
        self.total_dropped = 0
        self.owes_record = False
        self._positions: dict[TicketId, int] = {}
        self._to_repeat: list[int] = []
        self._repeats = 0
        self._unrecorded: dict[TicketId, list[str]] = {}

    @property
    def train_open(self) -> int:
        """Training tickets out: issued minus closed."""
        return sum(1 for ticket in self.open if ticket.purpose == "train")

    def opened(self, ticket: TicketId, version: Version) -> None:
        """Enter a ticket that was issued; a ticket known as open keeps its first version."""
        if ticket not in self.open:
            self.open[ticket] = version
            self.totals["issued"] += 1

    def next_train_ticket(self) -> TicketId:
        """The next id; it asks what is to be asked again, or else the data set's next question."""
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
        """Where an open training ticket's question lies in the data set, counted on over the epochs."""
        return self._positions.get(ticket, ticket.number)

    def was_issued(self, ticket: TicketId) -> bool:
        """Whether a training ticket's number lies behind the cursor."""
        return ticket in self.open or ticket.number < self.next_number

    def close(self, ticket: TicketId, state: EndState, reason: str = "") -> None:
        """End an open ticket; its credit returns now."""
        del self.open[ticket]
        self._positions.pop(ticket, None)
        self.totals[state] += 1
        self._unrecorded[ticket] = [state, reason]

    def drop(self, ticket: TicketId, ask_again: bool) -> None:
        """End a ticket whose group came to lie over max_staleness; maybe its question is asked again.

        Then a record is owed before the next ticket is issued: what a ticket asks that was issued after
        the journal's last record has to follow from that record.
        """
        self.total_dropped += 1
        reason = "over max_staleness"
        if ask_again:
            self._to_repeat.append(self.position(ticket))
            self.owes_record = True
            reason += ", its question is asked again"
        self.close(ticket, "stale", reason)

    @property
    def has_unrecorded(self) -> bool:
        """Whether anything ended since the journal's last record."""
        return bool(self._unrecorded)

    def take_unrecorded(self) -> dict[TicketId, list[str]]:
        """What ended since this was last called: ticket to [state, reason], for the journal."""
        ends, self._unrecorded = self._unrecorded, {}
        self.owes_record = False
        return ends

    def snapshot(self) -> dict[str, Any]:
        """The table as plain data; what ended is in the journal's records."""
        return {
            "next_number": self.next_number,
            "open": {ticket: str(version) for ticket, version in self.open.items()},
            "totals": {name: self.totals[name] for name in ("issued", *END_STATES)},
            "total_dropped": self.total_dropped,
            "positions": dict(self._positions),
            "to_repeat": list(self._to_repeat),
            "repeats": self._repeats,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Become what `snapshot` returned."""
        self.next_number = snapshot["next_number"]
        self.open = {TicketId(name): Version.parse(text) for name, text in snapshot["open"].items()}
        self.totals = Counter(snapshot["totals"])
        self.total_dropped = snapshot["total_dropped"]
        self._positions = {TicketId(name): at for name, at in snapshot["positions"].items()}
        self._to_repeat = list(snapshot["to_repeat"])
        self._repeats = snapshot["repeats"]
        self._unrecorded = {}
        self.owes_record = False

    def eval_open(self) -> Iterable[TicketId]:
        """Open evaluation tickets."""
        return [ticket for ticket in self.open if ticket.purpose == "eval"]
