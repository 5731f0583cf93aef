"""Finds leases that have run out: nobody renewed them for as long as a lease, by this process's clock.

The server's clock does not count, because it may be set: a step back would make all leases live until
the clock catches up, a step forward would end all of them at once.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

LOOKS_PER_LEASE = 12
"""How often a worker looks for leases that have run out: it finds one after 14 looks at most."""


class Lease(NamedTuple):
    """A held entry of a stream: its holder, and the count that each renewal changes."""

    entry: str
    holder: str
    deliveries: int


class LeaseWatch:
    """Finds the leases that have run out, from one look at all of them to the next.

    A lease has run out once it was seen unchanged for more than `lease_s`. A gap between two looks
    counts as half a lease at most: this process, and maybe its whole host, was stopped, and holders get
    the time to renew theirs.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._unchanged_s: dict[Lease, float] = {}
        self._looked_at = time.monotonic()

    def look(self, leases: Iterable[Lease]) -> list[Lease]:
        """Return the leases that have run out, of the present `leases`, in their order."""
        now = time.monotonic()
        gap_s = min(now - self._looked_at, self._lease_s / 2)
        self._looked_at = now
        before = self._unchanged_s
        self._unchanged_s = {one: before[one] + gap_s if one in before else 0.0 for one in leases}
        return [one for one, unchanged_s in self._unchanged_s.items() if unchanged_s > self._lease_s]

    def skip(self) -> None:
        """Leave out the time since the last look: holders could not reach the server then."""
        self._looked_at = time.monotonic()
