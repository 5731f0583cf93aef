"""The bound on the importance ratio against a slow version written as loops."""

from __future__ import annotations

import math
from itertools import product
from typing import get_args

import pytest
import torch

from penstock.common.config.learner_settings import CorrectionLevel, CorrectionMode
from penstock.learner.algorithm.correction import correct
from tests.learner import slow

LENGTHS = (5, 1, 8, 4, 3)
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
LEVELS, MODES = get_args(CorrectionLevel), get_args(CorrectionMode)
BOUNDS = {"lower": 0.8, "upper": 1.3}
EXTREMES = (1e4, -1e4, 90.0, -90.0, 0.0)


def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios, and a mask that leaves out some tokens and one whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(len(SEQUENCE), generator=generator, dtype=torch.float64) * 0.5
    mask = (torch.rand(len(SEQUENCE), generator=generator) < 0.8) & (SEQUENCE != 3)
    return log_ratio, mask


def corrected(log_ratio, mask, level, mode, weight, **bounds):
    return correct(
        log_ratio, SEQUENCE[: len(mask)], mask, len(LENGTHS), level=level, mode=mode, weight=weight,
        **(bounds or BOUNDS),
    )  # fmt: skip


@pytest.mark.parametrize("weight", [True, False], ids=["decoupled", "direct"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_each_level_and_mode_equals_the_slow_version(level, mode, weight):
    bounded = 0
    for seed in range(10):
        log_ratio, mask = ragged(seed)
        found = corrected(log_ratio, mask, level, mode, weight)
        for place in range(len(mask)):
            if not mask[place]:
                assert not found.bounded_N[place]
                continue
            mates = [i for i in range(len(mask)) if mask[i] and SEQUENCE[i] == SEQUENCE[place]]
            expected = slow.factor(
                [math.exp(log_ratio[i]) for i in mates], mates.index(place), level, mode,
                BOUNDS["lower"], BOUNDS["upper"], weight,
            )  # fmt: skip
            assert found.factor_N[place].item() == pytest.approx(expected[0], rel=1e-9)
            assert found.bounded_N[place].item() == expected[1]
            bounded += expected[1]
    assert bool(bounded) == (level != "off"), "the cases must reach the bounds"


@pytest.mark.parametrize(
    ("level", "mode", "weight", "expected"),
    [
        ("token", "truncate", True, [3.0, 0.5, 2.0]),
        ("token", "clip", True, [3.0, 0.6, 2.0]),
        ("token", "mask", True, [0.0, 0.0, 2.0]),
        ("token", "truncate", False, [3.0 / 4.0, 1.0, 1.0]),
        ("token", "clip", False, [3.0 / 4.0, 0.6 / 0.5, 1.0]),
        ("token", "mask", False, [0.0, 0.0, 1.0]),
        ("sequence", "truncate", True, [3.0] * 3),  # the product is 4
        ("sequence", "mask", True, [0.0] * 3),
        ("geometric", "truncate", True, [4 ** (1 / 3)] * 3),
        ("geometric", "mask", False, [1.0] * 3),
    ],
)
def test_factors_of_one_sequence_by_hand(level, mode, weight, expected):
    log_ratio = torch.tensor([4.0, 0.5, 2.0], dtype=torch.float64).log()
    found = corrected(
        log_ratio, torch.ones(3, dtype=torch.bool), level, mode, weight, lower=0.6, upper=3.0
    )
    assert found.factor_N.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_the_direct_factor_leaves_a_bounded_ratio(level, mode):
    for seed in range(10):
        log_ratio, mask = ragged(seed)
        direct = corrected(log_ratio, mask, level, mode, weight=False).factor_N[mask]
        if mode == "truncate":
            assert direct.max() <= 1.0
        if mode == "mask":
            assert set(direct.tolist()) <= {0.0, 1.0}
        if level == "token":
            left = direct * log_ratio[mask].exp()
            assert left.max() <= BOUNDS["upper"] + 1e-12
            assert mode != "clip" or left.min() >= BOUNDS["lower"] - 1e-12


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_beyond_all_bounds_give_finite_factors(level):
    for mode, weight, size in product(MODES, (True, False), EXTREMES):
        found = corrected(torch.full((18,), size), torch.ones(18, dtype=torch.bool), level, mode, weight)
        assert torch.isfinite(found.factor_N).all(), (mode, weight, size)
        assert (found.factor_N >= 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_what_stands_at_masked_tokens_changes_nothing(level):
    log_ratio, mask = ragged(0)
    for junk in (math.nan, math.inf, -math.inf, 7.0):
        dirty = torch.where(mask, log_ratio, junk)
        for mode, weight in product(MODES, (True, False)):
            clean = corrected(log_ratio, mask, level, mode, weight)
            found = corrected(dirty, mask, level, mode, weight)
            assert torch.equal(found.factor_N[mask], clean.factor_N[mask])
            assert torch.equal(found.bounded_N, clean.bounded_N)
            assert level == "off" or torch.isfinite(found.factor_N).all()


def test_factors_have_no_gradient():
    log_ratio, mask = ragged(0)
    for level in LEVELS:
        found = corrected(log_ratio.requires_grad_(), mask, level, "truncate", weight=True)
        assert not found.factor_N.requires_grad
