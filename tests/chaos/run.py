"""One chaos run, from an empty folder to its verdict."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.chaos.killer import Kill, Killer
from tests.chaos.plan import GROUPS_PER_STEP, Deck, Plan
from tests.chaos.verdict import Verdict, reach_verdict
from tests.chaos.world import World
from tests.e2e.site import AGENTS

_EPISODES = {"FAKE_TOKEN_DELAY_S": "0.06"}
"""Their rollouts have up to 90 tokens in place of 8: more slowly, most would be killed unfinished."""


def run_chaos(
    folder: Path,
    plan: Plan,
    seed: int,
    *,
    lose_every: int = 0,
    preload: Path | None = None,
    environments: bool = False,
    agents: bool = False,
) -> Verdict:
    """Run a plan in an empty folder, telling of every kill; must be called in the main thread.

    `lose_every` and `preload` are those of World. With `environments` the rollouts are conversations,
    with `agents` those of agents that call the actor's endpoint.
    """
    variables = {"LEARNER_EVAL_STEPS": "30"} | (_EPISODES if environments or agents else {})
    world = World(
        folder, lose_every=lose_every, preload=preload, talks=environments or agents,
        **variables | (AGENTS if agents else {}), LEARNER_SEED=str(seed),
        LEARNER_MAX_STEPS=str(plan.steps), LEARNER_GROUPS_PER_STEP=str(GROUPS_PER_STEP),
        LEARNER_SAVE_STEPS="4",
    )  # fmt: skip

    def report(kill: Kill) -> None:
        say(
            f"{kill.at_s:6.1f} s  kill {len(killer.kills):>3}/{plan.kills}  step "
            f"{kill.step:>2}/{plan.steps}  {kill.child}: {kill.kind}, process {kill.pid}"
            + (f", {kill.lost} acknowledged entries lost" if kill.lost else "")
        )

    killer = Killer(world, Deck(plan, seed), report)
    took_s = world.run(killer.run, plan.limit_s)
    say(f"{took_s:6.1f} s  the run has ended; judging it")
    return reach_verdict(world, killer.kills, plan.floors, took_s)


def say(text: str) -> None:
    """Progress goes beside the result."""
    print(text, file=sys.stderr, flush=True)
