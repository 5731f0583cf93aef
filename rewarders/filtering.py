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
    """Return the reason why a group is not trained on; None if it is.

    At least two rollouts need a total. `totals_G` has one per rollout, see `group_totals`, NaN where
    no reward applies. With normalize_then_sum a total is a sum of normalized rewards. Example: 1.0, NaN
    and NaN have "no reward applies"; with `filter_zero_std` 1.0, 1.0 and NaN have "no spread".
    """
    present = totals_G[~np.isnan(totals_G)]
    if len(present) < 2:
        return NO_REWARD
    if filter_zero_std and np.ptp(present) < _SMALLEST_SPREAD:
        return NO_SPREAD
    return None
