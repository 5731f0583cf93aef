"""The optimizer and the schedule of its learning rate."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from penstock.common.config.learner_settings import LearnerSettings


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: LearnerSettings
) -> torch.optim.AdamW:
    """Return a new AdamW over those of the parameters that require a gradient.

    Its options are the settings learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, fused=True, **adamw_options(settings, settings.learning_rate))


def adamw_options(settings: LearnerSettings, learning_rate: float) -> dict[str, Any]:
    """Return AdamW's options: lr is `learning_rate`; betas, eps and weight_decay are the settings'.

    The policy sets them before each Update: a checkpoint restores the options of the run that saved it.
    """
    return {
        "lr": learning_rate, "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon, "weight_decay": settings.weight_decay,
    }  # fmt: skip


def learning_rate(settings: LearnerSettings, step: int, steps: int) -> float:
    """Return the learning rate of all optimizer steps of the Update after `step` Updates of `steps`.

    The rate rises linearly from 0 over the warm-up: warmup_steps, or if 0 warmup_ratio x `steps`. Then
    it stays ("constant"), or falls to min_lr at `steps` along a line ("linear") or half a "cosine".
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
