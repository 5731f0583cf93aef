"""The tables of a report, with a column per run: summary, times, audit, settings, machine."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

from penstock.common.journal.audit import JournalAudit
from penstock.common.monitor.screen import duration
from penstock.common.text import one_line
from penstock.common.wire.messages import END_STATES
from penstock.deploy.profile import HEADINGS, profile_of
from penstock.deploy.report.markup import Html, element, table
from penstock.deploy.report.run_data import Points, RunData

NONE = "-"
"""What a cell without a value shows."""


def summary(runs: Sequence[RunData]) -> Html:
    """Return a table of each run's result: reward, held-out means, time, rate, groups not trained."""
    names = dict.fromkeys(name for run in runs for name in run.heldout)
    rows: dict[str, Callable[[RunData], str]] = {
        "steps": lambda run: str(len(run.rows)) if run.rows else NONE,
        "reward, start to end": lambda run: _change(run.points("reward"), 10),
        **{f"held-out {name}, first to last": partial(_heldout, name) for name in names},
        "time of the steps": _steps_time,
        "of which waiting for groups": _waiting,
        "tokens per second, mean": lambda run: _mean(run.points("perf/tokens_per_s")),
        "groups filtered": lambda run: _sum(run.points("groups/filtered")),
        "groups stale": lambda run: _sum(run.points("groups/stale")),
        "groups dead": lambda run: _sum(run.points("groups/dead")),
        "model": lambda run: one_line(run.record.get("model name", NONE)),
        "device": lambda run: one_line(run.record.get("machine device", NONE)),
    }
    return table(["", *_labels(runs)], [[name, *map(show, runs)] for name, show in rows.items()])


def _heldout(name: str, run: RunData) -> str:
    """Return how the held-out mean of the reward `name` changed in a run."""
    return _change(run.heldout.get(name, {}), 1)


def _labels(runs: Sequence[RunData]) -> list[str]:
    """Return the runs' names, as heads of columns."""
    return [run.label for run in runs]


