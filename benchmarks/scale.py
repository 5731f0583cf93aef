"""Measure how many actors one queue server and one learner can serve, and what breaks first.

    python -m benchmarks.scale [--actors 1 10 100 500 1000 2000] [--seconds 60] [--json]
    python -m benchmarks.scale --json > scale.json
    python -m benchmarks.scale --from scale.json --picture docs/images/scale.png

First the processor time of the server's main thread is measured for each kind of call that actors,
rewarders and learner make (benchmarks/scale_costs.py); --rounds times, and the medians count. Then
fleets of simulated actors (benchmarks/scale_fleet.py) work for --seconds each, which shows whether the
sum of these costs is what a server really takes. The limits are computed from the costs, because the
simulation shares this machine with the server. It prints the tables of docs/scale.md. Exit code 1: a
fleet's audit does not balance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.intake import GENERATIONS
from benchmarks.scale_costs import (
    HELD,
    LOOKS_S,
    MOST_ROWS,
    OUTCOMES_S,
    REPORTS_S,
    TICKETS_S,
    WATCH_S,
    WEIGHTS_S,
    Costs,
    GroupCost,
    intake_us,
    measure_costs,
    median,
)
from benchmarks.scale_fleet import RENEW_S, Fleet, FleetRun
from penstock.common.broker.local_server import LocalServer
from penstock.common.guard import guard_children

ACTORS = (1, 10, 100, 500, 1000, 2000)
TOKENS = (256, 2048)
"""Tokens of a completion; a group has 8."""
TOKENS_PER_S = 5000.0
"""Of one actor: an assumption, which --tokens-per-s changes."""
SOCKETS = 5
"""An actor's calls at a time, each on a socket: tickets, weights, leases, watch and a hand-off."""
MAX_CLIENTS, LINK_BYTES_S = 10_000, 1.25e9
"""The server's default limit, and 10 Gbit/s."""
FLEET_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Actors of a speed in tokens per second, with completions of a length."""

    tokens: int
    tokens_per_s: float

    @property
    def groups_s(self) -> float:
        """Groups per second and actor."""
        return self.tokens_per_s / (GENERATIONS * self.tokens)

    def share(self, costs: Costs, actors: int, without: str = "") -> float:
        """The share of one core that the server's main thread takes, `without` a kind of call."""
        parts = costs.per_actor(actors, HELD) | {"groups": self.groups_us(costs)}
        parts.pop(without, None)
        constant_us = costs.idle_us + costs.outcomes_us * OUTCOMES_S
        return (actors * sum(parts.values()) + constant_us) / 1e6

    def groups_us(self, costs: Costs) -> float:
        """Per second and actor, the server's microseconds for its groups."""
        return costs.groups[self.tokens].server_us * self.groups_s

    def limits(self, costs: Costs) -> dict[str, float]:
        """By what breaks, the number of actors at which it does."""
        group = costs.groups[self.tokens]
        bytes_s = max(group.bytes_in, group.bytes_out) * self.groups_s
        return {
            "the server's processor": largest(lambda actors: self.share(costs, actors) <= 1),
            "the same without rows of held tickets": largest(
                lambda actors: self.share(costs, actors, "rows of held tickets") <= 1
            ),
            "10 Gbit/s": LINK_BYTES_S / bytes_s,
            "connections": MAX_CLIENTS / SOCKETS,
            "the learner's intake": 1e6 / (group.learner_us * self.groups_s),
        }


