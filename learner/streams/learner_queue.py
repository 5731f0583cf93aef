"""The learner's own verbs of the protocol; no other role may write what these write."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import Entry
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import Purpose, TicketId, Version
from penstock.common.wire.messages import EndState, Weights


class LearnerQueue:
    """What only the learner does; every call is refused once a newer incarnation took over."""

    def __init__(self, connection: Connection, keys: Keys, incarnation: int) -> None:
        self.keys = keys
        self.connection = connection
        self._incarnation = incarnation

    def claim(self, nonce: str, holder: str, lease_s: float = 0.0, gone: Iterable[str] = ()) -> None:
        """Load the functions, make the streams and fence off older incarnations.

        Raises RunTaken while another holder's lease lives, unless it is among those that are `gone` for
        certain. `lease_s` 0 asks for no lease: a learner that has claimed before claims again.
        """
        self.connection.load_functions()
        lease_ms = int(1000 * lease_s)
        self.connection.call(
            "claim",
            [self.keys.fence, *self.keys.work_streams],
            [nonce, self._incarnation, holder, lease_ms, *gone],
        )

    def beat(self, lease_s: float, phase: str) -> None:
        """Renew the lease, saying what the learner does; with `lease_s` 0 let it go."""
        self._fenced("beat", [], [int(1000 * lease_s), phase])

    def issue(self, purpose: Purpose, tickets: list[tuple[TicketId, Version, bytes]]) -> list[Version]:
        """Put tickets on their stream unless they are alive; returns the versions of first issue."""
        args = [part for name, version, data in tickets for part in (name, str(version), data)]
        reply = self._fenced(
            "issue", [self.keys.open, self.keys.ledger, self.keys.tickets_for(purpose)], args
        )
        return [Version.parse(text(version)) for version in reply]

    def outcomes(self, purpose: Purpose, after: str, count: int) -> list[Entry]:
        """What came back after a position of the stream, in the stream's order."""
        reply = self._fenced("outcomes", [self.keys.outcomes_for(purpose)], [after, count])
        return [Entry(text(entry), TicketId(text(ticket)), payload) for entry, ticket, payload in reply]

    def close(
        self, purpose: Purpose, ends: Mapping[TicketId, EndState], entries: Iterable[str] = ()
    ) -> int:
        """End tickets, wherever their entries lie, and delete entries; returns how many were open."""
        flat = [part for ticket, state in ends.items() for part in (ticket, state)]
        return self._fenced(
            "close",
            [self.keys.open, self.keys.ledger, self.keys.outcomes_for(purpose)],
            [len(ends), *flat, *entries],
        )

    def publish_contract(self, contract: bytes) -> None:
        """Say what must agree across the run's processes."""
        self._fenced("put", [self.keys.contract], [contract])

    def announce(self, weights: Weights) -> None:
        """Name the version that actors are to take."""
        self._fenced("put", [self.keys.weights], [encode(weights)])

    def set_state(self, state: str) -> None:
        """Say whether the run is "running" or "ended"."""
        self._fenced("put", [self.keys.state], [state])

    def set_totals(self, totals: Mapping[str, int]) -> None:
        """Overwrite the ledger's counters with the learner's own."""
        flat = [part for name, count in totals.items() for part in (name, count)]
        self._fenced("set_totals", [self.keys.ledger], flat)

    def _fenced(self, function: str, keys: list[str], args: list[Any]) -> Any:
        return self.connection.call(function, [self.keys.fence, *keys], [self._incarnation, *args])
