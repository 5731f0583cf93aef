"""Advantages against a slow version written as loops, and against hand-computed values."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from penstock.common.config.learner_settings import AdvantageEstimator, ScaleRewards
from penstock.common.reward_totals import total_rewards
from penstock.learner.algorithm.advantages import compute_advantages
from tests.learner import slow

NONE = np.nan


def ragged_totals(seed: int) -> list[np.ndarray]:
    """Groups of 1 to 6 rollouts, some without rewards."""
    generator = np.random.default_rng(seed)
    groups = [generator.normal(size=size) for size in (4, 1, 6, 3, 2)]
    for totals_G in groups:
        totals_G[generator.random(len(totals_G)) < 0.2] = NONE
    groups[3][1] = NONE
    return groups


@pytest.mark.parametrize("scale", get_args(ScaleRewards))
@pytest.mark.parametrize("estimator", get_args(AdvantageEstimator))
def test_each_estimator_and_scale_equals_the_slow_version(estimator, scale):
    for seed in range(20):
        totals = ragged_totals(seed)
        found = compute_advantages(totals, estimator, scale)
        expected = slow.advantages([group.tolist() for group in totals], estimator, scale)
        assert [len(row) for row in found] == [len(row) for row in expected]
        assert np.concatenate(found) == pytest.approx(np.concatenate(expected), rel=1e-9)


SPREAD = math.sqrt(14 / 3) + 1e-4
"""Of 3, 1, 2, 6, whose mean is 3."""


@pytest.mark.parametrize(
    ("estimator", "scale", "expected"),
    [
        ("grpo", "group", [1 / 1.0001, -1 / 1.0001, 0.0, 0.0, 0.0]),
        ("grpo", "batch", [1 / SPREAD, -1 / SPREAD, 0.0, 0.0, 0.0]),
        ("grpo", "none", [1.0, -1.0, 0.0, 0.0, 0.0]),
        ("rloo", "group", [1.5 / 1.0001, -1.5 / 1.0001, 0.0, 0.0, 0.0]),
        ("rloo", "none", [1.5, -1.5, 0.0, 0.0, 0.0]),
        ("reinforce_plus_plus", "group", [0.0, -2 / 1.0001, -1 / 1.0001, 0.0, 0.0]),
        ("reinforce_plus_plus", "batch", [0.0, -2 / SPREAD, -1 / SPREAD, 3 / SPREAD, 0.0]),
        ("reinforce_plus_plus", "none", [0.0, -2.0, -1.0, 3.0, 0.0]),
    ],
)
def test_advantages_of_two_groups_by_hand(estimator, scale, expected):
    totals = [np.array([3.0, 1.0, 2.0]), np.array([6.0, NONE])]
    found = compute_advantages(totals, estimator, scale)
    assert np.concatenate(found) == pytest.approx(expected, rel=1e-9)


def test_a_rollout_without_reward_gets_no_advantage_and_moves_no_other():
    (with_none,) = compute_advantages([np.array([3.0, 1.0, 2.0, NONE])], "grpo", "group")
    (without,) = compute_advantages([np.array([3.0, 1.0, 2.0])], "grpo", "group")
    assert with_none[3] == 0.0
    assert with_none[:3] == pytest.approx(without)


@pytest.mark.parametrize("scale", get_args(ScaleRewards))
@pytest.mark.parametrize("estimator", get_args(AdvantageEstimator))
def test_a_lone_reward_has_no_advantage(estimator, scale):
    totals = [np.array([1.0, NONE]), np.array([NONE, NONE])]
    found = compute_advantages(totals, estimator, scale)
    assert np.concatenate(found).tolist() == [0.0] * 4


def test_a_batch_without_groups_has_no_advantages():
    assert compute_advantages([], "reinforce_plus_plus", "batch") == []


def test_the_totals_are_left_as_they_were():
    totals = np.array([1, 0, 1])
    compute_advantages([totals], "rloo", "batch")
    assert totals.tolist() == [1, 0, 1]


def test_rewards_are_summed_with_their_weights():
    rewards = {"accuracy": (1.0, 0.0, 1.0), "format": (0.5, 1.0, None)}
    totals = total_rewards(rewards, {"accuracy": 1.0, "format": 2.0})
    assert totals.tolist() == [2.0, 2.0, 1.0]


def test_a_rollout_without_any_reward_has_no_total():
    totals = total_rewards({"accuracy": (1.0, None)}, {"accuracy": 1.0})
    assert totals[0] == 1.0
    assert np.isnan(totals[1])