def largest(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest number up to `most` that `fits`, if all smaller ones do."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured, and where."""

    costs: Costs
    fleets: list[FleetRun]
    tokens_per_s: float
    machine: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Result:
        """A result that --json printed."""
        found: dict[str, Any] = json.loads(path.read_text())
        costs = found["costs"]
        costs["groups"] = {int(size): GroupCost(**one) for size, one in costs["groups"].items()}
        fleets = [FleetRun(**{**one, "faults": tuple(one["faults"])}) for one in found["fleets"]]
        return cls(Costs(**costs), fleets, found["tokens_per_s"], found["machine"])

    @property
    def loads(self) -> list[Load]:
        """A load for each length of completions."""
        return [Load(tokens, self.tokens_per_s) for tokens in self.costs.groups]

    def expected_s(self, fleet: FleetRun) -> float:
        """The server's processor time of a fleet by the costs of its calls."""
        costs = self.costs
        groups = fleet.groups * costs.groups[FLEET_TOKENS].server_us
        renewals = fleet.renewals * costs.renew_us + fleet.renewed * costs.renewed_us
        takes = (fleet.takes - 2 * fleet.groups) * costs.take_us
        looks = (fleet.functions - 2 * fleet.groups - fleet.renewals) * costs.outcomes_us
        return (groups + renewals + takes + looks + costs.idle_us * fleet.seconds) / 1e6


def machine() -> dict[str, str]:
    """Where this runs, and what else does."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    name = models[0].partition(": ")[2] if models else platform.processor()
    return {
        "machine": f"{os.cpu_count()} cores, {name}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": " ".join(f"{one:.1f}" for one in os.getloadavg()),
    }


def tables(result: Result) -> Iterator[str]:
    """The tables of docs/scale.md, in Markdown."""
    yield ", ".join(f"{name} {value}" for name, value in result.machine.items())
    yield from ("", "| of an actor | each | us per second |", "|---|---|---|")
    yield from _cost_rows(result)
    yield f"\nA call that wakes the server costs it {result.costs.wake_us:.0f} us more."
    yield from ("", "| of a group | bytes in | bytes out | server | learner's intake |")
    yield "|---|---|---|---|---|"
    for tokens, one in result.costs.groups.items():
        yield (
            f"| 8 x {tokens:,} | {one.bytes_in:,.0f} | {one.bytes_out:,.0f} | {one.server_us:.0f} us "
            f"| {one.learner_us:,.0f} us |"
        )
    yield from ("", "| actors | " + " | ".join(f"8 x {one.tokens:,}" for one in result.loads) + " |")
    yield "|---|" + "---|" * len(result.loads)
    for actors in ACTORS:
        shares = [f"{load.share(result.costs, actors):.1%}" for load in result.loads]
        yield f"| {actors:,} | {' | '.join(shares)} |"
    yield from _limit_rows(result)
    yield from _fleet_rows(result)


def _cost_rows(result: Result) -> Iterator[str]:
    costs, many = result.costs, MOST_ROWS
    calls = {
        "look for new weights": f"{costs.weights_us:.0f} us, {WEIGHTS_S:.0f} a second",
        "look at leases": f"{costs.look_us:.0f} us, {2 * LOOKS_S:.1f} a second",
        "rows of held tickets": f"{costs.row_us:.2f} us each, {many:,} in half of the looks",
        "contract, state, heartbeat": f"{costs.watch_us:.0f} us, {WATCH_S:.0f} a second",
        "costs and status": f"{costs.report_us:.0f} us, {REPORTS_S:.1f} a second",
        "renewals": f"{costs.renew_us:.0f} us + {costs.renewed_us:.1f} per lease, every {RENEW_S:.2f} s",
    }
    for name, each_us in costs.per_actor(many, HELD).items():
        yield f"| {name} | {calls[name]} | {each_us:,.0f} |"
    for load in result.loads:
        cost_us = costs.groups[load.tokens].server_us
        what = f"{cost_us:,.0f} us, {load.groups_s:.2f} a second"
        yield f"| groups of 8 x {load.tokens:,} | {what} | {load.groups_us(costs):,.0f} |"
    empty = f"{costs.take_us:.0f} and {costs.block_us:.0f} us, {TICKETS_S:.1f} a second"
    yield f"| looks for tickets, while there are none | {empty} | {costs.unused_us:,.0f} |"


def _limit_rows(result: Result) -> Iterator[str]:
    limits = [load.limits(result.costs) for load in result.loads]
    yield from ("", "| breaks | " + " | ".join(f"8 x {one.tokens:,}" for one in result.loads) + " |")
    yield "|---|" + "---|" * len(limits)
    for name in limits[0]:
        yield f"| {name} | {' | '.join(f'{one[name]:,.0f}' for one in limits)} |"
    for load, found in zip(result.loads, limits, strict=True):
        first = min(found, key=lambda name: found[name])
        rate = f"{found[first] * load.groups_s:,.0f} groups/s"
        yield f"\n8 x {load.tokens:,}: {first} first, at {found[first]:,.0f} actors, {rate}."


def _fleet_rows(result: Result) -> Iterator[str]:
    yield from (
        "",
        "| actors | groups | groups/s | server, s | by the costs, s | simulator, s "
        "| longest between renewals, s | audit |",
        "|---|---|---|---|---|---|---|---|",
    )
    for one in result.fleets:
        yield (
            f"| {one.actors:,} | {one.groups:,} | {one.groups / one.seconds:.1f} | {one.server_s:.2f} "
            f"| {result.expected_s(one):.2f} | {one.simulator_s:.1f} | {one.longest_s:.2f} "
            f"| {'balances' if one.balances else 'does not balance'} |"
        )


def draw(result: Result, path: Path) -> None:
    """The server's share of a core by the number of actors, as computed and as simulated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    actors = [round(10 ** (power / 10)) for power in range(36)]
    for load in result.loads:
        shares = [load.share(result.costs, one) for one in actors]
        axes.plot(actors, shares, label=f"computed: 8 x {load.tokens:,} tokens, all calls")
    simulated = [one.server_s / one.seconds for one in result.fleets]
    axes.plot([one.actors for one in result.fleets], simulated, "o", label="simulated: without looks")
    computed = [result.expected_s(one) / one.seconds for one in result.fleets]
    axes.plot([one.actors for one in result.fleets], computed, "x--", label="computed: the same calls")
    axes.axhline(1, color="0.3", linestyle=":", label="one core")
    axes.set(xscale="log", yscale="log", xlabel="actors", ylabel="cores of the server's main thread")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def measure(options: argparse.Namespace) -> Result:
    """Measure the costs, then the fleets, each on a server of its own."""
    found = machine()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with LocalServer(folder / "costs") as server:
            learner_us = {tokens: intake_us(server, folder, tokens) for tokens in TOKENS}
            costs = median([measure_costs(server.url, learner_us) for _ in range(options.rounds)])
            print(json.dumps(asdict(costs)), file=sys.stderr, flush=True)
        fleets = []
        for actors in options.actors:
            with LocalServer(folder / f"server-{actors}") as server:
                fleet = Fleet(actors, 0, FLEET_TOKENS)
                fleet.groups = max(8, round(actors * options.seconds / fleet.group_s))
                fleets.append(fleet.run(server.url, folder))
                print(json.dumps(asdict(fleets[-1])), file=sys.stderr, flush=True)
    found["load"] += " to " + machine()["load"]
    return Result(costs, fleets, options.tokens_per_s, found)


def main() -> int:
    """Measure, or read what was measured; return 1 if a fleet's audit does not balance."""
    parser = argparse.ArgumentParser(prog="benchmarks.scale", description=__doc__)
    parser.add_argument("--actors", type=int, nargs="*", default=list(ACTORS), help="simulated fleets")
    parser.add_argument("--rounds", type=int, default=3, help="of the costs, whose medians count")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each fleet")
    parser.add_argument("--tokens-per-s", type=float, default=TOKENS_PER_S, help="of an actor")
    parser.add_argument("--from", dest="source", type=Path, help="a result of --json: measure nothing")
    parser.add_argument("--picture", type=Path, help="draw the curve into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    guard_children()
    torch.set_num_threads(1)
    result = Result.read(options.source) if options.source else measure(options)
    if options.picture:
        draw(result, options.picture)
    print(json.dumps(asdict(result)) if options.json else "\n".join(tables(result)))
    return int(not all(one.balances for one in result.fleets))


if __name__ == "__main__":
    sys.exit(main())
