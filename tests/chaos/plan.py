"""How many kills of what, over how many steps; and when the next one falls.

A plan is a deck of kinds, shuffled by the seed. Between two kills lies a random time whose mean follows
the run's progress, so that the deck is spent shortly before the last step on a slow machine as well
as on a fast one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from dataclasses import dataclass

from tests.chaos.victims import ACTOR, EPISODE, GUARD, KEEPER, LEARNER, NURSERY, REWARDER, SCORER, SERVER

WHOLE_S = 600.0
_WHOLE_STEPS = 100
GROUPS_PER_STEP = 12
_WHOLE_DECK = {
    SERVER: 34, LEARNER: 22, ACTOR: 110, REWARDER: 30,
    SCORER: 60, KEEPER: 26, NURSERY: 10, GUARD: 28,
}  # fmt: skip
_SHORTEST_MEAN_S, _LONGEST_MEAN_S = 0.5, 1.5
"""Where a run starts slowly its pace promises too much time: then the deck would be spent too late."""
_START_STEPS = 12
"""Of these, whatever the run's size: the start of a short run takes as long as that of a whole one."""
_CALM = 0.35
"""Share of the steps at the end in which no kill is planned: they are the fastest, once all learner and
server cards are dealt, and what a kill broke has to mend."""

_EARLY = 0.5
"""Share of the deck that may fall before the first step: a slow start would take all of it."""
_AGAIN = 0.05
"""How often, per draw, a learner may be killed that has not made a step since it was killed last.

On a busy machine it takes 20 s to start, which are fifteen draws."""


@dataclass(frozen=True, slots=True)
class Floors:
    """What a run of a plan has to reach."""

    kills: int
    server: int
    learner: int
    groups: int
    updates: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A chaos run of about `seconds`: kills by kind, steps to make, and the time it must end in."""

    deck: Mapping[str, int]
    steps: int
    limit_s: float
    floors: Floors

    @property
    def kills(self) -> int:
        """How many kills are planned."""
        return sum(self.deck.values())


def make_plan(seconds: float, *, episodes: bool = False, preempt: bool = False) -> Plan:
    """The plan for a run of about so many seconds; WHOLE_S is what the promise is shown with.

    With `episodes`, of environments or agents, their processes are killed too. With `preempt` the deck
    is of actors, which get SIGTERM, and of processes whose end costs no token.

    Example:
        make_plan(60).kills == 33
    """
    share = seconds / WHOLE_S
    whole = _WHOLE_DECK | ({EPISODE: 60} if episodes else {})
    deck = {kind: max(1, round(count * share)) for kind, count in whole.items()}
    deck |= {LEARNER: max(3, deck[LEARNER]), SERVER: max(3, deck[SERVER])}
    if preempt:
        deck = {kind: deck[kind] for kind in (LEARNER, ACTOR, REWARDER, SCORER)}
        deck[ACTOR] *= 4
    floors = Floors(
        kills=round((150 if preempt else 200) * share) if share < 1 else 300,
        server=0 if preempt else max(2, int(20 * share)),
        learner=max(2, int(20 * share)),
        groups=int(1000 * share),
        updates=int(50 * share),
    )
    steps = _START_STEPS + round((_WHOLE_STEPS - _START_STEPS) * share)
    # A short run has the same start and end to get through.
    return Plan(deck, steps, max(5 * seconds, 600.0), floors)


class Deck:
    """The kinds still to be killed, in a random order that the seed decides."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._random = random.Random(seed)
        self.steps = plan.steps
        self._late = round(plan.kills * (1 - _EARLY))
        self._kinds = [kind for kind, count in plan.deck.items() for _ in range(count)]
        self._random.shuffle(self._kinds)
        self._deal_early(LEARNER, SERVER)

    def __len__(self) -> int:
        return len(self._kinds)

    def _deal_early(self, *scarce: str) -> None:
        """Spread these kinds over the first two thirds: a run on a slow machine ends before its deck."""
        for kind in scarce:
            count = self._kinds.count(kind)
            rest = [other for other in self._kinds if other != kind]
            for number in range(count):
                rest.insert(round((number + 0.5) * len(self._kinds) * 2 / 3 / count), kind)
            self._kinds = rest

    def is_kept(self, step: int) -> bool:
        """Whether the rest of the deck is kept until the run has made its first step."""
        return step == 0 and len(self) <= self._late

    def draw(self, alive: Set[str], learner_moved: bool) -> str | None:
        """The next kind that lives; a learner without a step since its last kill is mostly spared."""
        spared = not learner_moved and self._random.random() >= _AGAIN
        for position, kind in enumerate(self._kinds):
            if kind in alive and not (kind == LEARNER and spared):
                return self._kinds.pop(position)
        return None

    def put_back(self, kind: str) -> None:
        """One that ended by itself before it could be killed."""
        self._kinds.append(kind)

    def choose(self, count: int) -> int:
        """One of `count`, at random."""
        return self._random.randrange(count)

    def pause_s(self, elapsed_s: float, step: int) -> float:
        """Time to the next kill, from the time that the rest of the steps will take at this pace."""
        left_s = elapsed_s / max(step, 1) * (self.steps * (1 - _CALM) - step)
        mean_s = left_s / max(len(self._kinds), 1)
        return self._random.expovariate(1 / min(max(mean_s, _SHORTEST_MEAN_S), _LONGEST_MEAN_S))
