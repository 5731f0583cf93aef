"""Advantages against hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from common.rewards import total_rewards
from learner.advantages import group_advantages


def test_rewards_are_summed_with_their_weights():
    rewards = {"accuracy": (1.0, 0.0, 1.0), "format": (0.5, 1.0, None)}
    totals = total_rewards(rewards, {"accuracy": 1.0, "format": 2.0})
    assert totals.tolist() == [2.0, 2.0, 1.0]


def test_a_rollout_without_any_reward_has_no_total():
    totals = total_rewards({"accuracy": (1.0, None)}, {"accuracy": 1.0})
    assert totals[0] == 1.0
    assert np.isnan(totals[1])


def test_advantages_use_the_unbiased_standard_deviation():
    advantages = group_advantages(np.array([3.0, 1.0, 2.0]))
    assert advantages == pytest.approx([1 / 1.0001, -1 / 1.0001, 0.0])


def test_a_rollout_without_reward_gets_no_advantage_and_moves_no_other():
    with_none = group_advantages(np.array([3.0, 1.0, 2.0, np.nan]))
    assert with_none[3] == 0.0
    assert with_none[:3] == pytest.approx(group_advantages(np.array([3.0, 1.0, 2.0])))


def test_a_group_with_one_reward_has_no_advantage():
    assert group_advantages(np.array([1.0, np.nan])).tolist() == [0.0, 0.0]
