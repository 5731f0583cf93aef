"""The gradients of one mini-batch, and an Update with NaN. As a script, for two ranks under torchrun:

torchrun --nproc-per-node=2 -m tests.learner.gradients MODEL OUT.pt

All cases of two ranks run in one group of processes, because most of the time is their start.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad

from penstock.learner.algorithm.batch import Batch, TrainSequence
from penstock.learner.policy.policy import Policy
from penstock.learner.policy.processes import rank, world_size
from tests.learner.builders import make_settings

CUTS_OF_TWO_RANKS = (
    {"zero_stage": "0"},
    {"zero_stage": "2", "micro_batch_tokens": 24},
    {"zero_stage": "3", "micro_batch_tokens": 24},
)
"""Settings under which two ranks compute the gradient."""

NAN_STAGES = ("0", "2", "3")
"""ZeRO stages under which one of two ranks gets NaN."""

LENGTHS = [(3, 2), (5, 9), (2, 1), (9, 17), (4, 6), (1, 12), (6, 3)]
"""Prompt and completion of each sequence: ragged, so that ranks and rows get unequal shares."""


def make_batch(temperature: float = 0.7) -> Batch:
    """Random sequences with random advantages, some tokens masked; every other one shares a prompt."""
    random = np.random.default_rng(7)
    sequences = [
        TrainSequence(
            prompt_ids=random.integers(3, 30, prompt).astype(np.int32),
            token_ids=random.integers(3, 30, length).astype(np.int32),
            behaviour=random.normal(-3.3, 0.1, length).astype(np.float32),
            mask=random.random(length) < 0.9,
            staleness=random.integers(0, 2, length),
            advantage=float(random.normal()),
            temperature=temperature,
        )
        for prompt, length in LENGTHS
    ]
    shared = [replace(one, prompt_ids=sequences[0].prompt_ids) for one in sequences[::2]]
    sequences[::2] = shared
    return Batch(tuple(sequences))


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The whole gradient of every trained parameter of the Hugging Face model."""
    batch = make_batch()
    (mini,) = policy._mini_batches(batch, 0)
    policy._gradients(batch, mini, policy._score_fixed(batch))
    found = {}
    for name, parameter in policy._engine.module.named_parameters():
        gradient = parameter.grad if policy._engine.stage == 0 else safe_get_full_grad(parameter)
        if gradient is not None:
            found[name] = gradient.detach().cpu().clone()
    return found


def weights_around_nan(policy: Policy) -> dict[str, torch.Tensor]:
    """Sums of all weights: before, after an Update that must be skipped, after a sound one."""

    def total() -> torch.Tensor:
        return torch.stack([p.detach().double().sum() for _, p in policy._engine.full_parameters()])

    first, *rest = make_batch().sequences
    bad = Batch((replace(first, advantage=float("nan"), mask=np.ones_like(first.mask)), *rest))
    found = {"before": total()}
    found["skipped"] = torch.tensor(policy.update(bad, 0).skipped)
    found["after NaN"] = total()
    policy.update(make_batch(), 1)
    return found | {"after a sound one": total()}


def make_policy(model: Path, settings: dict[str, object]) -> Policy:
    """A policy with the model's weights."""
    return Policy(model, make_settings(**settings), steps=10)


def main() -> None:
    model, out = map(Path, sys.argv[1:])
    cuts = {str(settings): gradients(make_policy(model, settings)) for settings in CUTS_OF_TWO_RANKS}
    nan = {}
    for stage in NAN_STAGES:
        policy = make_policy(model, {"zero_stage": stage, "learning_rate": 0.01})
        nan[stage] = weights_around_nan(policy)
    if rank() == 0:
        torch.save({"ranks": world_size(), "cuts": cuts, "nan": nan}, out)
    policy.close()


if __name__ == "__main__":
    main()
