"""The loss against a slow version written as loops, and against hand-computed values."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch

from penstock.common.config.learner_settings import (
    CorrectionLevel,
    CorrectionMode,
    KLEstimator,
    LearnerSettings,
    LossType,
)
from penstock.learner.algorithm.advantages import compute_advantages
from penstock.learner.algorithm.loss import LossOptions, LossTokens, aggregation_weights, policy_loss
from tests.learner import slow

LOSS_TYPES, ESTIMATORS = get_args(LossType), get_args(KLEstimator)
FORMS = pytest.mark.parametrize("decoupled", [False, True], ids=["direct", "decoupled"])
CORRECTIONS = [("off", "truncate")] + [
    (level, mode) for level in get_args(CorrectionLevel)[1:] for mode in get_args(CorrectionMode)
]
PLAIN = LossOptions(
    loss_type="dapo", importance_sampling_level="token", epsilon=0.2, epsilon_high=0.28, delta=0.0,
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, off_policy_mask_threshold=0.0,
    entropy_coef=0.0, beta=0.0, kl_estimator="k3", use_bias_correction_kl=False,
    importance_sampling_correction="off", importance_sampling_mode="truncate",
    importance_sampling_min=0.8, importance_sampling_cap=1.3, decoupled_loss=False,
)  # fmt: skip
LENGTHS = (6, 1, 9, 4, 5, 1, 7)
LIMIT = 10
TOTALS = ([1.5, 2.5, 0.0, np.nan], [0.5, -1.0, 3.0])
FLOATS = ("logprobs_N", "entropy_N", "old_N", "behaviour_N", "reference_N", "advantages_N", "weight_N")


def ragged_row(seed: int, loss_type: LossType = "dapo") -> LossTokens:
    """Two groups of unequal size, a rollout without reward, lengths from 1, masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)

    def noise(size: float) -> torch.Tensor:
        return torch.randn(len(sequence), generator=generator, dtype=torch.float64) * size

    advantages = compute_advantages([np.array(totals) for totals in TOTALS], "grpo", "group")
    mask = (torch.rand(len(sequence), generator=generator) < 0.85) & (sequence != 3)
    trained = np.bincount(sequence[mask], minlength=len(LENGTHS))
    weight = aggregation_weights(
        trained, loss_type=loss_type, batch_tokens=2 * int(mask.sum()) + 5, mini_batches=2,
        max_completion_length=LIMIT,
    )  # fmt: skip
    logprobs = -noise(1.0).abs()
    old = logprobs + noise(0.3)
    return LossTokens(
        logprobs_N=logprobs,
        entropy_N=logprobs.exp() * 2,
        old_N=old,
        behaviour_N=old + noise(0.3),
        reference_N=logprobs + noise(0.5),
        advantages_N=torch.tensor(np.concatenate(advantages))[sequence],
        weight_N=torch.tensor(weight)[sequence],
        mask_N=mask,
        sequence_N=sequence,
        sequences=len(LENGTHS),
    )


def prepared(seed: int, options: LossOptions) -> LossTokens:
    """A row for these options: in the direct form the ratio is taken against behaviour."""
    row = ragged_row(seed, options.loss_type)
    return row if options.decoupled_loss else replace(row, old_N=row.behaviour_N)


def at(row: LossTokens, logprobs: torch.Tensor) -> LossTokens:
    """The row with other log-probabilities; the entropy depends on them, so it has a gradient."""
    return replace(row, logprobs_N=logprobs, entropy_N=logprobs.exp() * 2)


