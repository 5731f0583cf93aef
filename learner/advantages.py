"""Totals to advantages: how much better a completion is than its group.

Dimensions: G rollouts of a group.
"""

from __future__ import annotations

import numpy as np

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""


def group_advantages(totals_G: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-4) within a group, with the unbiased standard deviation.

    GRPO, DeepSeekMath (arXiv:2402.03300), section 4.1.2. A rollout without any reward (NaN) gets 0,
    and so does every rollout of a group with fewer than two rewards.

    Example:
        >>> group_advantages(np.array([1.0, 0.0, 0.0, 1.0])).round(3)
        array([ 0.866, -0.866, -0.866,  0.866])
    """
    known = ~np.isnan(totals_G)
    if known.sum() < 2:
        return np.zeros_like(totals_G)
    mean, std = totals_G[known].mean(), totals_G[known].std(ddof=1)
    return np.where(known, (totals_G - mean) / (std + EPSILON), 0.0)