def _change(points: Points, most: int) -> str:
    """Return the means of the first and last values, such as "0.41 to 0.83".

    These are `most` values, or half of fewer than twice as many; of a single value, this one.
    """
    values = list(points.values())
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else NONE
    count = min(most, len(values) // 2)
    return f"{fmean(values[:count]):.4g} to {fmean(values[-count:]):.4g}"


def _steps_time(run: RunData) -> str:
    """Return the time of all steps of a run, such as "12 min", or "-" without any."""
    seconds = sum(run.points("perf/step_s").values())
    return duration(seconds) if seconds else NONE


def _waiting(run: RunData) -> str:
    """Return the share of all steps' time in which the learner waited for groups, such as "61%"."""
    waited, whole = (sum(run.points(name).values()) for name in ("perf/rollout_wait_s", "perf/step_s"))
    return f"{waited / whole:.0%}" if whole else NONE


def _mean(points: Points) -> str:
    """Return the mean of a curve, "-" without points."""
    return f"{fmean(points.values()):.4g}" if points else NONE


def _sum(points: Points) -> str:
    """Return the sum of a curve, "-" without points."""
    return f"{sum(points.values()):.0f}" if points else NONE


def times(runs: Sequence[RunData]) -> list[Html]:
    """Return a table per role: seconds and CPU seconds per step by what the role did, for each run."""
    found = [_phases(run) for run in runs]
    parts = [element("p", _MEANS)]
    for role, title in HEADINGS.items():
        names = dict.fromkeys(phase for phases in found for of, phase in phases if of == role)
        rows = [[name, *chain(*(_costs(one, role, name) for one in found))] for name in names]
        heads = [
            f"{what} ({run.label})" if len(runs) > 1 else what
            for run in runs
            for what in ("s per step", "share", "CPU s")
        ]
        if rows:
            parts.append(table([title, *heads], rows))
    return parts if len(parts) > 1 else [element("p", "No step has a profile.")]


_MEANS = (
    "Means per step, without the start and the first step, in which vLLM starts. The summary's share of "
    "waiting is that of all steps; the live screen's is that of the newest five."
)

Phases = dict[tuple[str, str], tuple[float, float]]
"""By role and phase, seconds and CPU seconds per step."""


def _phases(run: RunData) -> Phases:
    """Return the mean costs of a run's phases, as `penstock profile` computes them; {} without any."""
    rows = [row for row in run.rows.values() if any(name.startswith("perf/learner/") for name in row)]
    found: Sequence[Any] = profile_of(rows).rows if rows else ()
    return {(one["role"], one["phase"]): (one["seconds"], one["cpu_s"]) for one in found}


def _costs(phases: Phases, role: str, phase: str) -> list[str]:
    """Return the cells of a phase: seconds, their share in all of the role's, CPU seconds."""
    if (role, phase) not in phases:
        return [NONE] * 3
    seconds, cpu_s = phases[role, phase]
    whole = sum(cost for (of, _), (cost, _) in phases.items() if of == role)
    return [f"{seconds:.3f}", f"{seconds / whole:.1%}" if whole else NONE, f"{cpu_s:.3f}"]


def audit(runs: Sequence[RunData]) -> list[Html]:
    """Return a table of what became of the tickets, and a line per fault; "none found" without any."""
    counts: dict[str, Callable[[JournalAudit], object]] = {
        "issued": lambda one: one.issued,
        **{state: partial(_ended, state) for state in END_STATES},
        "without an end": lambda one: one.open,
        "trained twice": lambda one: one.trained_again,
        "steps in the journal": lambda one: one.steps,
        "starts of the learner": lambda one: one.starts,
        "bytes of a half-written record": lambda one: one.cut,
        "run has ended": lambda one: "yes" if one.complete else "no",
    }
    rows = [
        [name, *(count(run.audit) if run.audit else NONE for run in runs)]
        for name, count in counts.items()
    ]
    faults = [
        element("li", f"{run.label}: {fault}")
        for run in runs
        if run.audit
        for fault in run.audit.faults()
    ]
    note = "By the journal: each ticket asks for the completions of one prompt and ends in one state."
    verdict = element("ul", *faults) if faults else element("p", "Faults: none found.")
    if not any(run.audit for run in runs):
        verdict = element("p", "There is no journal to judge.")
    return [element("p", note), table(["tickets", *_labels(runs)], rows), verdict]


def _ended(state: str, audited: JournalAudit) -> int:
    """Return how many tickets ended in `state`."""
    return audited.ended[state]


def settings(runs: Sequence[RunData]) -> list[Html]:
    """Return a table of the settings that a run sets, and one of the others, folded up.

    With two runs a row that differs is marked.
    """
    values = [run.defaults | run.set_values for run in runs]
    given = sorted({name for run in runs for name in run.set_values})
    others = sorted({name for found in values for name in found} - set(given))
    heads = ["", *_labels(runs)]
    marks = len(runs) > 1 and all(values)
    first, rest = (
        table(heads, [[one_line(name), *_cells(values, name)] for name in names], "texts", marks)
        for names in (given, others)
    )
    folded = element("details", element("summary", f"{len(others)} at their default"), rest)
    return [first, folded]


def machine(runs: Sequence[RunData]) -> list[Html]:
    """Return a table of what run.json tells: versions, machine, hashes of model and data set."""
    records = [run.record for run in runs]
    names = dict.fromkeys(name for record in records for name in record)
    rows = [[one_line(name), *_cells(records, name)] for name in names]
    return [table(["", *_labels(runs)], rows, "texts", len(runs) > 1 and all(records))]


def _cells(maps: Sequence[Mapping[str, str]], name: str) -> list[str]:
    """Return the value of `name` in each of `maps`, on one line; "-" where it is missing."""
    return [one_line(found.get(name, NONE)) for found in maps]
