"""One chaos run, from an empty folder to its verdict."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.chaos.killer import Kill, Killer
from tests.chaos.plan import GROUPS_PER_STEP, Deck, Plan
from tests.chaos.tokens import read_diary
from tests.chaos.verdict import Verdict, reach_verdict
from tests.chaos.world import World
from tests.e2e.site import AGENTS

_EPISODES = {"FAKE_TOKEN_DELAY_S": "0.06"}
"""Their rollouts have up to 90 tokens in place of 8: more slowly, most would be killed unfinished."""

_PREEMPTIONS = {
    "FAKE_TOKEN_DELAY_S": "0.2",
    "LEARNER_MAX_COMPLETION_LENGTH": "24",
    "ACTOR_MAX_NUM_SEQS": "24",  # all actors have work
    "ACTOR_GRACE_S": "10",  # they give back at once
    "RUN_LEASE_S": "15",  # a lease that runs out on a slow machine would cost tokens too
}


def run_chaos(
    folder: Path,
    plan: Plan,
    seed: int,
    *,
    lose_every: int = 0,
    preload: Path | None = None,
    environments: bool = False,
    agents: bool = False,
    preempt: bool = False,
) -> Verdict:
    """Run a plan in an empty folder, telling of every kill; must be called in the main thread.

    `lose_every` and `preload` are those of World. With `environments` the rollouts are conversations,
    with `agents` those of agents that call the actor's endpoint. With `preempt` actors are ended by
    SIGTERM, and no token that they sampled may be lost.
    """
    variables = {"LEARNER_EVAL_STEPS": "30"} | (_EPISODES if environments or agents else {})
    diary = folder / "diary.jsonl"
    variables |= _PREEMPTIONS | {"FAKE_DIARY": str(diary)} if preempt else {}
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

    killer = Killer(world, Deck(plan, seed), report, preempt)
    took_s = world.run(killer.run, plan.limit_s)
    say(f"{took_s:6.1f} s  the run has ended; judging it")
    verdict = reach_verdict(world, killer.kills, plan.floors, took_s)
    if preempt:
        tokens = read_diary(diary)
        say(f"tokens: {tokens}")
        if tokens.lost or not tokens.continued:
            verdict.faults.append(f"expected tokens that were continued, and none lost: {tokens}")
    return verdict


def say(text: str) -> None:
    """Progress goes beside the result."""
    print(text, file=sys.stderr, flush=True)
