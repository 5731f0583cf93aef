"""The optimizer and the course of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from common.learner_settings import LearnerSettings


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: LearnerSettings
) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained."""
    return torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def make_scheduler(optimizer: torch.optim.Optimizer, settings: LearnerSettings, steps: int) -> LambdaLR:
    """The schedule over a run of so many Updates; it advances once per optimizer step."""
    per_update = settings.num_iterations * settings.num_mini_batches
    warmup = settings.warmup_steps or math.ceil(settings.warmup_ratio * steps)
    floor = settings.min_lr / settings.learning_rate

    def factor(step: int) -> float:
        return learning_rate_factor(
            step, steps * per_update, warmup * per_update, settings.lr_scheduler_type, floor
        )

    return LambdaLR(optimizer, factor)


def learning_rate_factor(step: int, total: int, warmup: int, kind: str, floor: float) -> float:
    """Share of the peak learning rate at an optimizer step, counted from 0.

    Rises linearly from 0 over `warmup` steps, then stays (constant) or goes to `floor` at `total`
    along a line or half a cosine.

    Example:
        >>> [learning_rate_factor(step, 6, 2, "linear", 0.5) for step in range(7)]
        [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    if step < warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    passed = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1.0 - passed if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return floor + (1.0 - floor) * left
