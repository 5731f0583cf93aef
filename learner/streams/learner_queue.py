"""The calls of the queue server that only the learner makes."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.broker.lease_watch import Lease, LeaseWatch
from penstock.common.broker.work_stream import Entry, EntryReader
from penstock.common.errors import MalformedMessage, RunNotReady, RunTaken, ServerUnavailable, WrongType
from penstock.common.log import get_logger, shorten
from penstock.common.text import short
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import Purpose, TicketId, Version, is_number
from penstock.common.wire.messages import EndState, Weights
from penstock.learner.state.deltas import Offer

_SLICE = 1000  # tickets in one call, which blocks the server for some milliseconds
_LOOK_S = 0.1  # between two looks at another learner's lease
_DAY_S = 86_400.0
_FORGOTTEN_S = _DAY_S  # a consumer that held and asked for nothing for that long is removed

log = get_logger(__name__)


@dataclass(slots=True)
class OpenPlaces:
    """The open tickets on the server: version of first issue, and whether the entry exists.

    `strange` are names in the hash `open` that are no tickets, `totals` the ledger's counts.
    """

    tickets: dict[TicketId, tuple[str, bool]] = field(default_factory=dict)
    strange: list[bytes] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)

    def add(self, name: bytes, version: str, exists: bool) -> None:
        """Add a field of the hash `open`: to `tickets`, or to `strange` if its name is no ticket.

        `version` is the version of the ticket's first issue. `exists`: its stream has an entry for it.
        """
        try:
            self.tickets[TicketId(text(name))] = version, exists
        except MalformedMessage:
            self.strange.append(name)


class LearnerQueue:
    """The learner's calls. Each raises RunTaken once a newer incarnation has claimed the run.

    `keys` are the names of the run's keys on the queue server of `connection`, and `incarnation` is this
    learner's number. Creating a LearnerQueue calls nothing: `claim` comes first.
    """

    def __init__(self, connection: Connection, keys: Keys, incarnation: int) -> None:
        self.keys = keys
        self.connection = connection
        self.incarnation = incarnation
        self.source: Offer | None = None  # where others fetch what is announced
        self.damaged = False  # True: a key was deleted since, so the caller restores what was in it
        self.journal_length = 0  # bytes that the journal of this incarnation has on the disk
        self._folder = self._claimant = ""
        self._claimed = ("", "")  # nonce and holder
        self._claimed_at = -1  # the connection's count of restarts then
        self._superseded = False
        self._published: dict[str, bytes] = {}  # contract, weights and state by key
        self._publishing = threading.Lock()
        self._logged: set[str] = set()
        self._readers: dict[Purpose, EntryReader] = {
            purpose: EntryReader(connection, keys, keys.outcomes_for(purpose), purpose)
            for purpose in ("train", "eval")
        }

    def claim(self, nonce: str, holder: str, lease_s: float = 0.0, gone: Iterable[str] = ()) -> None:
        """Load the server's functions, make the streams and refuse older incarnations from now on.

        Store this learner's claim: its incarnation, `nonce`, the random text of the run's folder, and
        `holder`, the name of this process. Delete keys of the run that cannot be used, as of another
        type. `lease_s` above 0 begins a lease, which `beat` renews. If another holder left one, wait
        first until it is seen to run out, unless that holder is in `gone`: learners that have surely
        ended. RunTaken is raised once it is renewed. `lease_s` 0 neither checks nor changes the lease:
        this learner claims again, after a server's restart or when another client changed its claim.

        Raise RunTaken if a newer incarnation has claimed the run, ConfigError if the server holds a run
        of another folder, or another error of Connection.call. With `lease_s` 0 the folder is checked
        only if the server has restarted since this object's last claim.
        """
        self.connection.load_functions()
        gone = list(gone)
        unchanged = self._outwait({holder, *gone}) if lease_s else "-"
        restarts = self.connection.restarts
        lease_ms = -1 if not lease_s and restarts == self._claimed_at else int(1000 * lease_s)
        args: list[str | int] = [nonce, self.incarnation, holder, lease_ms, unchanged, *gone]
        self.connection.call("claim", self._all_keys, args)
        self._claimed, self._claimed_at = (nonce, holder), restarts

    def _outwait(self, harmless: set[str]) -> str:
        """Wait until the lease of another learner has run out, and return its last heartbeat's number.

        Return "-" at once if there is no lease, if its holder is `harmless`, or once it is renewed, for
        the server to refuse the claim. The wait is logged. No clock but this process's counts. Raise
        ServerUnavailable or another error of Connection.call.
        """
        fence = self.keys.fence
        if self.connection.execute("TYPE", fence) != b"hash":
            return "-"
        known, watch = self.connection.interruptions, LeaseWatch(0.0)
        first: Lease | None = None
        while True:
            self.connection.execute("HDEL", fence, "")  # refused while no heartbeat can be written
            found = self.connection.execute("HMGET", fence, "holder", "beats", "lease")
            holder, beats, lease = (text(value or b"") for value in found)
            lease_s = int(lease) / 1000 if is_number(lease) else 0.0
            now = Lease("learner", holder, int(beats) if is_number(beats) else -1)
            anew = first is None or self.connection.interruptions != known  # a server may lose beats
            if holder in harmless or not 0 < lease_s <= _DAY_S or not (anew or now == first):
                return "-"
            if first is None:
                log.info(f"Waiting up to {lease_s:g} s for a sign of the learner {short(holder)}.")
                watch = LeaseWatch(lease_s)
            if anew:
                known, first = self.connection.interruptions, now
                watch.skip()
            if watch.look([now]):
                return beats
            if self.connection.stopping.wait(_LOOK_S):
                raise ServerUnavailable(f"told to stop while it waited for the learner {short(holder)}")

    @property
    def _all_keys(self) -> list[str]:
        """The names of all keys of the run, first the fence, the hash with the learner's claim."""
        return [self.keys.fence, *(key for key in self.keys.all if key != self.keys.fence)]

    def restore(self) -> None:
        """Rewrite contract, weights, state, groups and claim where another client changed them.

        The groups are those of the streams' consumers; keys that cannot be used, as of a wrong type, are
        deleted. Remove consumers that held and asked for nothing for a day, as those of killed actors.
        Do nothing before the claim and while another thread publishes. Each corrected key is logged
        once. If a stream or hash was corrected, set `damaged`, for the caller to join again: a
        stream's ids may begin again below the reader's position. Raise RunTaken, ServerUnavailable or
        another error of Connection.call.
        """
        if self._claimed == ("", "") or not self._publishing.acquire(blocking=False):
            return
        try:
            keys = self._all_keys
            flat = [
                part for key, value in self._published.items() for part in (keys.index(key) + 1, value)
            ]
            args = [self.incarnation, *self._claimed, int(1000 * _FORGOTTEN_S), *flat]
            corrected = list(map(text, self.connection.call("restore", keys, args)))
            if set(corrected) - self._published.keys() - {self.keys.fence}:
                self.damaged = True
            self.own()
        finally:
            self._publishing.release()
        for key in corrected:
            self.report(f"Another client changed {key}: restored. See who may write to the server.")

    def report(self, fault: str) -> None:
        """Log `fault`, a sentence, as an error, unless this object has reported the same text before."""
        if fault not in self._logged:
            self._logged.add(fault)
            log.error(shorten(fault))

    def places(self) -> OpenPlaces:
        """Return the open tickets on the server, and its totals.

        They are read a thousand or so at a time: another client may have written a million tickets
        there. Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        found, cursor = OpenPlaces(), "0"
        while True:
            keys = [self.keys.open, self.keys.ledger]
            cursor, rows, totals = self._fenced("places", keys, [text(cursor), _SLICE])
            for name, version, exists in rows:
                found.add(name, text(version), bool(exists))
            if text(cursor) == "0":
                counts = zip(totals[::2], totals[1::2], strict=True)
                found.totals = {text(name): int(count) for name, count in counts}
                return found

    def beat(self, lease_s: float, phase: str) -> None:
        """Renew the lease for `lease_s` from now (0: end it), and store the `phase` for `queues status`.

        The phase is the name of what the main loop does. Raise RunTaken, ServerUnavailable or another
        error of Connection.call.
        """
        self._fenced("beat", [], [int(1000 * lease_s), phase])

    def issue(self, purpose: Purpose, tickets: list[tuple[TicketId, Version, bytes]]) -> list[Version]:
        """Add tickets (id, version, payload) to their stream, and return the versions of first issue.

        These are in the order of the tickets. A ticket that is open on the server keeps its earlier
        version; any other is counted as issued. A ticket that has an entry, in this or the next stream,
        is not added again. Its entry is replaced if it is in this stream with another payload, or if no
        worker will get it. They are sent a thousand at a time.

        Raise MalformedMessage for a wrong version on the server, RunTaken, ServerUnavailable or another
        error of Connection.call.
        """
        keys = [self.keys.open, self.keys.ledger, self.keys.tickets_for(purpose)]
        firsts: list[Version] = []
        for start in range(0, len(tickets), _SLICE):
            some = tickets[start : start + _SLICE]
            args = [part for name, version, data in some for part in (name, str(version), data)]
            firsts += (Version.parse(text(version)) for version in self._fenced("issue", keys, args))
        return firsts

    def outcomes(self, purpose: Purpose, after: str, count: int) -> list[Entry]:
        """Return the next `count` outcomes at most of tickets of `purpose`; [] if there is none.

        They follow the entry with the id `after`. Malformed ones between them are deleted and left out.
        Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        reply = self._fenced("outcomes", [self.keys.outcomes_for(purpose)], [after, count])
        return self._readers[purpose].read(reply)

    def close(
        self,
        purpose: Purpose,
        ends: Mapping[TicketId, EndState] | Mapping[bytes, EndState],
        entries: Iterable[str] = (),
    ) -> int:
        """End tickets of `purpose` on the server, each in its state in `ends`, and delete outcomes.

        `entries` are the ids of the outcomes. Return how many of the tickets were open until now; these
        are counted by state, the others are left alone. At most a thousand of each are sent at a time.
        Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        keys = [self.keys.open, self.keys.ledger, self.keys.outcomes_for(purpose)]
        pairs, spent, closed = list(ends.items()), list(entries), 0
        for start in range(0, max(len(pairs), len(spent)), _SLICE):
            some = pairs[start : start + _SLICE]
            flat = [part for pair in some for part in pair]
            args = [self.journal_length, len(some), *flat, *spent[start : start + _SLICE]]
            closed += int(self._fenced("close", keys, args))
        return closed

    def own(self, folder: str = "", claimant: str = "") -> None:
        """Say that this incarnation is claimed in `folder`, HOST:PATH; "" repeats it for a new server.

        `claimant` is the holder that the claim's file names. Each `close` then says how much of its
        journal counts. Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        self._folder, self._claimant = folder or self._folder, claimant or self._claimant
        if self._folder:
            self._fenced("own", [], [self._folder, self.journal_length, self._claimant])

    def publish_contract(self, contract: bytes) -> None:
        """Store the encoded contract for actors and rewarders.

        Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        self._publish(self.keys.contract, contract)

    def announce(self, weights: Weights) -> Weights:
        """Store the version that actors load next, and return it as it is announced.

        Raise Connection.call's errors, such as RunTaken.

        The announcement gets the address and the token of the learner's file server, if it has one. With
        an object store the version is put there first; raise StoreFailed if that fails.
        """
        if self.source:
            weights = self.source.offer(weights)
        self._publish(self.keys.weights, encode(weights))
        return weights

    def being_fetched(self) -> frozenset[str]:
        """Return the names of the folders of versions that other hosts are fetching."""
        return self.source.being_fetched() if self.source else frozenset()

    def set_state(self, state: str) -> None:
        """Store the state "running" or "ended". Raise Connection.call's errors, such as RunTaken."""
        self._publish(self.keys.state, state.encode())

    def _publish(self, key: str, value: bytes) -> None:
        """Store `value` under `key` on the server, and remember it for `restore`.

        Wait while `restore` runs in another thread. Raise RunTaken, ServerUnavailable or another error
        of Connection.call.
        """
        with self._publishing:
            self._published[key] = value
            self._fenced("put", [key], [value])

    def set_totals(self, totals: Mapping[str, int]) -> None:
        """Replace the server's counts of tickets, "issued" and one per end state, by `totals`.

        Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        flat = [part for name, count in totals.items() for part in (name, count)]
        self._fenced("set_totals", [self.keys.ledger], flat)

    def _fenced(self, function: str, keys: list[str], args: list[Any]) -> Any:
        """Call a server function as this incarnation, and return its reply.

        The fence comes before `keys`, and the incarnation before `args`. If a key is of another type, or
        this process of the server lost the claim, another client wrote: log that, set `damaged`, claim
        once more, which deletes such keys, and call again. After a RunTaken nothing is claimed. Raise
        RunTaken if a newer incarnation has claimed the run, ConfigError if a run of another folder has,
        ServerUnavailable or another error of Connection.call.
        """
        call = partial(
            self.connection.call, function, [self.keys.fence, *keys], [self.incarnation, *args]
        )
        try:
            return call()
        except RunTaken:
            self._superseded = True
            raise
        except RunNotReady as error:  # a WrongType is one
            self.connection.execute("PING")  # a new socket's first answer tells of a server's restart
            restarted = self.connection.restarts != self._claimed_at
            if self._superseded or (restarted and not isinstance(error, WrongType)):
                raise
            self.report(str(error))
            self.damaged = True
            self.claim(*self._claimed)
            return call()
