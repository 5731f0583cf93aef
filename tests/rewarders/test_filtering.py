"""Totals and what makes a group worth training on."""

from __future__ import annotations

import pytest

from rewarders.filtering import NO_REWARD, NO_SPREAD, total_rewards, why_filtered


def test_a_total_is_the_weighted_sum() -> None:
    rewards = {"accuracy": [1.0, 0.0], "format": [1.0, 1.0]}
    assert total_rewards(rewards, {"accuracy": 2.0, "format": 0.5}) == [2.5, 0.5]


def test_rewards_that_do_not_apply_are_left_out() -> None:
    rewards = {"accuracy": [None, None, 1.0], "format": [1.0, None, None]}
    weights = {"accuracy": 2.0, "format": 0.5}
    assert total_rewards(rewards, weights) == [0.5, None, 2.0]


def test_a_group_with_spread_is_kept() -> None:
    assert why_filtered([1.0, 0.0, None], filter_zero_std=True) is None


@pytest.mark.parametrize("totals", [[1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [1.0, None, 1.0]])
def test_a_group_without_spread_is_filtered(totals: list[float | None]) -> None:
    assert why_filtered(totals, filter_zero_std=True) == NO_SPREAD


def test_a_group_without_spread_is_kept_when_filtering_is_off() -> None:
    assert why_filtered([1.0, 1.0], filter_zero_std=False) is None


@pytest.mark.parametrize("totals", [[None, None], [1.0, None]])
@pytest.mark.parametrize("filter_zero_std", [True, False])
def test_one_total_alone_is_no_group(totals: list[float | None], filter_zero_std: bool) -> None:
    assert why_filtered(totals, filter_zero_std) == NO_REWARD
