"""Snapshots of a run on its queue server, as frozen data. common/queues.py prints them."""

from dataclasses import dataclass, field

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.process_status import server_time_ms
from penstock.common.broker.run_view import RunView
from penstock.common.errors import RunNotReady
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import Contract
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import END_STATES


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A process that reads a stream: entries held, and seconds since the process last asked for work."""

    name: str
    held: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A stream: its number of entries (depth), held by consumers (pending) or not taken (undelivered).

    `oldest_s` is the age of the oldest entry, None if the stream is empty. `held_s` is the age of the
    oldest entry that is held, None if none is, and `holder` the consumer that holds it, "" for none.
    """

    name: str
    depth: int
    pending: int
    undelivered: int
    oldest_s: float | None
    consumers: tuple[ConsumerStatus, ...]
    holder: str = ""
    held_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run, as `queues status` prints it.

    `outstanding` counts the open training tickets. It may exceed `credit` for a while: the learner gets
    credit back when it reads a result, and closes the ticket when the result is in the journal.
    """

    run: str
    server: str
    state: str
    incarnation: int
    version: str | None
    credit: int | None
    outstanding: int
    open: int
    dead: int
    ledger: dict[str, int]
    streams: tuple[StreamStatus, ...]


@dataclass(frozen=True, slots=True)
class InFlight:
    """An open ticket: its stream and entry, the holder ("" if none), and the attempt, counted from 1.

    `since_s` counts from the entry's arrival on the stream, `lease_idle_s` from the last renewal.
    `exists` is False if the server lost the entry.
    """

    ticket: TicketId
    stream: str
    entry: str
    holder: str
    since_s: float
    lease_idle_s: float
    attempt: int
    exists: bool


@dataclass(frozen=True, slots=True)
class Audit:
    """The tickets of a run at one instant: issued, ended by end state, and how many are open.

    More than a thousand of the open tickets, `in_flight`, were read one after the other. `malformed`
    has, by cause, how many entries were deleted because no role can read them.
    """

    run: str
    issued: int
    ended: dict[str, int]
    open: int
    in_flight: tuple[InFlight, ...]
    malformed: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the faults found, a sentence each; () if there is none.

        First come the open tickets whose entry is gone from its stream. Last, if issued != ended + in
        flight, comes "5 tickets were issued, but 2 ended and 2 are in flight: 1 missing", or "... 1 too
        many".
        """
        ended = sum(self.ended.values())
        found = [
            f"ticket {ticket.ticket} is open, but its entry {ticket.entry} is gone from "
            f"{ticket.stream}: the learner issues it again when it next checks the server"
            for ticket in self.in_flight
            if not ticket.exists
        ]
        if off := self.issued - ended - self.open:
            verdict = f"{off} missing" if off > 0 else f"{-off} too many"
            counts = f"{self.issued} tickets were issued, but {ended} ended"
            found.append(f"{counts} and {self.open} are in flight: {verdict}")
        return tuple(found)


def read_status(connection: Connection, run: str) -> RunStatus:
    """Return the state of the run named `run`: its tickets, its streams and the readers of each.

    Unknown: state "starting", version and credit None. Raise RunNotReady if no learner has claimed the
    run, MalformedMessage if its contract cannot be read, or another error of Connection.execute.
    """
    keys, view = view_of(connection, run)
    totals, places, opened = view.audit()
    contract, weights, now_ms = view.contract(), view.weights(), server_time_ms(connection)
    return RunStatus(
        run=run, server=connection.address, incarnation=view.incarnation(), open=opened,
        state=text(connection.execute("GET", keys.state) or b"starting"), ledger=totals,
        version=str(weights.version) if weights else None,
        credit=decode(contract, Contract).credit if contract else None,
        outstanding=sum(place.ticket.purpose == "train" for place in places),
        dead=int(connection.execute("XLEN", keys.dead)),
        streams=tuple(
            read_stream(connection, key, now_ms) for key in (*keys.work_streams, *keys.outcome_streams)
        ),
    )  # fmt: skip


def read_audit(connection: Connection, run: str) -> Audit:
    """Return the tickets of the run named `run`: issued, ended by end state, and open.

    `ended` has each end state, also with 0. `malformed` has the counts of entries that were deleted
    because no role can read them. Raise RunNotReady if no learner has claimed the run, WrongType for a
    key of another type, or another error of Connection.call.
    """
    _, view = view_of(connection, run)
    totals, in_flight, opened = read_in_flight(connection, view)
    ended: dict[str, int] = {state: totals.get(state, 0) for state in END_STATES}
    return Audit(run, totals.get("issued", 0), ended, opened, in_flight, view.malformed())


