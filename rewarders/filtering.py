"""Which groups carry no signal. Pure functions over rewards by name.

Dynamic sampling of DAPO (arXiv:2503.14476, section 3.2): a group whose rollouts all have the same
total has only zero advantages, so training on it costs a forward pass and teaches nothing.
"""

import numpy as np

NO_SPREAD = "no spread"
NO_REWARD = "no reward applies"

_SMALLEST_SPREAD = 1e-6
"""Totals that differ by less are equal: sums of weighted rewards carry rounding."""


def why_filtered(totals_G: np.ndarray, filter_zero_std: bool) -> str | None:
    """Why a group with these totals (NaN: no reward applies) cannot be trained on; None if it can."""
    present = totals_G[~np.isnan(totals_G)]
    if len(present) < 2:
        return NO_REWARD
    if filter_zero_std and np.ptp(present) < _SMALLEST_SPREAD:
        return NO_SPREAD
    return None