def assert_equals_slow(options: LossOptions, seed: int) -> None:
    row = prepared(seed, options)
    value, gradient = slow.gradient(
        lambda logprobs: policy_loss(at(row, logprobs), options).loss, row.logprobs_N
    )
    expected, slow_gradient = slow.gradient(
        lambda logprobs: slow.loss(at(row, logprobs), options), row.logprobs_N
    )
    assert value == pytest.approx(expected, rel=1e-9)
    assert torch.allclose(gradient, slow_gradient, rtol=1e-9, atol=1e-13)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_loss_and_its_gradient_equal_the_slow_version(loss_type, seed):
    assert_equals_slow(replace(PLAIN, loss_type=loss_type), seed)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_kl_estimator_and_its_gradient_equal_the_slow_version(estimator):
    for seed in range(4):
        assert_equals_slow(replace(PLAIN, beta=0.3, kl_estimator=estimator), seed)
        row = prepared(seed, PLAIN)
        found = policy_loss(row, replace(PLAIN, kl_estimator=estimator)).kl_N
        for place in range(len(found)):
            expected = slow.kl(row.logprobs_N[place], row.reference_N[place], estimator)
            assert found[place].item() == pytest.approx(expected.item() * row.mask_N[place].item())


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "gspo"])
def test_the_dual_clip_equals_the_slow_version(loss_type):
    options = replace(PLAIN, loss_type=loss_type, delta=1.3)
    moved = 0
    for seed in range(6):
        assert_equals_slow(options, seed)
        row = prepared(seed, options)
        unbounded = policy_loss(row, replace(options, delta=0.0)).loss
        moved += policy_loss(row, options).loss.item() != unbounded.item()
    assert moved, "the cases must reach delta"


def test_the_entropy_bonus_equals_the_slow_version():
    for seed in range(4):
        assert_equals_slow(replace(PLAIN, entropy_coef=0.1), seed)


@FORMS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_whole_loss_equals_the_slow_version(loss_type, decoupled):
    for number, (level, mode) in enumerate(CORRECTIONS):
        options = replace(
            PLAIN, loss_type=loss_type, decoupled_loss=decoupled,
            importance_sampling_correction=level, importance_sampling_mode=mode,
            delta=1.35 if number % 2 else 0.0, entropy_coef=0.05, beta=0.2,
            kl_estimator=ESTIMATORS[number % 3],
        )  # fmt: skip
        assert_equals_slow(options, seed=number)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "sapo"])
def test_the_cases_reach_the_clips(loss_type):
    """Otherwise the comparisons above prove little."""
    low = high = bounded = 0
    for seed in range(6):
        options = replace(PLAIN, loss_type=loss_type, importance_sampling_correction="token")
        terms = policy_loss(prepared(seed, options), options)
        low += int(terms.clipped_low_N.sum())
        high += int(terms.clipped_high_N.sum())
        bounded += int(terms.bounded_N.sum())
    assert (low > 0) == (loss_type != "cispo")
    assert high > 0
    assert bounded > 0


SURROGATES_BY_HAND = [  # at pi = ratio / 2, mu = 1 / 2: what the objective is, and its derivative
    ("dapo", 1.25, 1.0, 1.25, 1.25),  # between 1 + epsilon and 1 + epsilon_high
    ("dapo", 1.40, 1.0, 1.28, 0.0),
    ("dapo", 0.70, 1.0, 0.70, 0.70),
    ("dapo", 0.70, -2.0, -1.60, 0.0),
    ("dapo", 1.40, -2.0, -2.80, -2.80),
    ("dapo", 1.90, -2.0, -3.00, 0.0),  # beyond delta
    ("gspo", 1.40, 1.0, 1.28, 0.0),
    ("gspo", 0.90, -2.0, -1.80, -1.80),
    ("cispo", 1.40, 1.0, 1.28 * math.log(0.7), 1.28),
    ("cispo", 0.70, -2.0, -1.40 * math.log(0.35), -1.40),
    ("sapo", 1.00, 1.0, 2.0, 1.0),
    ("sapo", 2.00, 1.0, 4 / (1 + math.exp(-1)), 8 * math.exp(-1) / (1 + math.exp(-1)) ** 2),
    ("dppo", 1.40, 1.0, 1.40, 1.40),  # the probability moved by 0.2
    ("dppo", 1.60, 1.0, 0.0, 0.0),  # by 0.3
    ("dppo", 1.60, -2.0, -3.20, -3.20),
    ("dppo", 0.50, -2.0, 0.0, 0.0),
    ("dppo", 0.50, 1.0, 0.50, 0.50),
]