def read_in_flight(
    connection: Connection, view: RunView
) -> tuple[dict[str, int], tuple[InFlight, ...], int]:
    """Return the ledger's totals, the open tickets, and how many these are, as `RunView.audit` does.

    The totals have the number of issued tickets ("issued") and of each end state; those never counted
    are missing. The tickets are sorted by their entry's id, oldest first: 9-0, 10-0, 10-1. All are
    empty for an unknown run. Raise RunNotReady if the learner's functions are not on the server or a
    stream lacks its group, WrongType for a key of another type, or another error of Connection.call.
    """
    totals, places, opened = view.audit()
    now_ms = server_time_ms(connection)
    found = [
        InFlight(
            ticket=place.ticket, stream=_short(place.stream), entry=place.entry, holder=place.consumer,
            since_s=_age_s(place.entry, now_ms), lease_idle_s=place.idle_ms / 1000,
            attempt=place.attempts + 1, exists=place.exists,
        )
        for place in places
    ]  # fmt: skip
    in_order = sorted(found, key=lambda one: tuple(map(int, one.entry.split("-"))))
    return totals, tuple(in_order), opened


def read_consumers(connection: Connection, key: str) -> tuple[ConsumerStatus, ...]:
    """Return the processes that read the stream `key`, also dead ones that did not leave.

    Return () without the stream or a group on it, or if nobody ever read it. Raise ServerUnavailable or
    another error of Connection.execute.
    """
    if not (connection.execute("EXISTS", key) and connection.execute("XINFO", "GROUPS", key)):
        return ()
    return tuple(
        ConsumerStatus(text(found["name"]), int(found["pending"]), int(found["idle"]) / 1000)
        for found in connection.execute("XINFO CONSUMERS", key, GROUP)
    )


def read_dead(connection: Connection, run: str, count: int) -> list[tuple[str, str]]:
    """Return (ticket, reason) of the newest `count` dead tickets of a run, newest first; [] without any.

    A missing part is "?". Raise RunNotReady if no learner has claimed the run, or an error of
    Connection.execute.
    """
    keys, _ = view_of(connection, run)
    entries = connection.execute("XREVRANGE", keys.dead, "+", "-", "COUNT", count)
    return [(text(fields.get(b"t", b"?")), text(fields.get(b"reason", b"?"))) for _, fields in entries]


def discard_run(connection: Connection, run: str) -> int:
    """Delete all keys of the run named `run`, even one in use, and return how many existed: 0 to 18.

    Raise ServerUnavailable or another error of Connection.execute.
    """
    return int(connection.execute("DEL", *Keys(run).all))


def view_of(connection: Connection, run: str) -> tuple[Keys, RunView]:
    """Return the names of a run's keys, and a view that reads the run from the server.

    Raise RunNotReady if no learner has claimed the run, or an error of Connection.execute.
    """
    keys = Keys(run)
    view = RunView(connection, keys)
    if view.incarnation() == 0:
        raise RunNotReady(
            f"no run named {run} is on {connection.address}: wait some seconds if it has just been "
            f"started, start `penstock up` with RUN_NAME={run}, or name the run with --run.name and its "
            "server with REDIS_URL"
        )
    return keys, view


def read_stream(connection: Connection, key: str, now_ms: int) -> StreamStatus:
    """Return the stream's numbers of entries, its oldest entries' ages and its readers.

    The entries that no reader holds count as not taken. `now_ms` is the server's time in ms since 1970.
    Raise ServerUnavailable or another error of Connection.execute.
    """
    depth = int(connection.execute("XLEN", key))
    first = connection.execute("XRANGE", key, "-", "+", "COUNT", 1)
    consumers = read_consumers(connection, key)
    pending = sum(consumer.held for consumer in consumers)
    oldest_s = _age_s(text(first[0][0]), now_ms) if first else None
    held = _oldest_held(connection, key, now_ms) if pending else ()
    return StreamStatus(_short(key), depth, pending, max(0, depth - pending), oldest_s, consumers, *held)


def _oldest_held(connection: Connection, key: str, now_ms: int) -> tuple[str, float | None]:
    """Return who holds the oldest held entry of a stream that has readers, and the entry's age.

    Return "" and None if no entry is held. Raise Connection.execute's errors.
    """
    found = connection.execute("XPENDING", key, GROUP, "-", "+", 1)
    return next(
        ((text(one["consumer"]), _age_s(text(one["message_id"]), now_ms)) for one in found), ("", None)
    )


def _age_s(entry: str, now_ms: int) -> float:
    """Return the age in seconds of the entry with this id, such as 1700000000000-0; 0 if in the future.

    The id begins with the entry's time. It and `now_ms` are ms since 1970 by the server's clock.
    """
    return max(0, now_ms - int(entry.partition("-")[0])) / 1000


def _short(key: str) -> str:
    """Return a key without the run's prefix: "tickets" for "penstock:{demo}:tickets"."""
    return key.rpartition(":")[2]
