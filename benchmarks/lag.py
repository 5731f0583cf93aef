"""What policy lag costs, and what each correction recovers: the demo's task at an exact lag.

    python -m benchmarks.lag [--out runs/lag] [--seeds 10] [--stress-seeds 3] [--arms NAME ...]
                             [--picture FILE.png] [--json]

Every finished run is a line of OUT/results.jsonl and is not made again, so a benchmark that was killed
goes on where it was. Progress goes to stderr, the tables to stdout. docs/lag.md has a result, and says
what is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.common.log import configure_logs

GROUPS = 32
STEPS = 60
EVAL_STEPS = 20
MARGIN = 0.03
"""By how much lag may cost accuracy, unless one pooled standard deviation is more."""
STRESS_LAG = 8
"""Where the corrections are compared: the run without any loses far more than 5 points there."""

UNCORRECTED: dict[str, Any] = {"decoupled_loss": True, "importance_sampling_correction": "off"}
"""The loss as if every batch were fresh: the proximal policy stands for the one that sampled."""

SLOW: dict[str, Any] = {"learning_rate": 3e-5}
"""Not quite a third of the recipe's."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A setting that is run with several seeds."""

    name: str
    lag: int
    changes: dict[str, Any] = field(default_factory=dict)
    """To the demo's recipe with max_staleness `lag`."""
    part: Literal["main", "stress"] = "stress"
    against: str = "lag 0"
    """The arm without lag at the same learning rate."""


def _direct(name: str, **changes: Any) -> Arm:
    return Arm(f"direct, {name}", STRESS_LAG, changes)


def _decoupled(level: str, mode: str, low: float, cap: float) -> Arm:
    bounds = f"{low:g} to {cap:g}" if low and mode != "truncate" else f"{cap:g}"
    changes = {
        "decoupled_loss": True,
        "importance_sampling_correction": level,
        "importance_sampling_mode": mode,
        "importance_sampling_min": low,
        "importance_sampling_cap": cap,
    }
    return Arm(f"decoupled, {level}, {mode} {bounds}", STRESS_LAG, changes)


ARMS = (
    Arm("lag 0", 0, part="main"),
    Arm("lag 4", 4, part="main"),
    *(Arm(f"none, lag {lag}", lag, UNCORRECTED) for lag in (1, 2, 4, 8)),
    _direct("token, truncate 2"),
    _direct("off", importance_sampling_correction="off"),
    _decoupled("token", "truncate", 0.5, 2.0),
    _decoupled("token", "mask", 0.5, 5.0),
    _decoupled("token", "clip", 0.5, 2.0),
    _decoupled("sequence", "truncate", 0.5, 2.0),
    _decoupled("sequence", "mask", 0.0, 3.0),
    _decoupled("geometric", "mask", 0.8, 1.25),
    _direct("CISPO", loss_type="cispo"),
    _direct("DPPO", loss_type="dppo"),
    _direct("GSPO", loss_type="gspo", epsilon=3e-4, epsilon_high=4e-4),
    Arm("slow, lag 0", 0, SLOW, against="slow, lag 0"),
    Arm("slow, lag 4", 4, SLOW, against="slow, lag 0"),
    Arm("slow, none, lag 4", 4, UNCORRECTED | SLOW, against="slow, lag 0"),
)


@dataclass(frozen=True)
class Size:
    """How long every run is; equal for all arms."""

    steps: int
    groups: int


def main(arguments: list[str] | None = None) -> int:
    """Make the runs that are missing, then show what all came to."""
    options = _parse(arguments)
    configure_logs("benchmark", "text")
    size = Size(options.steps, options.groups)
    arms = [arm for arm in ARMS if not options.arms or arm.name in options.arms]
    path = options.out / "results.jsonl"
    make_runs(plan_runs(arms, options.seeds, options.stress_seeds), size, path)
    known = [Summary.of(arm, rows) for arm in ARMS if (rows := rows_of(arm, size, path))]
    if options.picture:
        draw(known, options.picture)
    print(json.dumps([asdict(item) for item in known], indent=1) if options.json else report(known))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lag", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/lag"), help="folder of all it writes")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each of the two main arms")
    parser.add_argument("--stress-seeds", type=int, default=3, help="runs of each other arm")
    parser.add_argument("--steps", type=int, default=STEPS, help="Updates of a run")
    parser.add_argument("--groups", type=int, default=GROUPS, help="groups of a step")
    parser.add_argument("--arms", nargs="*", choices=[arm.name for arm in ARMS], help="only these")
    parser.add_argument("--picture", type=Path, help="draw the figures into this file")
    parser.add_argument("--json", action="store_true", help="the summaries as JSON")
    return parser.parse_args(arguments)


def plan_runs(arms: Sequence[Arm], seeds: int, stress_seeds: int) -> list[tuple[Arm, int]]:
    """All arms with seed 1, then all with seed 2, so that a benchmark cut short is still one."""
    counts = {"main": seeds, "stress": stress_seeds}
    return [
        (arm, seed)
        for seed in range(1, max(counts.values()) + 1)
        for arm in arms
        if seed <= counts[arm.part]
    ]


