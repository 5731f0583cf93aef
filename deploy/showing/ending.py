"""What `penstock up` prints at a run's end: what was reached, where the model is, what to type next."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.common.errors import PenstockError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.audit import audit_journal
from penstock.common.monitor.screen import duration
from penstock.common.text import counted, one_line, printable
from penstock.deploy.child import Report

Row = dict[str, Any]

_MOST_LINES, _LARGEST_JOURNAL = 50, 256 << 20
_ERROR = re.compile(r"[\w-]+: [A-Z]\w*: ")
REPEAT = "repeat the command"
REPEAT_WITHOUT = f"{REPEAT} without LEARNER_RESUME, which would begin anew"
"""Where LEARNER_RESUME is new."""


class LastWords:
    """Passes a run's reports to each of `receivers`, and remembers each process's last error."""

    def __init__(self, *receivers: Callable[[Report], None]) -> None:
        self._receivers = receivers
        self._errors: dict[str, list[str]] = {}
        self._open: set[str] = set()  # processes whose last line was one of their error
        self._last: dict[str, str] = {}  # line of each process
        self._failed = self._how = ""

    def __call__(self, report: Report) -> None:
        """Pass a report on, and remember an error's lines, or which process failed the run."""
        for receive in self._receivers:
            receive(report)
        if report.kind == "ended" and report.text.endswith("The run stops."):
            self._failed, self._how = report.child, report.text
        elif report.kind == "output":
            self._take_line(report.child, report.text)
        elif report.kind == "started":
            self._errors.pop(report.child, None)
            self._last.pop(report.child, None)
            self._open.discard(report.child)

    def _take_line(self, child: str, text: str) -> None:
        """Remember a line of a process's output, as the last one, and if it is one of an error."""
        self._last[child] = text
        if _ERROR.match(text):
            self._errors[child] = [text]
            self._open.add(child)
        elif child in self._open:
            if text.startswith("  ") and len(self._errors[child]) < _MOST_LINES:
                self._errors[child].append(text)
            else:
                self._open.discard(child)

    def describe(self, log_of: Path, repeat: str = REPEAT) -> str:
        """Return what failed the run: the process, its error and its log in `log_of`, and to `repeat`.

        Without an error of Penstock's form it is how the process ended, and its last line. Return "" if
        no process failed the run.
        """
        if not self._failed:
            return ""
        last = self._last.get(self._failed, "")
        how = self._how.removesuffix(" The run stops.") + (f" Its last line: {last}" if last else "")
        error = "\n".join(self._errors.get(self._failed, [how]))
        return (
            f"{self._failed} failed the run: {error}\nIts log: {log_of / f'{self._failed}.log'}\n"
            f"To go on, from the newest checkpoint if there is one, correct this and {repeat}."
        )


def steps_of_complete_run(folder: RunFolder) -> int:
    """Return how many steps the run in `folder` has made, 0 unless it was trained to its end."""
    return len(read_json_lines(folder.metrics)) if folder.results("train").is_file() else 0


def print_ending(
    folder: RunFolder, failure: str, repeat: str = REPEAT, trains: bool = True, made: int = 0
) -> None:
    """Print the summary of the run in `folder`, or the text `failure` if a process failed the run.

    `repeat` says what makes the run go on. `made` is what `steps_of_complete_run` returned before this
    start. If the run `trains`, also print that no step was made, or none besides those `made`.
    """
    none = f"The run was stopped before its first step. To go on {repeat}.\nLogs: {folder.logs}"
    text = failure or format_ending(folder, repeat) or (none if trains else "")
    if made and trains and not failure and len(read_json_lines(folder.metrics)) == made:
        text = f"This start trained nothing: {counted(made, 'step')} were made before.\n{text}"
    if text:
        lines = text.splitlines()
        if sys.stdout.isatty():
            lines = [line if line.startswith("  ") else _wrapped(line) for line in lines]
        print("\n" + "\n".join(map(printable, lines)), flush=True)


