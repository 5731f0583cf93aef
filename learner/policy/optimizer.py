"""The optimizer and the course of its learning rate."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from penstock.common.config.learner_settings import LearnerSettings


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: LearnerSettings
) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, fused=True, **adamw_options(settings, settings.learning_rate))


def adamw_options(settings: LearnerSettings, learning_rate: float) -> dict[str, Any]:
    """What AdamW's parameter groups hold.

    Given anew before each Update: a loaded checkpoint brings the values of the run that saved it.
    """
    return {
        "lr": learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }


def learning_rate(settings: LearnerSettings, step: int, steps: int) -> float:
    """Of the Update that follows `step`, in a run of `steps`; for all its optimizer steps alike.

    Rises linearly from 0 over the warm-up, then stays (constant) or goes to min_lr at the end along a
    line or half a cosine. No state: a resumed run has the rates that its settings ask for.

    Example:
        >>> linear = {"lr_scheduler_type": "linear", "warmup_steps": 2}
        >>> settings = LearnerSettings(learning_rate=1.0, min_lr=0.5, **linear)
        >>> [learning_rate(settings, step, 6) for step in range(7)]
        [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    warmup = settings.warmup_steps or math.ceil(settings.warmup_ratio * steps)
    if step < warmup:
        return settings.learning_rate * step / warmup
    if settings.lr_scheduler_type == "constant":
        return settings.learning_rate
    passed = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = settings.lr_scheduler_type == "cosine"
    left = 0.5 * (1.0 + math.cos(math.pi * passed)) if cosine else 1.0 - passed
    return settings.min_lr + (settings.learning_rate - settings.min_lr) * left
