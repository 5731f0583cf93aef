"""Groups, outcomes and a plan for the learner's tests; no model is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.common.broker.work_stream import Entry
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Claim, Position
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Group, Rollout, ScoredGroup, Ticket, Verdict, Version
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.data.order import Question, Shuffled
from penstock.learner.data.plan import Plan
from penstock.learner.data.tickets import TicketSource
from penstock.learner.state.checkpoint import Checkpoint, newest_checkpoint, newest_position
from penstock.learner.state.incarnations import claim_incarnation, next_incarnation
from tests.common.builders import make_span

CONTRACT = Contract("model", "hash", "float32", 40, (RewardSpec("accuracy"),), True, 2, 4)


def claim_next(folder: Path, checkpointed: Position | None = None, known: int = 0) -> Claim:
    """The claim of the learner that starts next; `known` is the incarnation that Redis knows."""
    number = next_incarnation(RunFolder(folder), known)
    return claim_incarnation(LearnerFolder(folder, number), checkpointed)


def newest_of_next(folder: Path) -> Checkpoint | None:
    """The checkpoint that the learner that starts next goes on from; claims the folder."""
    claim = claim_next(folder, newest_position(RunFolder(folder)))
    return newest_checkpoint(LearnerFolder(folder, claim.incarnation), claim)


def make_settings(**changes: object) -> LearnerSettings:
    base = {"num_generations": 2, "groups_per_step": 2, "max_staleness": 1, "max_completion_length": 8}
    return LearnerSettings(**(base | changes))


def make_plan(settings: LearnerSettings, steps: int = 3, eval_questions: int = 0) -> Plan:
    questions = [
        Question(np.array([3, 4 + n], dtype="<i4"), {"answer": str(n)}, f"sums.jsonl, row {n + 1}")
        for n in range(10)
    ]
    source = TicketSource(
        Shuffled([questions], [], settings.seed, shuffle=True),
        questions[:eval_questions],
        settings,
        CONTRACT.hash,
    )
    return Plan(Path("model"), 32, CONTRACT, source, steps, {"accuracy": 1.0})


def make_group(
    ticket: Ticket,
    spans: list[tuple[int, int]] | None = None,
    rewards: tuple = (1.0, 0.0),
    tokens: tuple[int, ...] | None = None,
    finish_reason: str = "stop",
    digest: str = "",
) -> ScoredGroup:
    """A group for a ticket; `spans` are (step, tokens) of each rollout, `digest` the weights' hash."""
    spans = spans or [(ticket.version.step, len(tokens) if tokens else 3)]
    edges = np.cumsum([0] + [tokens for _, tokens in spans])
    length = int(edges[-1])
    rollout = Rollout(
        token_ids=np.array(tokens or range(3, 3 + length), dtype="<i4"),
        logprobs=np.full(length, -1.0, dtype="<f4"),
        mask=np.ones(length, dtype="|b1"),
        spans=tuple(
            make_span(
                Version(ticket.version.incarnation, step), int(edges[i]), int(edges[i + 1]), digest
            )
            for i, (step, _) in enumerate(spans)
        ),
        finish_reason=finish_reason,
    )
    size = ticket.num_generations
    group = Group(ticket, (rollout,) * size, "actor")
    return ScoredGroup(group, {"accuracy": rewards}, ("x",) * size, "rewarder")


def make_outcome(
    plan: Plan, ticket: str, step: int = 0, position: int | None = None, **options: object
) -> Entry:
    """The entry of a scored group for a ticket sampled at a step."""
    made = plan.source.train(ticket, Version(1, step), position)
    return Entry(f"{ticket.partition(':')[2]}-1", ticket, encode(make_group(made, **options)))


def make_verdict(ticket: str, state: str = "filtered", reason: str = "no spread") -> Entry:
    verdict = Verdict(ticket, state, reason, {"accuracy": (0.0, 0.0)}, (3, 3))
    return Entry("9-9", ticket, encode(verdict))