@pytest.mark.parametrize(("loss_type", "ratio", "advantage", "value", "slope"), SURROGATES_BY_HAND)
def test_objectives_of_one_token_by_hand(loss_type, ratio, advantage, value, slope):
    options = replace(PLAIN, loss_type=loss_type, delta=1.5)
    row = one_sequence([math.log(0.5 * ratio)], [math.log(0.5)], advantage)
    loss, gradient = slow.gradient(
        lambda logprobs: policy_loss(replace(row, logprobs_N=logprobs), options).loss, row.logprobs_N
    )
    assert -loss == pytest.approx(value, rel=1e-12)
    assert -gradient.item() == pytest.approx(slope, rel=1e-12)


def one_sequence(
    logprobs: list[float], behaviour: list[float], advantage: float, dtype: torch.dtype = torch.float64
) -> LossTokens:
    size = len(logprobs)
    mu = torch.tensor(behaviour, dtype=dtype)
    return LossTokens(
        logprobs_N=torch.tensor(logprobs, dtype=dtype), entropy_N=torch.zeros(size, dtype=dtype),
        old_N=mu, behaviour_N=mu, reference_N=None,
        advantages_N=torch.full((size,), advantage, dtype=dtype),
        weight_N=torch.full((size,), 1 / size, dtype=dtype),
        mask_N=torch.ones(size, dtype=torch.bool), sequence_N=torch.zeros(size, dtype=torch.long),
        sequences=1,
    )  # fmt: skip


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_clipped_tokens_are_those_whose_own_bound_binds(loss_type):
    """pi / mu = 0.5 and 1.5 at mu = 0.6; gspo sees their geometric mean, which is within."""
    logprobs, behaviour = [math.log(0.3), math.log(0.9)], [math.log(0.6)] * 2
    options = replace(PLAIN, loss_type=loss_type)
    up = policy_loss(one_sequence(logprobs, behaviour, 1.0), options)
    down = policy_loss(one_sequence(logprobs, behaviour, -1.0), options)
    assert up.clipped_low_N.tolist() == [False, False]
    assert up.clipped_high_N.tolist() == [False, loss_type not in ("gspo", "sapo")]
    assert down.clipped_low_N.tolist() == [loss_type not in ("gspo", "cispo", "sapo"), False]
    assert down.clipped_high_N.tolist() == [False, False]
    mean = math.sqrt(0.75)
    expected = [mean, mean] if loss_type == "gspo" else [0.5, 1.5]
    assert up.ratio_N.tolist() == pytest.approx(expected)


def test_the_region_of_dppo_lies_around_the_policy_that_sampled():
    """Decoupled, a token below behaviour but above proximal may still rise."""
    row = replace(
        one_sequence([math.log(0.4)], [math.log(0.8)], 1.0),
        old_N=torch.tensor([math.log(0.1)], dtype=torch.float64),
    )
    terms = policy_loss(row, replace(PLAIN, loss_type="dppo", decoupled_loss=True))
    assert not terms.clipped_high_N.any()
    assert -terms.loss.item() == pytest.approx(0.4 / 0.1)


def test_grpo_is_dapo_with_equal_bounds_and_sequences_of_one_length():
    equal = replace(PLAIN, epsilon_high=PLAIN.epsilon)
    higher = 0
    for seed in range(6):
        grpo, dapo = (of_one_length(seed, loss_type) for loss_type in ("grpo", "dapo"))
        expected = policy_loss(dapo, equal).loss.item()
        found = policy_loss(grpo, replace(equal, loss_type="grpo")).loss.item()
        assert found == pytest.approx(expected, rel=1e-12)
        higher += policy_loss(dapo, PLAIN).loss.item() != expected
    assert higher, "the cases must reach the upper bound"


