"""The learner's own table of tickets: which are open, how many ended how.

Closed are exactly the issued numbers that are not open, so a low-water mark (`next_number`) and the
open set say everything. Redis' counters are a cache that this table overwrites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from common.messages import END_STATES, EndState, Version


def train_ticket(number: int) -> str:
    """Id of the training ticket with this number."""
    return f"train:{number}"


def eval_ticket(version: Version, index: int) -> str:
    """Id of the ticket that asks held-out question `index` of a version."""
    return f"eval:{version}:{index}"


class Ledger:
    """Open tickets with the version they were first issued at, and counts of the ended ones."""

    def __init__(self) -> None:
        self.next_number = 0
        self.open: dict[str, Version] = {}
        self.totals: Counter[str] = Counter()
        self._unrecorded: dict[str, list[str]] = {}

    @property
    def train_open(self) -> int:
        """Training tickets out: issued minus closed."""
        return sum(1 for ticket in self.open if ticket.startswith("train:"))

    def opened(self, ticket: str, version: Version) -> None:
        """Enter a ticket that was issued; a ticket known as open keeps its first version."""
        if ticket not in self.open:
            self.open[ticket] = version
            self.totals["issued"] += 1

    def next_train_ticket(self) -> str:
        """The next id of the data set's cursor."""
        self.next_number += 1
        return train_ticket(self.next_number - 1)

    def was_issued(self, ticket: str) -> bool:
        """Whether a training ticket's number lies behind the cursor."""
        return ticket in self.open or int(ticket.partition(":")[2]) < self.next_number

    def close(self, ticket: str, state: EndState, reason: str = "") -> None:
        """End an open ticket; its credit returns now."""
        del self.open[ticket]
        self.totals[state] += 1
        self._unrecorded[ticket] = [state, reason]

    def take_unrecorded(self) -> dict[str, list[str]]:
        """What ended since this was last called: ticket to [state, reason], for the journal."""
        ends, self._unrecorded = self._unrecorded, {}
        return ends

    def snapshot(self) -> dict[str, Any]:
        """The table as plain data; what ended is in the journal's records."""
        return {
            "next_number": self.next_number,
            "open": {ticket: str(version) for ticket, version in self.open.items()},
            "totals": {name: self.totals[name] for name in ("issued", *END_STATES)},
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Become what `snapshot` returned."""
        self.next_number = snapshot["next_number"]
        self.open = {name: Version.parse(text) for name, text in snapshot["open"].items()}
        self.totals = Counter(snapshot["totals"])
        self._unrecorded = {}

    def eval_open(self) -> Iterable[str]:
        """Open evaluation tickets."""
        return [ticket for ticket in self.open if ticket.startswith("eval:")]
