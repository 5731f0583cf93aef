"""A tiny real policy in training, and the folder of its run."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.common.files.disk import Disk
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Version
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.policy.policy import Policy
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import retrain_tail
from penstock.learner.state.checkpoint import newest_checkpoint, newest_position, save_checkpoint
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from tests.learner.builders import claim_next, make_group, make_plan, make_settings, newest_of_next

SETTINGS = {"learning_rate": 1e-3, "micro_batch_tokens": 64, "adam_epsilon": 1e-4}
"""Sums in another order differ in their last bits. With Adam's own epsilon of 1e-8 its first step, which
divides gradients by their own size, would make differences of the step's size of them."""


def make_policy(folder: Path, **changes) -> Policy:
    return Policy(folder, make_settings(**(SETTINGS | changes)), steps=10)


def make_batch(step: int):
    plan = make_plan(make_settings())
    groups = [
        make_group(plan.source.train(TicketId(f"train:{n}"), Version(1, step)), spans=[(step, 2 + n)])
        for n in (2 * step, 2 * step + 1)
    ]
    return groups, build_batch(groups, plan.reward_weights, step, make_settings())


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Unchecked(LearnerFolder):
    """Does not notice that a later learner has claimed the folder."""

    def check_not_superseded(self):
        pass


class Run:
    """A run's folder with journaled steps, as a learner leaves it when it is killed.

    `policy` is what an uninterrupted run would have.
    """

    def __init__(self, folder: Path, model_folder: Path, segment_bytes: int = 64 << 20):
        self.folder, self.run_folder = folder, RunFolder(folder)
        self.plan = make_plan(make_settings(**SETTINGS))
        self.claim = claim_next(folder, newest_position(self.run_folder))
        self.journal = Journal(LearnerFolder(folder, self.claim.incarnation), segment_bytes)
        self.policy = make_policy(model_folder)
        self.ledger = Ledger()

    def step(self, step: int):
        groups, batch = make_batch(step)
        position = self.journal.append(
            "batch", step=step + 1, groups=[encode(group) for group in groups], ends={},
            ledger=self.ledger.snapshot(), metrics={},
            reward_weights=self.plan.reward_weights,
            settings=make_settings(**SETTINGS).model_dump(mode="json"),
        )  # fmt: skip
        self.policy.update(batch, step)
        return position

    def checkpoint(self, step: int, position, disk: Disk | None = None, checked: bool = True, **changes):
        """`checked` False: by a learner that is superseded right after its check."""
        settings = make_settings(**(SETTINGS | changes))
        kind = LearnerFolder if checked else Unchecked
        folder = kind(self.folder, self.claim.incarnation, disk)
        return save_checkpoint(folder, self.policy, step, position, self.ledger.snapshot(), settings)

    def newest_checkpoint(self):
        """What the learner that starts next finds."""
        return newest_of_next(self.folder)

    def resume(self, model_folder: Path):
        policy = make_policy(model_folder)
        claim = claim_next(self.folder, newest_position(self.run_folder))
        folder = LearnerFolder(self.folder, claim.incarnation)
        recorder = Recorder(folder, [], "x")
        checkpoint = newest_checkpoint(folder, claim)
        return retrain_tail(self.run_folder, claim, policy, Ledger(), recorder, checkpoint), policy
