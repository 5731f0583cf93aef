"""Advantages from totals: how much better a completion scored than the expected total.

Dimensions: G rollouts of a group, K rollouts of the batch that have a reward.
"""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.common.config.learner_settings import AdvantageEstimator, ScaleRewards
from penstock.common.reward_totals import EPSILON


def compute_advantages(
    totals: Sequence[np.ndarray], estimator: AdvantageEstimator, scale: ScaleRewards
) -> list[np.ndarray]:
    """Return the advantages of a batch: for each group a new array (G,) of float64, in the same order.

    `totals` has for each group the total reward of each rollout (G,), NaN for a rollout without reward.
    An advantage is (total - baseline) / scale. `estimator` names the baseline: `grpo` the mean of the
    group (arXiv:2402.03300, section 4.1.2), `rloo` the mean of the group's other rollouts
    (arXiv:2402.14740), `reinforce_plus_plus` the mean of the batch (arXiv:2501.03262). `scale` is the
    standard deviation (unbiased, plus 1e-4) of `group` or `batch`, or 1 for `none`; `grpo` with `none`
    is Dr. GRPO (arXiv:2503.20783).
    A NaN gets 0 and counts in no mean or standard deviation. All rollouts of a group get 0 if baseline
    or scale is the group's and the group has fewer than two totals that are not NaN. If both are the
    batch's (`none` counts as such), all get 0 if the whole batch has fewer than two.
    Example:
        >>> compute_advantages([np.array([1.0, 0.0, 0.0, 1.0])], "grpo", "group")[0].round(3)
        array([ 0.866, -0.866, -0.866,  0.866])
        >>> compute_advantages([np.array([1.0, 0.0, np.nan])], "grpo", "none")[0]
        array([ 0.5, -0.5,  0. ])
    """
    groups = [np.asarray(totals_G, dtype=np.float64) for totals_G in totals]
    batch_K = _without_missing(np.concatenate([np.empty(0), *groups]))
    of_batch = estimator == "reinforce_plus_plus" and scale != "group"

    def advantages(totals_G: np.ndarray) -> np.ndarray:
        """Return (total - baseline) / scale for each total reward of a group, a new (G,); 0 for a NaN.

        `estimator` and `scale` of compute_advantages select baseline and scale. All are 0 if fewer than
        2 totals are not NaN: of the whole batch if baseline and scale are not the group's, else of
        `totals_G`.
        """
        group_K = _without_missing(totals_G)
        if len(batch_K if of_batch else group_K) < 2:
            return np.zeros_like(totals_G)
        spread = _SCALES[scale](group_K, batch_K)
        centred_G = totals_G - _BASELINES[estimator](totals_G, group_K, batch_K)
        return np.where(np.isnan(totals_G), 0.0, centred_G / spread)

    return [advantages(totals_G) for totals_G in groups]


def _without_missing(totals: np.ndarray) -> np.ndarray:
    """Return a new array of the values in `totals` (one dimension) that are not NaN, in their order."""
    present: np.ndarray = totals[~np.isnan(totals)]
    return present


_BASELINES: dict[AdvantageEstimator, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": lambda totals_G, group_K, batch_K: group_K.mean(),
    "rloo": lambda totals_G, group_K, batch_K: (group_K.sum() - totals_G) / (len(group_K) - 1),
    "reinforce_plus_plus": lambda totals_G, group_K, batch_K: batch_K.mean(),
}
_SCALES: dict[ScaleRewards, Callable[[np.ndarray, np.ndarray], float]] = {
    "group": lambda group_K, batch_K: group_K.std(ddof=1) + EPSILON,
    "batch": lambda group_K, batch_K: batch_K.std(ddof=1) + EPSILON,
    "none": lambda group_K, batch_K: 1.0,
}
