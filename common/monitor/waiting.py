"""Who should deliver what a run waits for: the holders of open tickets, and roles without a process."""

from collections import defaultdict
from dataclasses import asdict

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import RunView
from penstock.common.log import get_logger
from penstock.common.monitor.overview import server_fault
from penstock.common.monitor.snapshot import InFlight, read_consumers, read_in_flight
from penstock.common.text import short

_FILLED_BY = {"tickets": "an actor", "eval_tickets": "an actor", "rollouts": "a rewarder"}
"""The role whose processes take the entries of each work stream."""

_HOLDS = {"tickets": "ticket", "eval_tickets": "evaluation ticket", "rollouts": "group"}
"""The name of an entry of each stream; other streams hold results for the learner."""

log = get_logger(__name__)


def describe_waiting(connection: Connection, keys: Keys, lease_s: float) -> str:
    """Return, in one sentence, who holds the open tickets since when and which role has no process.

    A server that takes no writes is named first: what is done cannot be handed on. The part on roles
    concerns only those on whose streams there are open tickets. A process counts as running if it asked
    for work or renewed a lease within `lease_s` seconds. The text has at most 1000 characters; it is "no
    ticket is open" without any. Each ticket is logged at debug level. Raise RunNotReady if the learner's
    functions are not on the server, WrongType for a key of another type, or another error of
    Connection.call. Example: "no rewarder is running, rewarder-host-71-0c31fa was last seen 29 s ago;
    rewarder-host-71-0c31fa holds 2 groups since 31 s".
    """
    found: dict[tuple[str, str], list[InFlight]] = defaultdict(list)
    _, open_tickets, _ = read_in_flight(connection, RunView(connection, keys))
    for ticket in open_tickets:
        log.debug("an open ticket", **asdict(ticket))
        found[ticket.stream, ticket.holder].append(ticket)
    roles = sorted({_FILLED_BY[stream] for stream, _ in found if stream in _FILLED_BY})
    fault = server_fault(connection.execute("INFO"))
    parts = [fault.rstrip(".")] if fault else []
    parts += [part for role in roles if (part := _describe_absence(connection, keys, role, lease_s))]
    parts += [_describe_tickets(stream, who, tickets) for (stream, who), tickets in found.items()]
    return short("; ".join(parts), 1000) or "no ticket is open"  # another client may have named them


def _describe_tickets(stream: str, holder: str, tickets: list[InFlight]) -> str:
    """Return a clause on `tickets`, all on one stream and of one holder ("" if nobody holds them).

    `stream` is its short name, such as "rollouts". At least one ticket is needed; the time is that of
    the oldest. Examples: "1 group waits for a rewarder since 5 s", "actor-a-71 holds 2 tickets since
    31 s".
    """
    noun = _HOLDS.get(stream, "result")
    count, verb = (f"1 {noun}", "waits") if len(tickets) == 1 else (f"{len(tickets)} {noun}s", "wait")
    since_s = max(ticket.since_s for ticket in tickets)
    if holder:
        return f"{short(holder)} holds {count} since {since_s:.0f} s"
    return f"{count} {verb} for {_FILLED_BY.get(stream, 'the learner')} since {since_s:.0f} s"


def _describe_absence(connection: Connection, keys: Keys, role: str, lease_s: float) -> str:
    """Return a clause if no `role` ("an actor" or "a rewarder") was seen in `lease_s` seconds, else "".

    Example: "no actor is running, actor-a-71 was last seen 29 s ago". Raise ServerUnavailable or another
    error of Connection.execute.
    """
    streams = [getattr(keys, stream) for stream, filled_by in _FILLED_BY.items() if filled_by == role]
    consumers = [found for key in streams for found in read_consumers(connection, key)]
    last = min(consumers, key=lambda consumer: consumer.idle_s, default=None)
    if last is not None and last.idle_s < lease_s:
        return ""
    seen = f", {short(last.name)} was last seen {last.idle_s:.0f} s ago" if last else ""
    name, starting = role.split()[1], " (vLLM takes a minute)" if role == "an actor" else ""
    return f"no {name} is running{seen}" if seen else f"no {name} has joined yet{starting}, or all left"
