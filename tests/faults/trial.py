"""One fault after the other, each with the time until work flows again, and the judge's verdict."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence, Set
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from tests.chaos.verdict import wrongly_dead
from tests.faults.kinds import Kind, possible
from tests.faults.world import ROLES, World
from tests.judge import judge

GOAL_S = 5.0
_STALL_S = 180.0
_LONG_EVERY = 7
_STEPS = 4
"""How many show that work flows: the groups of the first ones may have been there."""


@dataclass(frozen=True, slots=True)
class Met:
    """A fault that ended.

    `flows_again_s`: from then until the end of the longest pause in the next few steps, None if these
    were not made. `steps` were made during the fault. `ends`: how processes ended until work flowed.
    """

    kind: str
    role: str
    lasted_s: float
    flows_again_s: float | None
    lease_s: float
    steps: int
    ends: list[str]
    beside: str = ""
    """Another fault at the same time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many faults of which kinds: `count` of them, or those that begin within `seconds`.

    `kinds` are all that are possible here, if empty. `share` is that of its usual time that each lasts.
    With `whole` the first of each kind has its whole length, the next ones are shorter. With `together`
    each has another one beside it. If `length_s` is not 0, each lasts as long.
    """

    kinds: Sequence[str] = ()
    seconds: float = math.inf
    count: int = 1_000_000
    share: float = 1.0
    whole: bool = False
    together: bool = False
    length_s: float = 0.0


class Trial:
    """Meets the faults of a plan. `met` lists them, `unexpected` the ends that they do not explain."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.met: list[Met] = []
        self.unexpected: list[str] = []
        self._world, self._plan = world, plan

    def run(self) -> None:
        """Meet faults, in a thread beside the supervisor."""
        world, wanted = self._world, self._plan.kinds
        self._wait_for_step(1, 300.0)
        deck: list[Kind] = []
        began = time.monotonic()
        while time.monotonic() - began < self._plan.seconds and len(self.met) < self._plan.count:
            if not deck:
                deck = [kind for kind in possible(world) if kind.name in wanted or not wanted]
                world.random.shuffle(deck)
            self._meet(deck.pop())
            time.sleep(world.random.random() * 2)

    def _meet(self, kind: Kind) -> None:
        world = self._world
        role = world.random.choice(kind.roles)
        lasts_s = self._length(kind)
        world.say(f"==== {kind.name} of {role} for {lasts_s:g} s at step {world.step()}")
        before, ended, began = world.step(), len(world.ends), time.monotonic()
        second = self._second(role) if self._plan.together else None
        with kind.begin(world, role), second.begin(world, second.roles[0]) if second else nullcontext():
            time.sleep(lasts_s)
        lasted_s, at, over = time.monotonic() - began, world.step(), time.monotonic()
        world.say(f"==== end of {kind.name} at step {at}")
        flows_s = self._wait_for_flow(at, over)
        ends = [f"{child}: {how}" for _, child, how in world.ends[ended:]]
        self._expect(kind.ends | (second.ends if second else frozenset()), kind.name, ends)
        beside = f"{second.name} of {second.roles[0]}" if second else ""
        met = Met(kind.name, role, round(lasted_s, 1), flows_s, world.lease_s, at - before, ends, beside)
        self.met.append(met)
        print(json.dumps(asdict(met)), flush=True)

    def _wait_for_flow(self, at: int, over: float) -> float | None:
        """Seconds from `over` to the step that ended the longest pause of the next few after `at`."""
        times = [over]
        for step in range(at + 1, at + _STEPS + 1):
            if not self._wait_for_step(step, _STALL_S):
                return None
            times.append(time.monotonic())
        _, end = max((after - before, after) for before, after in pairwise(times))
        return round(end - over, 2)

    def _length(self, kind: Kind) -> float:
        plan = self._plan
        if plan.length_s:
            return plan.length_s
        if plan.whole:
            before = sum(met.kind == kind.name for met in self.met)
            lengths = [one for one in (kind.whole_s, kind.long_s, kind.seconds) if one]
            return lengths[min(before, len(lengths) - 1)]
        long = plan.share == 1.0 and kind.long_s and len(self.met) % _LONG_EVERY == _LONG_EVERY - 1
        return kind.long_s if long else kind.seconds * plan.share

    def _second(self, role: str) -> Kind:
        """A fault of another role, of its network or process, with that role alone."""
        kinds = [kind for kind in possible(self._world) if set(ROLES) <= set(kind.roles)]
        other = self._world.random.choice([one for one in ROLES if one != role])
        kind = replace(self._world.random.choice(kinds), roles=(other,))
        self._world.say(f"==== beside it {kind.name} of {other}")
        return kind

    def _expect(self, codes: Set[int], kind: str, ends: Sequence[str]) -> None:
        texts = {f"exit code {code} " for code in codes}
        self.unexpected += [
            f"{kind}: {end}" for end in ends if not any(text in f"{end} " for text in texts)
        ]

    def _wait_for_step(self, step: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._world.step() < step:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run of faults; `faults` is empty if it is sound."""

    faults: list[str]
    met: list[Met]
    steps: int
    states: dict[str, int]


def run_faults(folder: Path, seed: int, plan: Plan, lease_s: float = 3.0) -> Verdict:
    """Run a trial in an empty folder; must be called in the main thread."""
    world = World(folder, seed, lease_s)
    trial = Trial(world, plan)
    code = world.run(trial.run)
    judged = judge(world.run_folder)
    faults = [*judged["faults"], *wrongly_dead(world.run_folder), *trial.unexpected]
    faults += [f"the run ended early with exit code {early}" for early in world.exits]
    faults += [
        f"{met.kind} of {met.role}: no work flowed again"
        for met in trial.met
        if met.flows_again_s is None
    ]
    if code:
        faults.append(f"the run ended with exit code {code}, see roles.log")
    return Verdict(faults, trial.met, judged["steps"], judged["states"])
