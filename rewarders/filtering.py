"""Which groups carry no signal. Pure functions over rewards by name.

Dynamic sampling of DAPO (arXiv:2503.14476, section 3.2): a group whose rollouts all have the same
total has only zero advantages, so training on it costs a forward pass and teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NO_SPREAD = "no spread"
NO_REWARD = "no reward applies"

_SMALLEST_SPREAD = 1e-6
"""Totals that differ by less are equal: sums of weighted rewards carry rounding."""

Rewards = Mapping[str, Sequence[float | None]]


def total_rewards(rewards: Rewards, weights: Mapping[str, float]) -> list[float | None]:
    """Weighted sum over the rewards that apply, per rollout (G,); None where none applies.

    Example:
        >>> rewards = {"accuracy": [1.0, None], "format": [1.0, None]}
        >>> total_rewards(rewards, {"accuracy": 1.0, "format": 0.5})
        [1.5, None]
    """
    return [
        _total(dict(zip(rewards, values, strict=True)), weights)
        for values in zip(*rewards.values(), strict=True)
    ]


def why_filtered(totals: Sequence[float | None], filter_zero_std: bool) -> str | None:
    """Why a group with these totals (G,) cannot be trained on; None if it can."""
    present = [total for total in totals if total is not None]
    if len(present) < 2:
        return NO_REWARD
    if filter_zero_std and max(present) - min(present) < _SMALLEST_SPREAD:
        return NO_SPREAD
    return None


def _total(values: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    present = {name: value for name, value in values.items() if value is not None}
    if not present:
        return None
    return sum(weights[name] * value for name, value in present.items())
