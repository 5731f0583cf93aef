"""`penstock profile`: where the time of a run's steps went, read from its metrics.jsonl."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from penstock.common.config.command import Result, ResultCommand
from penstock.common.errors import ConfigError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder, RunPath
from penstock.common.log import configure_logs

_PHASE = re.compile(r"perf/(?P<role>learner|actor|rewarder)/(?P<phase>\w+?)(?P<cpu>_cpu)?_s")


HEADINGS = {
    "learner": "the learner was",
    "actor": "the actors together were",
    "rewarder": "the rewarders together were",
}
"""By role, the first line of its table. Subprocesses are vLLM's engine, tools and scoring processes."""

Phase = tuple[str, str]
"""A role and what it does, such as ("actor", "generating")."""


class Profile(ResultCommand):
    """Show where the time of a run's steps went: seconds and CPU seconds by what each role did.

    Example: penstock profile runs/mine
    """

    run: CliPositionalArg[RunPath] = Field(description="the run's folder")

    def execute(self) -> int:
        """Print the table and return 0. Raise ConfigError if no step of the run has a profile."""
        configure_logs("profile", "text")
        rows = [row for row in read_json_lines(RunFolder(self.run).metrics) if _phases_of(row)]
        if not rows:
            folder = RunFolder(self.run)
            is_run = folder.up_lock.exists() or folder.journal.exists()
            is_young = is_run and not read_json_lines(folder.metrics)
            hint = "wait for the first step" if is_young else "name a run's folder"
            raise ConfigError(f"{folder.metrics} has no step with a profile: {hint}")
        return self.show(profile_of(rows))


def _phases_of(row: Mapping[str, Any]) -> dict[Phase, list[float]]:
    """Return by role and phase its seconds and CPU seconds in `row`, the metrics of a step."""
    found: dict[Phase, list[float]] = {}
    for name, value in row.items():
        if (match := _PHASE.fullmatch(name)) and isinstance(value, (int, float)):
            phase = match["role"], match["phase"].replace("_", " ")
            found.setdefault(phase, [0.0, 0.0])[bool(match["cpu"])] += value
    return found


def _means(steps: Sequence[Mapping[Phase, Sequence[float]]]) -> dict[Phase, list[float]]:
    """Return by phase the means of its two numbers over `steps`; a step without the phase counts 0."""
    sums: dict[Phase, list[float]] = {}
    for step in steps:
        for phase, costs in step.items():
            sums[phase] = [
                one + more for one, more in zip(sums.get(phase, (0.0, 0.0)), costs, strict=True)
            ]
    return {phase: [cost / len(steps) for cost in costs] for phase, costs in sums.items()}


def profile_of(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Return the means over `rows`, the metrics of a run's steps, as text and as one object per phase.

    There is a table per role. The first step has a line of its own if there are more: all that went
    before it counts for it.
    """
    first, *later = map(_phases_of, rows)
    mean = _means(later or [first])
    lines, found = [], []
    for role, heading in HEADINGS.items():
        phases = {phase: costs for (of, phase), costs in mean.items() if of == role}
        lines += _table(heading, phases) if phases else []
        found += [
            {"role": role, "phase": phase, "seconds": costs[0], "cpu_s": costs[1]}
            for phase, costs in _ordered(phases)
        ]
    if later:
        start_s = sum(costs[0] for (role, _), costs in first.items() if role == "learner")
        lines.append(f"Not in the tables: the start and the first step, {start_s:.1f} s together.")
    return Result("\n".join(lines), found)


def _ordered(phases: Mapping[str, Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    """Return the phases with their costs, the one with the most seconds first."""
    return sorted(phases.items(), key=lambda item: -item[1][0])


def _table(heading: str, phases: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of a role's table; `phases` has seconds and CPU seconds per step by phase."""
    all_s, all_cpu_s = (sum(costs[i] for costs in phases.values()) for i in (0, 1))
    lines = [f"{heading:<28}{'s per step':>12}{'share':>8}{'CPU s per step':>16}"]
    for name, (seconds, cpu_s) in [*_ordered(phases), ("all", (all_s, all_cpu_s))]:
        share = seconds / all_s if all_s else 0.0
        lines.append(f"{name:<28}{seconds:>12.3f}{share:>8.1%}{cpu_s:>16.3f}")
    return lines
