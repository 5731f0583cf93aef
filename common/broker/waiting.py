"""Who should deliver what a run waits for: every open ticket's holder, and the roles nobody fills."""

from collections import defaultdict

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.monitor import InFlight, read_consumers, read_in_flight
from penstock.common.broker.run_view import RunView

_SHOWN = 3
_FILLED_BY = {"tickets": "actor", "eval_tickets": "actor", "rollouts": "rewarder"}


def describe_waiting(connection: Connection, keys: Keys, lease_s: float) -> str:
    """Where the open tickets lie, who holds them since when, and which role has no process.

    A process counts as there while it asked for work or renewed a lease within `lease_s`. Raises
    RunNotReady.

    Example: "2 in rollouts held by rewarder-host-71-0c31fa (train:4 for 31 s at attempt 1, last sign
    of its holder 29 s ago; train:6 for ...); no rewarder is there, rewarder-host-71-0c31fa was last seen
    29 s ago"
    """
    found: dict[tuple[str, str], list[InFlight]] = defaultdict(list)
    for ticket in read_in_flight(connection, RunView(connection, keys)):
        found[ticket.stream, ticket.holder].append(ticket)
    parts = [_describe_group(stream, who, tickets) for (stream, who), tickets in found.items()]
    roles = {_FILLED_BY[stream] for stream, _ in found if stream in _FILLED_BY}
    parts += filter(None, (_describe_absence(connection, keys, role, lease_s) for role in sorted(roles)))
    return "; ".join(parts) or "no ticket is out"


def _describe_group(stream: str, holder: str, tickets: list[InFlight]) -> str:
    shown = [_describe_ticket(ticket) for ticket in tickets[:_SHOWN]]
    if len(tickets) > _SHOWN:
        shown.append(f"and {len(tickets) - _SHOWN} more")
    where = f"held by {holder or 'nobody'}" if stream in _FILLED_BY else "for the learner"
    return f"{len(tickets)} in {stream} {where} ({'; '.join(shown)})"


def _describe_ticket(ticket: InFlight) -> str:
    text = f"{ticket.ticket} for {ticket.since_s:.0f} s at attempt {ticket.attempt}"
    return f"{text}, last sign of its holder {ticket.lease_idle_s:.0f} s ago" if ticket.holder else text


def _describe_absence(connection: Connection, keys: Keys, role: str, lease_s: float) -> str:
    streams = [key for key in keys.work_streams if _FILLED_BY[key.rpartition(":")[2]] == role]
    consumers = [found for key in streams for found in read_consumers(connection, key)]
    last = min(consumers, key=lambda consumer: consumer.idle_s, default=None)
    if last is None:
        return f"no {role} is there"
    if last.idle_s < lease_s:
        return ""
    return f"no {role} is there, {last.name} was last seen {last.idle_s:.0f} s ago"
