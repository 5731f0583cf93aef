"""The total reward of each of a group's G rollouts, for the rewarder's filter and for the learner."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.common.wire.reward_spec import Aggregation

EPSILON = 1e-4
"""Term that is added to a standard deviation before a division, as in TRL."""

Rewards = Mapping[str, Sequence[float | None]]


def first_scored(rewards: Rewards) -> int:
    """Return the index of the first rollout of a group that has at least one reward, 0 if none has.

    `rewards` has by reward name one value per rollout; None: the rollout has no such reward.
    """
    rows = zip(*rewards.values(), strict=True)
    return next((index for index, row in enumerate(rows) if any(v is not None for v in row)), 0)


def total_rewards(rewards: Rewards, weights: Mapping[str, float]) -> np.ndarray:
    """Return each rollout's sum of its rewards times `weights`, which are by reward name; (G,) float64.

    `rewards` has by reward name one value for each of a group's G rollouts. At least one name is needed,
    and each needs a weight. None counts as 0. A rollout of which all rewards are None has NaN.
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


def group_totals(rewards: Rewards, weights: Mapping[str, float], aggregation: Aggregation) -> np.ndarray:
    """Return the totals (G,) from which advantages are computed; NaN for a rollout without any reward.

    `rewards` has by name one value per rollout, `weights` for each of these names the factor. With
    `aggregation` "sum_then_normalize" these are the `total_rewards`, with "normalize_then_sum" the
    rewards first go through `normalize_rewards`.
    """
    if aggregation == "normalize_then_sum":
        rewards = normalize_rewards(rewards)
    return total_rewards(rewards, weights)


def normalize_rewards(rewards: Rewards) -> dict[str, list[float | None]]:
    """Return each reward's values in its group as (value - mean) / (standard deviation + 1e-4).

    `rewards` has by name one value per rollout, and so has the new map. This is the first step of GDPO
    (arXiv:2601.05242): rewards of different size or spread then count alike. The standard deviation is
    unbiased. None stays None and counts in no mean. A reward that only one rollout has becomes 0.
    Example: values 0, 2 and None become -0.707, 0.707 and None, and so do 0, 200 and None.
    """
    return {name: _normalize(values) for name, values in rewards.items()}


def _normalize(values: Sequence[float | None]) -> list[float | None]:
    """Return (value - mean) / (standard deviation + 1e-4) of a group's values; None stays None.

    The standard deviation is unbiased, and 0 for a single value, which becomes 0.
    """
    present = [value for value in values if value is not None]
    mean = np.mean(present) if present else 0.0
    spread = np.std(present, ddof=1) if len(present) > 1 else 0.0
    return [None if value is None else float((value - mean) / (spread + EPSILON)) for value in values]
