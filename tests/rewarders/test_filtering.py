"""What makes a group worth training on."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.rewarders.filtering import NO_REWARD, NO_SPREAD, why_filtered

NONE = np.nan


def test_a_group_with_spread_is_kept() -> None:
    assert why_filtered(np.array([1.0, 0.0, NONE]), filter_zero_std=True) is None


@pytest.mark.parametrize("totals", [[1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [1.0, NONE, 1.0]])
def test_a_group_without_spread_is_filtered(totals: list[float]) -> None:
    assert why_filtered(np.array(totals), filter_zero_std=True) == NO_SPREAD


def test_a_group_without_spread_is_kept_when_filtering_is_off() -> None:
    assert why_filtered(np.array([1.0, 1.0]), filter_zero_std=False) is None


@pytest.mark.parametrize("totals", [[NONE, NONE], [1.0, NONE]])
@pytest.mark.parametrize("filter_zero_std", [True, False])
def test_one_total_alone_is_no_group(totals: list[float], filter_zero_std: bool) -> None:
    assert why_filtered(np.array(totals), filter_zero_std) == NO_REWARD
