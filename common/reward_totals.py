"""The total reward of each of a group's G rollouts, for the rewarder's filter and for the learner."""

from collections.abc import Mapping, Sequence

import numpy as np

Rewards = Mapping[str, Sequence[float | None]]


def first_scored(rewards: Rewards) -> int:
    """Return the index of the first rollout that has a reward, 0 if none has."""
    rows = zip(*rewards.values(), strict=True)
    return next((index for index, row in enumerate(rows) if any(v is not None for v in row)), 0)


def total_rewards(rewards: Rewards, weights: Mapping[str, float]) -> np.ndarray:
    """Return each rollout's weighted sum of rewards, (G,) float64. None counts as 0; only None is NaN.

    Example:
        >>> rewards = {"accuracy": [1.0, None], "format": [1.0, None]}
        >>> total_rewards(rewards, {"accuracy": 1.0, "format": 0.5})
        array([1.5, nan])
    """
    table = np.array(list(rewards.values()), dtype=np.float64)  # None becomes NaN
    table *= np.array([[weights[name]] for name in rewards], dtype=np.float64)
    totals: np.ndarray = np.nansum(table, axis=0)
    totals[np.isnan(table).all(axis=0)] = np.nan
    return totals
