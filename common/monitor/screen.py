"""The live screen of a run, for `penstock up`, the demo and `queues watch` in a terminal. Pure.

Names and texts from the queue server may be hostile: they go through `one_line`, and none is markup.
"""

import math
import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.common.broker.process_status import LearnerProgress
from penstock.common.monitor.overview import Overview
from penstock.common.text import counted, one_line, short

_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
COLUMNS = ("process", "now", "weights", "busy", "speed", "seen")
"""The headings above the cells of `process_row`."""

_NARROWEST = 50
"""Columns below which only the sentence and one line on the run are shown."""

_FIXED_LINES = 14
"""Lines of the screen without the rows of processes and of the log; three of them for long sentences."""


def sparkline(values: Sequence[float], width: int, levels: str = _LEVELS) -> str:
    """Return the newest `width` values as one letter each of `levels`, the first one for the least.

    NaN and infinity are blanks; equal values are all the middle. Example: (0, 0.5, 1) gives "▁▅█".
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def letter(value: float) -> str:
        """Return the letter of one value."""
        if not math.isfinite(value):
            return " "
        share = (value - low) / (high - low) if 0 < high - low < math.inf else 0.4
        return levels[min(int(share * len(levels)), len(levels) - 1)]

    return "".join(map(letter, shown))


def render(
    now: Overview | None,
    sentence: str,
    log: Sequence[str],
    width: int,
    height: int,
    encoding: str = "utf-8",
) -> RenderableType:
    """Return the screen of `width` columns and `height` lines for rich, on a terminal of this encoding.

    `now` is None before the queue server answers. `sentence` says what limits the run or what is waited
    for, `log` has the newest lines of the processes, the newest last.
    """
    parts: list[RenderableType] = [Text(one_line(sentence), "bold yellow")]
    if now is None:
        return Group(*parts, *_log_lines(log, width, height - 2))
    if width < _NARROWEST or height < _FIXED_LINES:
        return Group(*parts, Text(one_line(progress_text(now))))
    table, rows = _processes(now, height - _FIXED_LINES)
    parts = [
        _head(now, width),
        *_curves(now.progress, width, _LEVELS if encoding.startswith("utf") else _ASCII_LEVELS),
        Text(""),
        Text(one_line(sentence), "bold yellow"),
        Text(""),
        _flow(now),
        _counts(now),
        Text(""),
        table,
    ]
    return Group(*parts, *_log_lines(log, width, height - _FIXED_LINES - rows - 1))


def _head(now: Overview, width: int) -> Table:
    """Return the line with the run's name, its step, a bar, seconds per step and the time left."""
    step, steps, left = 0, 0, one_line(now.state)
    if progress := now.progress:
        step, steps = progress.step, progress.steps
        if progress.step_s > 0 and now.state != "ended":
            left = f"{progress.step_s:.2f} s a step, {duration((steps - step) * progress.step_s)} left"
    line = Table.grid(padding=(0, 1))
    made = "evaluation alone" if now.progress and not steps else f"step {step} of {steps}"
    line.add_row(
        Text(one_line(now.run)[: width // 4], "bold cyan"), Text(made),
        ProgressBar(
            total=max(1, steps), completed=step, width=max(5, width // 5), complete_style="cyan"
        ),
        Text(left),
    )  # fmt: skip
    return line


def _curves(progress: LearnerProgress | None, width: int, levels: str) -> list[Text]:
    """Return the lines of reward and held-out: the newest value and a sparkline of `levels`."""
    if progress is None:
        return [Text("reward    no step yet"), Text("held-out  no evaluation yet")]
    room = max(10, width - 40)
    lines = []
    for name, values, when in (
        ("reward", progress.rewards, f"last {counted(len(progress.rewards), 'step')}"),
        ("held-out", progress.heldout, f"last at step {max(progress.evaluated, default=0)}"),
    ):
        last = f"{values[-1]:.3f}" if values else "-"
        lines.append(
            Text(f"{name:<9}{last:>7}  {sparkline(values, room, levels)}  {when if values else ''}")
        )
    return lines


def _flow(now: Overview) -> Text:
    """Return the diagram: how many entries lie in each stream, and who takes them."""
    streams, text = now.streams, Text()
    waiting = streams["tickets"].undelivered + streams["eval_tickets"].undelivered
    held = streams["tickets"].pending + streams["eval_tickets"].pending
    actors, rewarders = len(now.running("actor")), len(now.running("rewarder"))
    results = streams["scored"].depth + streams["evaluated"].depth
    for part, style in (
        (counted(waiting, "ticket"), "bold"), (f"{counted(actors, 'actor')} ({held})", "green"),
        (counted(streams["rollouts"].undelivered, "group"), "bold"),
        (f"{counted(rewarders, 'rewarder')} ({streams['rollouts'].pending})", "blue"),
        (counted(results, "result"), "bold"),
        (f"learner: {one_line(now.learner.phase)}", "cyan"),
    ):  # fmt: skip
        text.append(" > " if text else "", "dim").append(part, style)
    return text


def _counts(now: Overview) -> Text:
    """Return the line with weights, staleness, trained tokens per second, oldest and ended tickets."""
    ended = {name: count for name, count in now.totals.items() if count and name != "issued"}
    ends = ", ".join(f"{count} {one_line(name)}" for name, count in ended.items())
    parts = [f"weights {now.version or 'none yet'}"]
    if progress := now.progress:
        parts += [
            f"staleness {progress.staleness:.2f}",
            f"{progress.tokens_per_s:,.0f} tokens/s trained",
        ]
        if progress.trained < progress.asked and progress.step:
            parts.append(f"last step trained {progress.trained} of {progress.asked} groups")
    held = [(one.held_s, one.holder) for one in now.streams.values() if one.held_s is not None]
    parts += [f"oldest ticket {duration(age)} (held by {_name(who)})" for age, who in sorted(held)[-1:]]
    return Text("; ".join([*parts, f"tickets: {ends}" if ends else "no ticket has ended"]), "dim")


def _processes(now: Overview, most: int) -> tuple[Table, int]:
    """Return a table of at most `most` lines of the run's processes, gone ones last, and its lines."""
    table = Table.grid(padding=(0, 2))
    if not now.workers:
        return table, 0
    table.add_row(*(Text(name, "dim") for name in COLUMNS))
    workers = sorted(now.workers.items(), key=lambda item: (now.is_gone(item[1]), item[0]))
    shown = workers if len(workers) < most else workers[: max(0, most - 2)]
    for name, status in shown:
        style = "red" if now.is_gone(status) else ""
        table.add_row(*(Text(cell, style) for cell in process_row(now, name)))
    if len(shown) < len(workers):
        table.add_row(Text(f"and {len(workers) - len(shown)} more", "dim"))
    return table, 1 + len(shown) + (len(shown) < len(workers))


def process_row(now: Overview, name: str) -> tuple[str, ...]:
    """Return the cells of the worker `name`: name, phase, weights, busy, speed, when last seen."""
    status = now.workers[name]
    unit = "tokens/s" if status.role == "actor" else "groups/s"
    gone = "gone, " if now.is_gone(status) else ""
    weights = status.version + _behind(status.version, now.version)
    rate = f"{status.rate:,.{0 if status.rate >= 10 else 1}f} {unit}"
    seen = f"{gone}{now.age_s(status):.0f} s ago"
    names = one_line(name), one_line(status.phase), one_line(weights)
    return *names, f"{status.busy:.0%}", rate, seen


def _behind(version: str, newest: str) -> str:
    """Return how many Updates a version is older than the newest one, such as " (-2)", "" for none.

    Both are texts such as "1.37"; another client may have written anything else, which gives "" too.
    """
    steps = [text.rpartition(".")[2] for text in (version, newest)]
    if not all(re.fullmatch("[0-9]{1,15}", step) for step in steps):
        return ""
    behind = int(steps[1]) - int(steps[0])
    return f" (-{behind})" if behind > 0 else ""


def _name(process: str) -> str:
    """Return a process's name for a line with other figures, cut to 40 characters."""
    return one_line(short(process, 40))


def _log_lines(log: Sequence[str], width: int, most: int) -> list[Text]:
    """Return the newest `most` lines of the log under a blank one, each cut to `width` columns."""
    if most < 2 or not log:
        return []
    lines = [Text(one_line(line), "dim", no_wrap=True, overflow="ellipsis") for line in log]
    return [Text(""), *lines[-(most - 1) :]]


def progress_text(now: Overview) -> str:
    """Return a line on a run: step, reward, held-out, time left; the state without any progress.

    Example: "step 37 of 100, reward 0.580, held-out 0.610, 53 s left"
    """
    if now.progress is None:
        return now.state
    progress = now.progress
    parts = [f"step {progress.step} of {progress.steps}"]
    parts += [f"reward {progress.rewards[-1]:.3f}"] if progress.rewards else []
    parts += [f"held-out {progress.heldout[-1]:.3f}"] if progress.heldout else []
    if progress.step_s > 0 and now.state != "ended":
        parts.append(f"{duration((progress.steps - progress.step) * progress.step_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time for people: "45 s", "12 min", "3.4 h" or "2.5 d"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.1f} d"
