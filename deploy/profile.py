"""`penstock profile`: where the time of a run's steps went, read from its metrics.jsonl."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from penstock.common.config.command import Result, ResultCommand
from penstock.common.errors import ConfigError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import configure_logs

_PHASE = re.compile(r"perf/learner/(?P<phase>\w+?)(?P<cpu>_cpu)?_s")


class Profile(ResultCommand):
    """Show where the time of a run's steps went: seconds and CPU seconds by the learner's phases.

    Example: penstock profile runs/mine
    """

    run: CliPositionalArg[Path] = Field(description="the run's folder")

    def execute(self) -> int:
        """Print the table and return 0. Raise ConfigError if no step of the run has a profile."""
        configure_logs("profile", "text")
        rows = [row for row in read_json_lines(RunFolder(self.run).metrics) if _phases_of(row)]
        if not rows:
            raise ConfigError(
                f"{RunFolder(self.run).metrics} has no step with a profile: name a run's folder"
            )
        return self.show(profile_of(rows))


def _phases_of(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return by phase its seconds and CPU seconds in `row`, the metrics of a step."""
    found: dict[str, list[float]] = {}
    for name, value in row.items():
        if (match := _PHASE.fullmatch(name)) and isinstance(value, (int, float)):
            phase = match["phase"].replace("_", " ")
            found.setdefault(phase, [0.0, 0.0])[bool(match["cpu"])] += value
    return found


def _means(steps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return by phase the means of its two numbers over `steps`; a step without the phase counts 0."""
    sums: dict[str, list[float]] = {}
    for step in steps:
        for name, costs in step.items():
            sums[name] = [
                one + more for one, more in zip(sums.get(name, (0.0, 0.0)), costs, strict=True)
            ]
    return {name: [cost / len(steps) for cost in costs] for name, costs in sums.items()}


def profile_of(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Return the means over `rows`, the metrics of a run's steps, as text and as one object per phase.

    The first step has a line of its own if there are more: all that went before it counts for it.
    """
    first, *later = map(_phases_of, rows)
    mean = _means(later or [first])
    all_s, all_cpu_s = (sum(costs[i] for costs in mean.values()) for i in (0, 1))
    ordered = sorted(mean.items(), key=lambda item: -item[1][0])
    lines = [f"{'the learner was':<28}{'s per step':>12}{'share':>8}{'CPU s per step':>16}"]
    for name, (seconds, cpu_s) in [*ordered, ("all", (all_s, all_cpu_s))]:
        share = seconds / all_s if all_s else 0.0
        lines.append(f"{name:<28}{seconds:>12.3f}{share:>8.1%}{cpu_s:>16.3f}")
    if later:
        start_s = sum(costs[0] for costs in first.values())
        lines.append(f"Not in the table: the start and the first step, {start_s:.1f} s together.")
    found = [{"phase": name, "seconds": costs[0], "cpu_s": costs[1]} for name, costs in ordered]
    return Result("\n".join(lines), found)
