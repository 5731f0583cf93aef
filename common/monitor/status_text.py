"""A run's status and audit as text, for `queues` and the demo."""

import re
from collections.abc import Iterable

from penstock.common.monitor.overview import Overview
from penstock.common.monitor.screen import COLUMNS, process_row
from penstock.common.monitor.snapshot import Audit, RunStatus, StreamStatus
from penstock.common.monitor.watch import progress_line
from penstock.common.text import one_line

_COUNTED = (
    "depth: entries of the stream; held: those that a process works on; waiting: the others; "
    "oldest: the oldest entry's age."
)
"""What the table of streams counts."""

_REPORTED_BY = re.compile(r" \(reported by [^()]*\)$")


def format_overview(now: Overview, sentence: str) -> str:
    """Return a run as lines of text: step, reward and time left, what limits it, a line per process."""
    progress = now.progress
    rows: list[tuple[str, ...]] = [COLUMNS]
    rows += [process_row(now, name) for name in sorted(now.workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head = f"run {now.run} on {now.server}: {now.state}"
    lines = [f"{head}, {progress_line(now, '')}" if progress else head, sentence]
    if progress and progress.step:
        lines.insert(1, (
            f"{progress.step_s:.2f} s per step, {progress.tokens_per_s:,.0f} tokens/s trained, "
            f"staleness {progress.staleness:.2f}, trained {progress.trained} of {progress.asked} groups"
        ))  # fmt: skip
    return _join(
        [*filter(None, lines), ""]
        + ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        + [f"learner: {now.learner.phase or 'starting'}, heartbeat {now.heartbeat_s:.1f} s ago"]
    )


def format_status(found: RunStatus) -> str:
    """Return a run's status as lines of text: run, tickets and ledger, then a line per stream.

    Below each stream there is a line per process that reads it, and last what the columns count.
    Unknown values are "?" or "not announced".
    """
    credit = "?" if found.credit is None else found.credit
    ledger = "  ".join(f"{name} {count}" for name, count in found.ledger.items())
    run = f"run {found.run} on {found.server}: {found.state}, learner incarnation {found.incarnation}"
    head = f"{run}, weights {found.version or 'not announced'}"
    table = f"{'stream':<14}{'depth':>7}{'held':>7}{'waiting':>9}{'oldest':>10}"
    return _join(
        [head, f"tickets: {found.open} open, {found.outstanding} of them training; credit {credit}"]
        + [f"ledger: {ledger or 'empty'}; dead letters {found.dead}", "", table]
        + [line for stream in found.streams for line in _format_stream(stream)]
        + ["", _COUNTED]
    )


def _format_stream(stream: StreamStatus) -> list[str]:
    """Return the line of a stream with its counts and oldest entry's age, then a line per reader.

    The age is in seconds, "-" for an empty stream. A reader's line has the number of entries that the
    reader holds and the seconds since it last asked for work. The last line is on the oldest held entry.
    """
    oldest = "-" if stream.oldest_s is None else f"{stream.oldest_s:.1f} s"
    counts = f"{stream.depth:>7}{stream.pending:>7}{stream.undelivered:>9}{oldest:>10}"
    rows = [f"    {one.name}: holds {one.held}, idle {one.idle_s:.1f} s" for one in stream.consumers]
    if stream.held_s is not None:
        rows.append(f"    the oldest held entry: {stream.held_s:.1f} s old, held by {stream.holder}")
    return [f"{stream.name:<14}{counts}", *rows]


def format_audit(found: Audit, tickets: bool = True) -> str:
    """Return an audit as lines of text: counts, open tickets, deleted entries, and the result.

    Without `tickets` only the oldest open ticket of each holder has a line. The last lines are the
    faults, or, if there is none, "balances: 5 = 3 ended + 2 in flight".
    """
    lines = [f"run {found.run}: {found.issued} tickets issued"]
    lines += [f"  {state:<10}{count:>8}" for state, count in found.ended.items()]
    lines += [f"  in flight {found.open:>8}"]
    oldest = {ticket.holder: ticket for ticket in reversed(found.in_flight)}
    for ticket in found.in_flight:
        if not tickets and ticket is not oldest[ticket.holder]:
            continue
        held = f"held by {ticket.holder}" if ticket.holder else "held by nobody"
        place = f"{ticket.ticket} on {ticket.stream} since {ticket.since_s:.1f} s"
        lines.append(f"    {place}, {held}, attempt {ticket.attempt}")
    for cause, count in found.malformed.items():
        lines.append(f"  {count} entries that another client wrote were deleted: {cause}")
    balance = f"balances: {found.issued} = {sum(found.ended.values())} ended + {found.open} in flight"
    return _join([*lines, *(found.faults or [balance])])


def _join(lines: Iterable[str]) -> str:
    """Return the lines joined by line ends. Inside a line, unprintable characters are escaped."""
    return "\n".join(map(one_line, lines))


def format_dead(dead: list[tuple[str, str]]) -> str:
    """Return (ticket, reason) pairs as text: a line per reason, with how many and the first three.

    Reasons are equal whichever rewarder reported them. The order is that of their first tickets. "none"
    for no pairs.
    """
    groups: dict[str, list[str]] = {}
    for ticket, reason in dead:
        groups.setdefault(_REPORTED_BY.sub("", reason), []).append(ticket)
    return (
        _join(
            f"{len(tickets):>5}  {', '.join(tickets[:3])}{', ...' if len(tickets) > 3 else ''}: {reason}"
            for reason, tickets in groups.items()
        )
        or "none"
    )


def dead_rows(dead: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Return (ticket, reason) pairs as objects for --json."""
    return [{"ticket": ticket, "reason": reason} for ticket, reason in dead]
