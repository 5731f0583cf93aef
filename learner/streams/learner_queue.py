"""The calls of the queue server that only the learner makes."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import Entry, EntryReader
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import Purpose, TicketId, Version
from penstock.common.wire.messages import EndState, Weights


class LearnerQueue:
    """The learner's calls. Each raises RunTaken once a newer incarnation has claimed the run."""

    def __init__(self, connection: Connection, keys: Keys, incarnation: int) -> None:
        self.keys = keys
        self.connection = connection
        self._incarnation = incarnation
        self._readers: dict[Purpose, EntryReader] = {
            purpose: EntryReader(connection, keys, keys.outcomes_for(purpose), purpose)
            for purpose in ("train", "eval")
        }

    def claim(self, nonce: str, holder: str, lease_s: float = 0.0, gone: Iterable[str] = ()) -> None:
        """Load the server's functions, make the streams and refuse older incarnations from now on.

        Raise RunTaken while the lease of another holder has not expired, unless that holder is in
        `gone`: learners that have surely ended. Raise RunTaken if a newer incarnation has claimed the
        run, ConfigError for a run of another folder, or Connection.call's errors.
        `lease_s` 0 neither checks nor changes the lease: the same learner, after a server's restart.
        """
        self.connection.load_functions()
        args: list[Any] = [nonce, self._incarnation, holder, int(1000 * lease_s), *gone]
        self.connection.call("claim", [self.keys.fence, *self.keys.work_streams], args)

    def beat(self, lease_s: float, phase: str) -> None:
        """Renew the lease (0: end it), store the phase. Raise Connection.call's errors, as RunTaken."""
        self._fenced("beat", [], [int(1000 * lease_s), phase])

    def issue(self, purpose: Purpose, tickets: list[tuple[TicketId, Version, bytes]]) -> list[Version]:
        """Add tickets (id, version, payload) to their stream; return the versions of first issue.

        A ticket that is open on the server is not added again. Raise MalformedMessage for a wrong
        version there, or Connection.call's errors.
        """
        args = [part for name, version, data in tickets for part in (name, str(version), data)]
        keys = [self.keys.open, self.keys.ledger, self.keys.tickets_for(purpose)]
        reply = self._fenced("issue", keys, args)
        return [Version.parse(text(version)) for version in reply]

    def outcomes(self, purpose: Purpose, after: str, count: int) -> list[Entry]:
        """Return the next `count` outcomes at most, and delete malformed ones between them.

        Raise Connection.call's errors, such as RunTaken.
        """
        reply = self._fenced("outcomes", [self.keys.outcomes_for(purpose)], [after, count])
        return self._readers[purpose].read(reply)

    def close(
        self, purpose: Purpose, ends: Mapping[TicketId, EndState], entries: Iterable[str] = ()
    ) -> int:
        """End tickets, delete entries, return how many were open. Raise Connection.call's errors."""
        flat = [part for ticket, state in ends.items() for part in (ticket, state)]
        keys = [self.keys.open, self.keys.ledger, self.keys.outcomes_for(purpose)]
        return int(self._fenced("close", keys, [len(ends), *flat, *entries]))

    def publish_contract(self, contract: bytes) -> None:
        """Store the contract, which actors and rewarders read. Raise Connection.call's errors."""
        self._fenced("put", [self.keys.contract], [contract])

    def announce(self, weights: Weights) -> None:
        """Store the version that actors load next. Raise Connection.call's errors, such as RunTaken."""
        self._fenced("put", [self.keys.weights], [encode(weights)])

    def set_state(self, state: str) -> None:
        """Store the state "running" or "ended". Raise Connection.call's errors, such as RunTaken."""
        self._fenced("put", [self.keys.state], [state])

    def set_totals(self, totals: Mapping[str, int]) -> None:
        """Overwrite the counters of tickets. Raise Connection.call's errors, such as RunTaken."""
        flat = [part for name, count in totals.items() for part in (name, count)]
        self._fenced("set_totals", [self.keys.ledger], flat)

    def _fenced(self, function: str, keys: list[str], args: list[Any]) -> Any:
        """Call a function and return its reply. Raise RunTaken, or Connection.call's other errors."""
        return self.connection.call(function, [self.keys.fence, *keys], [self._incarnation, *args])