def _wrapped(line: str) -> str:
    """Return `line` in lines that fit the terminal. No word is broken, as it may be a path to copy."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def format_ending(folder: RunFolder, repeat: str = REPEAT) -> str:
    """Return the summary of the run in `folder`: a table, totals, audit, the model, what to type next.

    `repeat` says what makes the run go on. Damaged lines of its files are left out. Return "" for a run
    without a step.
    """
    rows = read_json_lines(folder.metrics)
    if not rows:
        return ""
    tenth = max(1, min(10, len(rows) // 2))
    table = [("reward", mean_of("reward", rows[:tenth]), mean_of("reward", rows[-tenth:]))]
    table += _heldout(folder)
    lines = [f"{'':<10}{'before':>10}{'after':>10}{'gain':>10}"]
    lines += [f"{name:<10}{old:>10.3f}{new:>10.3f}{new - old:>+10.3f}" for name, old, new in table]
    lines.append(f"(reward: means of the first and last {counted(tenth, 'step')})")
    return "\n".join(map(one_line, [*lines, _totals(rows), *_audit(folder), *_next(folder, repeat)]))


def _heldout(folder: RunFolder) -> list[tuple[str, float, float]]:
    """Return the row of held-out: share of right answers in the first and the last evaluation.

    Where the learner did not say what is right, the row has the means of the first reward.
    """
    means: dict[int, list[float]] = {}
    for row in read_json_lines(folder.evaluations):
        right = [one for one in row.get("right") or [] if one is not None]
        values = right or [next(iter(rewards.values()), None) for rewards in row["rewards"]]
        found = [float(value) for value in values if value is not None]
        means.setdefault(row["step"], []).append(fmean(found) if found else 0.0)
    if len(means) < 2:
        return []
    return [("held-out", fmean(means[min(means)]), fmean(means[max(means)]))]


def _totals(rows: Sequence[Row]) -> str:
    """Return the line of totals over all steps: time, trained tokens, filtered and dead groups."""
    spent, tokens, filtered, dead = (
        sum(row.get(name) or 0 for row in rows)
        for name in ("perf/step_s", "num_tokens", "groups/filtered", "groups/dead")
    )
    return (
        f"{len(rows)} steps in {duration(spent)}: {tokens:,} tokens trained; "
        f"{counted(filtered, 'group')} without spread (all rewards equal) not trained, {dead} died."
    )


def _audit(folder: RunFolder) -> list[str]:
    """Return the line on what became of the tickets by the journal, with its faults.

    Return [] if the journal is not whole, as with LEARNER_JOURNAL_RETENTION, or over 256 MiB, which
    would take long.
    """
    if sum(path.stat().st_size for path in folder.journal.glob("*")) > _LARGEST_JOURNAL:
        return []
    try:
        found = audit_journal(folder)
    except (PenstockError, OSError):
        return []
    counts = f"{found.issued:,} tickets issued, {found.ended.total():,} ended, {found.open:,} open"
    return [f"Audit: {counts}; {'; '.join(found.faults()) or 'none lost, none trained twice'}."]


def _next(folder: RunFolder, repeat: str) -> list[str]:
    """Return the lines on where the model is, and the commands to type next, `repeat` the last."""
    model = next((path for path in (folder.final, folder.latest) if path.exists()), None)
    where = [f"The model: {model}"] if model else []
    if folder.best_link.exists():
        where.append(f"The best model by the held-out questions: {folder.best_link}")
    complete = folder.results("train").is_file()
    more = "for more steps raise LEARNER_MAX_STEPS and" if complete else "to go on"
    stopped = [] if complete else ["The run was stopped before its last step."]
    return [
        *stopped,
        *where,
        "Next:",
        f"  penstock samples {folder.path}",
        f"  penstock report {folder.path}",
        f"or {more} {repeat}.",
    ]


def mean_of(name: str, rows: Sequence[Row]) -> float:
    """Return the mean of the metric `name` over the rows that have it, 0 if none has."""
    return fmean([row[name] for row in rows if row.get(name) is not None] or [0.0])
