"""The filter of groups without a training signal. Pure.

Dynamic sampling of DAPO (arXiv:2503.14476, section 3.2): a group whose rollouts all have the same
total has only zero advantages, so training on the group changes nothing.
"""

import numpy as np

NO_SPREAD = "no spread"
NO_REWARD = "no reward applies"

_SMALLEST_SPREAD = 1e-6
"""Totals that differ by less count as equal, because weighted sums have rounding errors."""


def why_filtered(totals_G: np.ndarray, filter_zero_std: bool) -> str | None:
    """Return the reason why a group is not trained on; None for a group to train on.

    `totals_G` (G,) has the total reward of each rollout, NaN where no reward applies. With fewer than
    two totals the reason is "no reward applies": 1.0, NaN, NaN. With `filter_zero_std`, totals that
    differ by less than 1e-6 have the reason "no spread": 1.0, 1.0, NaN.
    """
    present = totals_G[~np.isnan(totals_G)]
    if len(present) < 2:
        return NO_REWARD
    if filter_zero_std and np.ptp(present) < _SMALLEST_SPREAD:
        return NO_SPREAD
    return None