def make_runs(runs: Sequence[tuple[Arm, int]], size: Size, path: Path) -> None:
    """Append a line to `path` for every run that has none yet."""
    missing = [
        run for run in runs if not any(row["seed"] == run[1] for row in rows_of(run[0], size, path))
    ]
    if not missing:
        return
    from benchmarks.lag_world import leave, train_arm

    for number, (arm, seed) in enumerate(missing, 1):
        started_s = time.monotonic()
        run = train_arm(path.parent, arm.lag, arm.changes, seed, size.steps, size.groups, EVAL_STEPS)
        row = _identity(arm, size) | {"seed": seed} | asdict(run)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        final = run.accuracy[size.steps]
        seconds = time.monotonic() - started_s
        _tell(f"{number}/{len(missing)}  {arm.name}, seed {seed}: {final:.1%} in {seconds:.0f} s")
    leave()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _identity(arm: Arm, size: Size) -> Row:
    return {"arm": arm.name, "lag": arm.lag, "changes": arm.changes} | asdict(size)


def rows_of(arm: Arm, size: Size, path: Path) -> list[Row]:
    """The arm's finished runs of this size."""
    if not path.is_file():
        return []
    identity = _identity(arm, size)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if identity.items() <= row.items()]


@dataclass(frozen=True)
class Summary:
    """An arm's runs; accuracies are shares of 1."""

    arm: str
    part: str
    against: str
    seeds: int
    final: float
    deviation: float
    """Of the final accuracies; unbiased."""
    curve: dict[int, tuple[float, float]]
    """Mean and deviation after so many Updates."""
    groups_trained: float
    log_ratio: float
    clipped: float
    bounded: float

    @classmethod
    def of(cls, arm: Arm, rows: Sequence[Row]) -> Summary:
        """Over the arm's runs."""
        curve = {
            int(step): _spread([row["accuracy"][step] for row in rows]) for step in rows[0]["accuracy"]
        }
        final, deviation = curve[max(curve)]
        means = {
            name: statistics.fmean(row[name] for row in rows)
            for name in ("groups_trained", "log_ratio", "clipped", "bounded")
        }
        return cls(arm.name, arm.part, arm.against, len(rows), final, deviation, curve, **means)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def pooled_deviation(first: Summary, second: Summary) -> float:
    """The deviation within both arms, weighted by their degrees of freedom."""
    degrees = max(1, first.seeds + second.seeds - 2)
    squares = sum((item.seeds - 1) * item.deviation**2 for item in (first, second))
    return math.sqrt(squares / degrees)


def verdict(fresh: Summary, lagged: Summary) -> tuple[bool, str]:
    """Whether lag costs no more than allowed, and the figures in words."""
    pooled = pooled_deviation(fresh, lagged)
    difference, allowed = lagged.final - fresh.final, max(MARGIN, pooled)
    holds = difference >= -allowed
    return holds, (
        f"{lagged.arm} minus {fresh.arm}: {100 * difference:+.1f} points; allowed {-100 * allowed:.1f} "
        f"(one pooled standard deviation is {100 * pooled:.1f}): {'holds' if holds else 'does not hold'}"
    )


def report(summaries: Sequence[Summary]) -> str:
    """A table in Markdown, and the verdict."""
    by_name = {item.arm: item for item in summaries}
    return "\n".join([*_table(by_name), "", *_verdicts(by_name)])


def _table(by_name: Mapping[str, Summary]) -> Iterator[str]:
    yield (
        "| arm | seeds | final accuracy | to lag 0, points | mean abs log ratio | clipped | corrected "
        "| groups trained |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for item in by_name.values():
        fresh = by_name.get(item.against)
        difference = f"{100 * (item.final - fresh.final):+.1f}" if fresh and fresh != item else ""
        yield (
            f"| {item.arm} | {item.seeds} | {100 * item.final:.1f} ± {100 * item.deviation:.1f} "
            f"| {difference} | {item.log_ratio:.2f} | {item.clipped:.1%} | {item.bounded:.1%} "
            f"| {item.groups_trained:.0f} |"
        )


def _verdicts(by_name: Mapping[str, Summary]) -> Iterator[str]:
    if {"lag 0", "lag 4"} <= by_name.keys():
        yield verdict(by_name["lag 0"], by_name["lag 4"])[1]


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Learning curves of the main arms beside the final accuracy of all; bars are one deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 5.2), layout="constrained", width_ratios=[2, 3]
    )
    for item in summaries:
        if item.part == "main":
            means, deviations = zip(*item.curve.values(), strict=True)
            label = f"{item.arm} ({item.seeds} seeds)"
            left.errorbar(list(item.curve), means, deviations, marker="o", capsize=3, label=label)
    left.set(xlabel="Updates", ylabel="held-out accuracy, greedy", ylim=(0, 1), title="default loss")
    left.legend(loc="upper left")
    right.barh(
        [item.arm for item in summaries],
        [item.final for item in summaries],
        xerr=[item.deviation for item in summaries],
        color=["tab:blue" if item.part == "main" else "0.7" for item in summaries],
        capsize=3,
    )
    before, fresh = summaries[0].curve[0][0], summaries[0]
    right.axvline(before, color="0.3", linestyle=":", label="before training")
    right.axvline(fresh.final, color="0.3", linestyle="--", label=fresh.arm)
    right.set(xlabel="final accuracy", title=f"all arms; corrections at lag {STRESS_LAG}")
    right.set_xlim(0, 1)
    right.legend(loc="upper right")
    right.invert_yaxis()
    left.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
