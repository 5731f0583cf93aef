"""The thread that kills."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.losses import LossMeter, ticket_holders
from tests.chaos.plan import Deck
from tests.chaos.victims import ACTOR, LEARNER, SERVER, Victim, find_victims
from tests.chaos.world import World

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill that fell: what, when (in seconds of the run), at which step.

    `lost`: entries that a killed server had acknowledged and lost, None where that is not known.
    """

    kind: str
    child: str
    pid: int
    at_s: float
    step: int
    lost: int | None = None


class Killer:
    """Kills what the deck says until it is spent or the learner has finished.

    With `preempt` actors get SIGTERM, from the first step on, while they hold tickets. Each process gets
    one: a second would end it as kill -9 does.
    """

    def __init__(
        self, world: World, deck: Deck, report: Callable[[Kill], None], preempt: bool = False
    ) -> None:
        self._preempt = preempt
        self._told: set[int] = set()
        self.kills: list[Kill] = []
        self._world = world
        self._deck = deck
        self._report = report
        self._meter = LossMeter(world.run_folder, world.site.variables["RUN_NAME"])
        self._step = 0
        self._learner_killed_at = 0

    def run(self) -> None:
        """Kill, in a thread beside the supervisor."""
        self._began = time.monotonic()
        while self._deck and self._sleep():
            kept = self._deck.is_kept(self._step) or (self._preempt and self._step == 0)
            if not kept and (victim := self._next_victim()):
                self._kill(victim)

    def _sleep(self) -> bool:
        """Wait until the next kill; False when the learner has finished."""
        self._step = max(self._step, self._world.site.steps())
        until = time.monotonic() + self._deck.pause_s(time.monotonic() - self._began, self._step)
        while time.monotonic() < until and self._world.training:
            time.sleep(_LOOK_S)
        return self._world.training

    def _next_victim(self) -> Victim | None:
        found = find_victims(self._world.children)
        victims = [victim for victim in found if victim.pid not in self._told]
        if self._step >= self._deck.steps:  # what a server loses now nobody would put back
            victims = [victim for victim in victims if victim.kind != SERVER]
        if self._step == 0:  # the first kill of the learner is to be one that it resumes from
            victims = [victim for victim in victims if victim.kind != LEARNER]
        moved = self._step > self._learner_killed_at
        if not moved:  # whose guard is killed is killed too: on a busy machine none would ever start
            victims = [one for one in victims if one.kind == LEARNER or not _is_learners(one)]
        kind = self._deck.draw({victim.kind for victim in victims}, moved)
        alike = [victim for victim in victims if victim.kind == kind]
        if self._preempt and kind == ACTOR:
            holders = ticket_holders(self._world.run_folder, self._world.site.variables["RUN_NAME"])
            alike = [victim for victim in alike if victim.pid in holders]
            if not alike:
                self._deck.put_back(ACTOR)
        return alike[self._deck.choose(len(alike))] if alike else None

    def _kill(self, victim: Victim) -> None:
        shown = self._meter.shown() if victim.kind == SERVER else None
        preempted = self._preempt and victim.kind == ACTOR
        if preempted:
            self._told.add(victim.pid)
        if not victim.kill(signal.SIGTERM if preempted else signal.SIGKILL):
            self._deck.put_back(victim.kind)
            return
        lost = None if shown is None else self._meter.lost(shown, victim.pid)
        if _is_learners(victim):
            self._learner_killed_at = self._step
        at_s = round(time.monotonic() - self._began, 2)
        kill = Kill(victim.kind, victim.child, victim.pid, at_s, self._step, lost)
        self.kills.append(kill)
        self._report(kill)


def _is_learners(victim: Victim) -> bool:
    """Whether its end is the learner's too."""
    return victim.child.startswith("learner")