def of_one_length(seed: int, loss_type: LossType) -> LossTokens:
    """A row that trains the first four tokens of its three longest sequences."""
    row = ragged_row(seed)
    first = torch.cat([torch.arange(length) < 4 for length in LENGTHS])
    (weight, *_) = aggregation_weights(
        np.array([4, 4, 4]), loss_type=loss_type, batch_tokens=12, mini_batches=1,
        max_completion_length=LIMIT,
    )  # fmt: skip
    return replace(
        row,
        mask_N=first & torch.isin(row.sequence_N, torch.tensor([0, 2, 6])),
        weight_N=torch.full_like(row.weight_N, weight),
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_aggregation_weights_equal_the_slow_version(loss_type):
    for lengths in ([3, 1, 0, 8], [5], [0, 0], [2, 2, 2]):
        sizes = {"batch_tokens": sum(lengths) + 20, "mini_batches": 3, "max_completion_length": 9}
        found = aggregation_weights(np.array(lengths), loss_type=loss_type, **sizes)
        expected = slow.weights(lengths, loss_type, *sizes.values())
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_of_nothing_weighs_nothing(loss_type):
    found = aggregation_weights(
        np.array([0, 0]), loss_type=loss_type, batch_tokens=0, mini_batches=1, max_completion_length=9
    )
    assert found.tolist() == [0.0, 0.0]


def test_dapo_weighs_a_token_alike_in_every_mini_batch_and_bnpo_does_not():
    batch = [np.array([4, 2]), np.array([9, 1])]

    def weights(loss_type: LossType) -> list[np.ndarray]:
        return [
            aggregation_weights(
                lengths, loss_type=loss_type, batch_tokens=16, mini_batches=2, max_completion_length=9
            )
            for lengths in batch
        ]

    assert np.concatenate(weights("dapo")).tolist() == [1 / 8] * 4
    assert np.concatenate(weights("bnpo")).tolist() == [1 / 6] * 2 + [1 / 10] * 2


@FORMS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up_to_the_mini_batch(loss_type, decoupled):
    options = replace(
        PLAIN, loss_type=loss_type, decoupled_loss=decoupled,
        importance_sampling_correction="sequence", beta=0.1, entropy_coef=0.1,
    )  # fmt: skip
    row = prepared(3, options)
    whole, gradient = slow.gradient(lambda x: policy_loss(at(row, x), options).loss, row.logprobs_N)
    parts, gradients = 0.0, []
    for first, last in ((0, 3), (3, 4), (4, 7)):
        piece = cut(row, first, last)
        value, piece_gradient = slow.gradient(
            lambda x, piece=piece: policy_loss(at(piece, x), options).loss, piece.logprobs_N
        )
        parts += value
        gradients.append(piece_gradient)
    assert parts == pytest.approx(whole, rel=1e-12)
    assert torch.allclose(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15)


def cut(row: LossTokens, first: int, last: int) -> LossTokens:
    """The sequences from `first` to before `last`."""
    keep = (row.sequence_N >= first) & (row.sequence_N < last)
    values = {name: getattr(row, name)[keep] for name in (*FLOATS, "mask_N")}
    return LossTokens(**values, sequence_N=row.sequence_N[keep] - first, sequences=last - first)


@FORMS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_tokens_change_nothing(loss_type, decoupled):
    """Not even NaN or infinity there: neither the loss, nor the gradient, nor the metrics."""
    for (level, mode), estimator in product(CORRECTIONS, ESTIMATORS):
        options = replace(
            PLAIN, loss_type=loss_type, decoupled_loss=decoupled,
            importance_sampling_correction=level, importance_sampling_mode=mode,
            beta=0.1, entropy_coef=0.1, delta=1.35, kl_estimator=estimator,
        )  # fmt: skip
        row = prepared(2, options)
        clean = with_gradients(row, options)
        for junk in (math.nan, math.inf, -math.inf):
            dirty = {name: torch.where(row.mask_N, getattr(row, name), junk) for name in FLOATS}
            found = with_gradients(replace(row, **dirty), options)
            assert all(torch.equal(one, other) for one, other in zip(found, clean, strict=True))
            assert (found[1][~row.mask_N] == 0).all()
            assert (found[2][~row.mask_N] == 0).all()


def with_gradients(row: LossTokens, options: LossOptions) -> list[torch.Tensor]:
    """The loss, its gradients by logprobs and entropy, and the values of the trained tokens."""
    logprobs, entropy = row.logprobs_N.clone().requires_grad_(), row.entropy_N.clone().requires_grad_()
    terms = policy_loss(replace(row, logprobs_N=logprobs, entropy_N=entropy), options)
    terms.loss.backward()
    return [
        terms.loss.detach(), logprobs.grad, entropy.grad, terms.clipped_low_N, terms.clipped_high_N,
        terms.kl_N, terms.bounded_N, terms.ratio_N,
    ]  # fmt: skip


def gradient_of(row: LossTokens, options: LossOptions) -> tuple[float, torch.Tensor]:
    return slow.gradient(lambda logprobs: policy_loss(at(row, logprobs), options).loss, row.logprobs_N)


@FORMS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_hopeless_probabilities_give_finite_gradients(loss_type, decoupled):
    """exp overflows to inf; a clamp hides that forwards, but its gradient would be 0 x inf."""
    for (level, mode), size, advantage in product(CORRECTIONS, (1e4, 85.0, -85.0, -1e4), (1.0, -1.0)):
        options = replace(
            PLAIN, loss_type=loss_type, decoupled_loss=decoupled,
            importance_sampling_correction=level, importance_sampling_mode=mode,
            beta=0.1, entropy_coef=0.1,
        )  # fmt: skip
        logprobs, other = [min(size, 0.0), -1.0], [min(-size, 0.0), -1.0]
        row = one_sequence(logprobs, other, advantage, torch.float32)
        row = replace(row, reference_N=row.old_N, behaviour_N=row.behaviour_N.roll(int(decoupled)))
        value, gradient = gradient_of(row, options)
        assert math.isfinite(value), (level, mode, size, advantage)
        assert torch.isfinite(gradient).all(), (level, mode, size, advantage)


def test_nan_at_a_trained_token_is_not_hidden():
    row = prepared(0, PLAIN)
    broken = torch.where(torch.arange(len(row.mask_N)) == row.mask_N.int().argmax(), math.nan, 0.0)
    for loss_type, (level, mode) in product(LOSS_TYPES, CORRECTIONS):
        options = replace(
            PLAIN,
            loss_type=loss_type,
            importance_sampling_correction=level,
            importance_sampling_mode=mode,
        )
        assert policy_loss(replace(row, logprobs_N=row.logprobs_N + broken), options).loss.isnan()


def test_without_a_reference_there_is_no_kl():
    row = replace(prepared(0, PLAIN), reference_N=None)
    terms = policy_loss(row, PLAIN)
    assert (terms.kl_N == 0).all()


def test_only_the_loss_has_a_gradient():
    row = prepared(0, PLAIN)
    for loss_type in LOSS_TYPES:
        options = replace(PLAIN, loss_type=loss_type, importance_sampling_correction="token", beta=0.1)
        terms = policy_loss(at(row, row.logprobs_N.clone().requires_grad_()), options)
        assert terms.loss.requires_grad
        for name in ("ratio_N", "clipped_low_N", "clipped_high_N", "kl_N", "bounded_N"):
            assert not getattr(terms, name).requires_grad


def test_options_are_those_of_the_settings():
    settings = LearnerSettings(
        loss_type="gspo", epsilon=0.1, epsilon_high=0.3, delta=4.0, entropy_coef=0.01, beta=0.02,
        kl_estimator="k2", importance_sampling_correction="geometric", importance_sampling_mode="mask",
        importance_sampling_min=0.9, importance_sampling_cap=1.1, decoupled_loss=True,
        off_policy_mask_threshold=0.5, use_bias_correction_kl=True, importance_sampling_level="sequence",
    )  # fmt: skip
    assert LossOptions.from_settings(settings) == LossOptions(
        "gspo",
        "sequence",
        0.1,
        0.3,
        4.0,
        1.0,
        1.05,
        0.5,
        0.01,
        0.02,
        "k2",
        True,
        "geometric",
        "mask",
        0.9,
        1.1,
        True,
    )
