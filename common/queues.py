"""The `queues` command: look at a run from anywhere, prove its books, discard it."""

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import started_server
from penstock.common.broker.monitor import (
    Audit,
    RunStatus,
    StreamStatus,
    discard_run,
    read_audit,
    read_dead,
    read_status,
)
from penstock.common.config.command import RunCommand, load
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.log import configure_logs
from penstock.common.role import print_settings
from penstock.common.text import printable

_WATCH_EVERY_S = 1.0
_DEAD_SHOWN = 50


class StatusCommand(RunCommand):
    """What the run does now: streams, consumers, credit, totals. --json prints JSON."""


class AuditCommand(RunCommand):
    """Prove that every ticket issued has ended or is in flight; 1 if not. --json prints JSON."""


class WatchCommand(RunCommand):
    """The status, again every second until Ctrl-C."""


class DeadCommand(RunCommand):
    """The newest tickets that failed too often, and why."""


class DiscardCommand(RunCommand):
    """Delete all keys of the run from the server; needs --yes."""


def status(connection: Connection, run: str, flags: set[str]) -> int:
    """`queues status`."""
    found = read_status(connection, run)
    print(json.dumps(asdict(found)) if "--json" in flags else format_status(found))
    return 0


def audit(connection: Connection, run: str, flags: set[str]) -> int:
    """`queues audit`: 0 if the books balance and every open ticket exists."""
    found = read_audit(connection, run)
    if "--json" in flags:
        print(json.dumps(asdict(found) | {"faults": found.faults}))
    else:
        print(format_audit(found))
    return 1 if found.faults else 0


def watch(connection: Connection, run: str, _flags: set[str]) -> int:
    """`queues watch`."""
    try:
        while True:
            text = format_status(read_status(connection, run))
            print(f"\x1b[H\x1b[J{text}" if sys.stdout.isatty() else text, flush=True)
            time.sleep(_WATCH_EVERY_S)
    except KeyboardInterrupt:
        return 0


def dead(connection: Connection, run: str, _flags: set[str]) -> int:
    """`queues dead`."""
    for ticket, reason in read_dead(connection, run, _DEAD_SHOWN):
        print(f"{ticket:<24}{printable(reason)}")
    return 0


def discard(connection: Connection, run: str, flags: set[str]) -> int:
    """`queues discard`."""
    if "--yes" not in flags:
        raise ConfigError(
            f"this deletes all of run {run} on {connection.address}, work in flight included; "
            "the learner's folder stays: say --yes if that is meant"
        )
    print(f"{discard_run(connection, run)} keys of run {run} deleted on {connection.address}")
    return 0


Action = Callable[[Connection, str, set[str]], int]

COMMANDS: dict[str, tuple[type[RunCommand], Action, frozenset[str]]] = {
    "status": (StatusCommand, status, frozenset({"--json"})),
    "audit": (AuditCommand, audit, frozenset({"--json"})),
    "watch": (WatchCommand, watch, frozenset()),
    "dead": (DeadCommand, dead, frozenset()),
    "discard": (DiscardCommand, discard, frozenset({"--yes"})),
}
"""By name: settings, what to do, and the flags that are no settings (no variable sets them)."""


def main() -> None:
    """Console script."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `queues status | head` ends quietly
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one subcommand; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    try:
        return _dispatch(arguments[0], arguments[1:])
    except PenstockError as error:
        print(printable(f"queues: {type(error).__name__}: {error}"), file=sys.stderr)
        return error.exit_code


def usage() -> str:
    """What `queues --help` prints."""
    lines = [f"  {name:<10}{kind.__doc__}" for name, (kind, _, _) in COMMANDS.items()]
    first = "usage: queues COMMAND [--run.name NAME] [--redis-url URL] ..."
    last = "`queues COMMAND --help` lists the settings; variables such as RUN_NAME set them too."
    return "\n".join([first, "", *lines, "", last])


def _dispatch(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}: expected one of {', '.join(COMMANDS)}")
    kind, action, own_flags = COMMANDS[name]
    flags = {argument for argument in arguments if argument in own_flags}
    settings = load(kind, f"queues {name}", [one for one in arguments if one not in flags])
    configure_logs("queues", settings.run.log_format)
    if settings.dry_run:
        print_settings(settings, {})
        return 0
    limit_s = settings.run.connect_timeout_s
    url = settings.redis_url or started_server(settings.run.folder)
    return action(Connection(url, limit_s, limit_s), settings.run.name, flags)


def format_status(found: RunStatus) -> str:
    """A status as text."""
    credit = "?" if found.credit is None else found.credit
    ledger = "  ".join(f"{name} {count}" for name, count in found.ledger.items())
    head = (
        f"run {found.run} on {found.server}: {found.state}, learner incarnation "
        f"{found.incarnation}, weights {found.version or 'not announced'}"
    )
    table = f"{'stream':<14}{'depth':>7}{'held':>7}{'waiting':>9}{'oldest':>10}"
    return "\n".join(
        [head, f"tickets: {found.open} open, {found.outstanding} of them training; credit {credit}"]
        + [f"ledger: {ledger or 'empty'}; dead letters {found.dead}", "", table]
        + [line for stream in found.streams for line in _format_stream(stream)]
    )


def _format_stream(stream: StreamStatus) -> list[str]:
    oldest = "-" if stream.oldest_s is None else f"{stream.oldest_s:.1f} s"
    return [
        f"{stream.name:<14}{stream.depth:>7}{stream.pending:>7}{stream.undelivered:>9}{oldest:>10}"
    ] + [
        f"    {consumer.name}: holds {consumer.held}, idle {consumer.idle_s:.1f} s"
        for consumer in stream.consumers
    ]


def format_audit(found: Audit) -> str:
    """An audit as text."""
    lines = [f"run {found.run}: {found.issued} tickets issued"]
    lines += [f"  {state:<10}{count:>8}" for state, count in found.ended.items()]
    lines += [f"  in flight {len(found.in_flight):>8}"]
    for ticket in found.in_flight:
        held = f"held by {ticket.holder}" if ticket.holder else "held by nobody"
        lines.append(
            f"    {ticket.ticket} on {ticket.stream} since {ticket.since_s:.1f} s, {held}, "
            f"attempt {ticket.attempt}"
        )
    total = sum(found.ended.values())
    balance = f"balances: {found.issued} = {total} ended + {len(found.in_flight)} in flight"
    return "\n".join([*lines, *(found.faults or [balance])])


if __name__ == "__main__":
    main()
