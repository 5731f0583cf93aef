"""The loss as a pure function of flat vectors.

Dimensions: N completion tokens of a packed row, S sequences. There is no padding; a token that must not
be trained is masked. docs/losses.md lists each option with its formula, paper and test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.common.config.learner_settings import (
    CorrectionLevel,
    CorrectionMode,
    KLEstimator,
    LearnerSettings,
    LossType,
    RatioLevel,
)
from penstock.learner.algorithm.correction import Correction, correct, reduce_per_sequence, safe_exp
from penstock.learner.algorithm.own_loss import OwnLoss, load_loss


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The completion tokens of a packed row; `_N`: (N,). Log-probabilities: nats, after temperature."""

    logprobs_N: Tensor  # under the policy in training, with gradient
    entropy_N: Tensor  # of the policy in training; with gradient if entropy_coef is not 0
    old_N: Tensor  # log-probabilities that the ratio divides by: behaviour, or if decoupled proximal
    behaviour_N: Tensor  # log-probabilities under the policy that sampled the tokens
    reference_N: Tensor | None  # log-probabilities under the reference policy; None without KL term
    advantages_N: Tensor
    weight_N: Tensor  # see `aggregation_weights`
    mask_N: Tensor  # bool: whether the token is trained
    sequence_N: Tensor  # int64: index of the token's sequence, from 0 to `sequences` - 1
    sequences: int
    high_entropy_N: Tensor | None = None  # bool: see `high_entropy`; None: as if all were


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The settings that the loss depends on, by their names in LearnerSettings."""

    loss_type: LossType
    importance_sampling_level: RatioLevel
    epsilon: float
    epsilon_high: float
    delta: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    off_policy_mask_threshold: float
    entropy_coef: float
    beta: float
    kl_estimator: KLEstimator
    use_bias_correction_kl: bool
    importance_sampling_correction: CorrectionLevel
    importance_sampling_mode: CorrectionMode
    importance_sampling_min: float
    importance_sampling_cap: float
    decoupled_loss: bool
    own_loss: OwnLoss | None = None

    @classmethod
    def from_settings(cls, settings: LearnerSettings) -> "LossOptions":
        """Return the values of `settings` that the loss depends on, each under the name of its setting.

        `own_loss` is the function that LEARNER_LOSS names, None if the setting is empty. Its module is
        run the first time that this process loads it, and its errors pass through. Raise ConfigError if
        there is no such function, if it does not take two arguments, or if it is a class.
        """
        names = [field.name for field in fields(cls) if field.name != "own_loss"]
        own = load_loss(settings.loss) if settings.loss else None
        return cls(**{name: getattr(settings, name) for name in names}, own_loss=own)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A row's part of the loss, and values of its trained tokens for the metrics, without gradient."""

    loss: Tensor
    ratio_N: Tensor  # that the objective clips: the token's, or its sequence's mean, see `_ratio`
    clipped_low_N: Tensor  # bool: the lower bound removes the token's gradient
    clipped_high_N: Tensor  # bool: the upper bound removes the gradient; with cispo bounds it, for A > 0
    kl_N: Tensor  # estimated KL to the reference policy; zeros without a reference
    bounded_N: Tensor  # bool: the importance ratio was changed, see `Correction`


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """The objective of each token, and the ratio and clipping of LossTerms."""

    objective_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def policy_loss(tokens: LossTokens, options: LossOptions) -> LossTerms:
    """Return a packed row's part of the loss, and per-token values for the metrics without gradient.

    loss = -sum(weight x factor x objective) + beta x sum(weight x kl)
           - entropy_coef x sum(weight x entropy), over the trained tokens; a scalar with gradient

    The parts of a mini-batch's rows add up to the mini-batch's loss. options.loss_type selects the
    objective, unless options.own_loss gives it. The factor bounds the ratio to the policy that sampled
    the token, by the options importance_sampling_*. If tokens.high_entropy_N is given, only the tokens
    that it marks count in the objective and in the entropy. With off_policy_mask_threshold, sequences
    with a negative advantage from which the policy has moved too far do not count in the objective, but
    in kl and entropy. Values of untrained tokens (mask_N False), even NaN, reach neither the loss nor
    the gradient. With use_bias_correction_kl the kl is multiplied by the ratio: its gradient is then
    that of the KL (DeepSeek-V3.2, arXiv:2512.02556). Raise ConfigError if the own loss returns no tensor
    of floats (N,) with gradient. The values for the metrics, (N,) each, are the ratio policy / old,
    whether the token is clipped low or high, the estimated KL, and whether the factor's ratio was
    changed.

    Example: one token with weight 1, advantage 1, ratio 1.5, factor 1, dapo with epsilon_high 0.28: the
    objective is min(1.5, 1.28) = 1.28 and the loss -1.28, with gradient 0.
    """
    tokens = _zero_masked_tokens(tokens)
    objective = _own_objective if options.own_loss else _OBJECTIVES[options.loss_type]
    surrogate = objective(tokens, options)
    objective_N = torch.where(_in_objective(tokens, options), surrogate.objective_N, 0.0)
    correction = _correction(tokens, options)
    kl_N = _kl(tokens, options)
    loss = -(tokens.weight_N * correction.factor_N * objective_N).sum()
    if options.beta:
        unbiased_N = kl_N * _ratio(tokens, options) if options.use_bias_correction_kl else kl_N
        loss = loss + options.beta * (tokens.weight_N * unbiased_N).sum()
    if options.entropy_coef:
        high_N = tokens.mask_N if tokens.high_entropy_N is None else tokens.high_entropy_N
        entropy_N = torch.where(high_N, tokens.entropy_N, 0.0)
        loss = loss - options.entropy_coef * (tokens.weight_N * entropy_N).sum()
    return LossTerms(
        loss, surrogate.ratio_N.detach(), surrogate.clipped_low_N, surrogate.clipped_high_N,
        kl_N.detach(), correction.bounded_N,
    )  # fmt: skip


def aggregation_weights(
    lengths_S: np.ndarray, *, loss_type: LossType, batch_tokens: int, mini_batches: int,
    max_completion_length: int,
) -> np.ndarray:  # fmt: skip
    """Return for each sequence of one mini-batch the weight of each of its tokens in the loss, (S,).

    `lengths_S` counts the trained tokens of each sequence of the mini-batch, over all ranks and rows, so
    that the losses of rows add up. `batch_tokens` counts those of the whole batch, which is split into
    `mini_batches` (at least 1). `max_completion_length` is the longest possible completion in tokens. A
    sequence without trained tokens gets weight 0, but counts in S. The result is a new array of float64.
    grpo (arXiv:2402.03300, eq. 3), gspo (arXiv:2507.18071) and sapo (arXiv:2511.20347) take the mean
    over each sequence's tokens, then over the sequences. dr_grpo (arXiv:2503.20783) divides by the
    longest possible completion instead. bnpo (TRL) takes the mean over the mini-batch's tokens. dapo
    (arXiv:2503.14476, eq. 8), cispo and dppo take the mean over the batch's tokens: a token's weight is
    mini_batches / batch_tokens in any mini-batch.
    Example: lengths [1, 3] in one mini-batch of max_completion_length 4: grpo [1/2, 1/6], dr_grpo
    [1/8, 1/8], bnpo and dapo [1/4, 1/4].
    """
    lengths_S = np.asarray(lengths_S, dtype=np.float64)
    sequence_mean, batch_mean = lengths_S * len(lengths_S), batch_tokens / mini_batches
    divisors: dict[LossType, np.ndarray | float] = {
        "grpo": sequence_mean, "gspo": sequence_mean, "sapo": sequence_mean, "bnpo": lengths_S.sum(),
        "dr_grpo": float(len(lengths_S) * max_completion_length),
        "dapo": batch_mean, "cispo": batch_mean, "dppo": batch_mean,
    }  # fmt: skip
    weights_S = np.zeros_like(lengths_S)
    np.divide(1.0, divisors[loss_type], out=weights_S, where=lengths_S > 0)
    return weights_S


def _zero_masked_tokens(tokens: LossTokens) -> LossTokens:
    """Return a copy of `tokens` in which all numbers of untrained tokens (mask_N False) are 0.

    mask_N, sequence_N, sequences and high_entropy_N stay as they are, and a field that is None stays
    None. Ratios of untrained tokens become 1 and products 0. Masking the products instead would pass on
    NaN: 0 x NaN = NaN.
    """
    kept = ("mask_N", "sequence_N", "sequences", "high_entropy_N")
    names = [field.name for field in fields(tokens) if field.name not in kept]
    values = {name: getattr(tokens, name) for name in names if getattr(tokens, name) is not None}
    zeroed: dict[str, Any] = {name: torch.where(tokens.mask_N, v, 0.0) for name, v in values.items()}
    return replace(tokens, **zeroed)


def _correction(tokens: LossTokens, options: LossOptions) -> Correction:
    """Return the correction of each token's ratio to the policy that sampled the token (behaviour).

    The ratio is policy in training / behaviour. With options.decoupled_loss it is policy before the
    Update (old_N) / behaviour. The factor is bounded ratio / ratio, or with decoupled_loss the bounded
    ratio itself; it is 1 if importance_sampling_correction is "off". That option is the level, and
    importance_sampling_mode, _min and _cap are mode, lower and upper bound; `correct` explains them. The
    Correction has no gradient.
    """
    # The objective's ratio in the decoupled form is policy / proximal, which leaves out the latter.
    numerator_N = tokens.old_N if options.decoupled_loss else tokens.logprobs_N.detach()
    return correct(
        numerator_N - tokens.behaviour_N, tokens.sequence_N, tokens.mask_N, tokens.sequences,
        level=options.importance_sampling_correction, mode=options.importance_sampling_mode,
        lower=options.importance_sampling_min, upper=options.importance_sampling_cap,
        weight=options.decoupled_loss,
    )  # fmt: skip


def high_entropy(
    entropies: Sequence[np.ndarray], masks: Sequence[np.ndarray], share: float
) -> list[np.ndarray]:
    """Return for each sequence a bool (T,): which tokens are among the batch's highest entropies.

    `entropies` and `masks` have an array (T,) per sequence; a mask is True for trained tokens. Of all
    trained tokens the `share` (0 to 1) is marked: 0.2 marks the highest fifth, 0 only the
    highest (arXiv:2506.01939). A trained token at the bound itself is marked, an untrained token never.
    Example: entropies [1, 2, 3, 4, 5] of one sequence and a share of 0.25 give [F, F, F, T, T].
    """
    trained = np.concatenate([values[mask] for values, mask in zip(entropies, masks, strict=True)])
    bound = np.quantile(trained, 1.0 - share) if len(trained) else 0.0
    return [(values >= bound) & mask for values, mask in zip(entropies, masks, strict=True)]


def _in_objective(tokens: LossTokens, options: LossOptions) -> Tensor:
    """Return which tokens count in the objective, bool (N,).

    These are the trained tokens, of which only those that high_entropy_N marks if it is not None. If
    options.off_policy_mask_threshold is not 0, a sequence with a negative advantage is left out when the
    mean of log(behaviour / policy) over its trained tokens is above the threshold (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 9).
    """
    counted_N = tokens.mask_N if tokens.high_entropy_N is None else tokens.mask_N & tokens.high_entropy_N
    if not options.off_policy_mask_threshold:
        return counted_N
    drift_N = _sequence_mean(tokens.behaviour_N - tokens.logprobs_N.detach(), tokens)
    return counted_N & ((tokens.advantages_N >= 0) | (drift_N <= options.off_policy_mask_threshold))


def _sequence_mean(values_N: Tensor, tokens: LossTokens) -> Tensor:
    """Return for each token the mean of `values_N` over its sequence's trained tokens, (N,).

    Values of untrained tokens must be 0. A sequence without trained tokens gives 0.
    """
    return reduce_per_sequence(values_N, tokens.sequence_N, tokens.mask_N, tokens.sequences, mean=True)


def _ratio(tokens: LossTokens, options: LossOptions) -> Tensor:
    """Return the ratio policy / old, exp(logprobs_N - old_N), of each token, (N,), with gradient.

    With loss_type gspo, or importance_sampling_level "sequence", each token gets the ratio of its
    sequence: the geometric mean over its trained tokens, as in GSPO (arXiv:2507.18071). The ratio of
    untrained tokens, whose values must be 0, is else 1. The logarithm is clamped to [-80, 80].
    """
    log_ratio_N = tokens.logprobs_N - tokens.old_N
    if options.loss_type == "gspo" or options.importance_sampling_level == "sequence":
        log_ratio_N = _sequence_mean(log_ratio_N, tokens)
    return safe_exp(log_ratio_N)


def _own_objective(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """Return the negative of the user's loss of each token, which is options.own_loss, as the objective.

    The result also has the ratio policy / old of each token, with gradient, and False for all tokens as
    clipped. The user's errors pass through. options.own_loss must not be None. Raise ConfigError if the
    user's loss is no tensor of floats (N,), or has no gradient although logprobs_N has one.
    """
    assert options.own_loss is not None, "policy_loss calls this with an own loss only"
    none_N = torch.zeros_like(tokens.mask_N)
    return _Surrogate(-options.own_loss(tokens, options), _ratio(tokens, options), none_N, none_N)


def _clipping(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """Return the clipped objective of the loss types grpo, bnpo, dr_grpo, dapo and gspo.

    It is min(min(r, delta) A, clip(r) A) for the ratio r = policy / old and the advantage A of each
    token, with clip(r) within [1 - epsilon, 1 + epsilon_high] (arXiv:2503.14476, eq. 8). With gspo, or
    importance_sampling_level "sequence", r is the geometric mean of the token's sequence. delta 0 is no
    bound. The result also has the ratios r, and which tokens are clipped low or high.
    """
    return _clipped_objective(_ratio(tokens, options), tokens.advantages_N, options)


def _soft_gate(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """Return the objective of each token by SAPO (arXiv:2511.20347): sigmoid(t (r - 1)) x 4 / t x A.

    r is the token's ratio policy / old (its sequence's with importance_sampling_level "sequence"), A its
    advantage. t is sapo_temperature_pos for A > 0, else sapo_temperature_neg. The gradient fades as r
    leaves 1 and is never cut off, so no token counts as clipped. The ratios come with the objective.
    Example: t = 1 and A = 1 give 2 for r = 1, with gradient 1, and 2.92 for r = 2.
    """
    ratio_N = _ratio(tokens, options)
    hot, cold = map(ratio_N.new_tensor, (options.sapo_temperature_pos, options.sapo_temperature_neg))
    heat_N = torch.where(tokens.advantages_N > 0, hot, cold)
    objective_N = torch.sigmoid(heat_N * (ratio_N - 1.0)) * 4.0 / heat_N * tokens.advantages_N
    none_N = torch.zeros_like(tokens.mask_N)
    return _Surrogate(objective_N, ratio_N, none_N, none_N)


def _clipped_objective(ratio_N: Tensor, advantages_N: Tensor, options: LossOptions) -> _Surrogate:
    """Return min(min(r, delta) A, clip(r) A) for each ratio r and advantage A, all (N,).

    clip(r) moves r within [1 - epsilon, 1 + epsilon_high]. delta 0 is no bound; another delta is the
    dual clip (arXiv:1912.09729). The result has the given ratios too. A token counts as clipped low if r
    is below 1 - epsilon and A < 0, as clipped high if r is above 1 + epsilon_high and A > 0.
    Example: epsilon_high 0.28 and delta 0 give 1.28 for r = 2 and A = 1, but -2 for r = 2 and A = -1,
    and -1.5 for the same r and A with delta 1.5.
    """
    low, high = 1.0 - options.epsilon, 1.0 + options.epsilon_high
    unclipped_N = ratio_N.clamp(max=options.delta) if options.delta else ratio_N
    return _Surrogate(
        torch.minimum(unclipped_N * advantages_N, ratio_N.clamp(low, high) * advantages_N), ratio_N,
        (ratio_N < low) & (advantages_N < 0), (ratio_N > high) & (advantages_N > 0),
    )  # fmt: skip


def _clipped_ratio_as_weight(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """Return the objective of each token by CISPO (arXiv:2506.13585): min(r, 1 + epsilon_high) A log p.

    r is the token's ratio policy / old (its sequence's with importance_sampling_level "sequence"),
    without gradient. A is its advantage, and log p its log-probability in the policy in training. The
    bounded ratio is only a weight, so every token keeps its gradient. A token counts as clipped high if
    r is above 1 + epsilon_high and A > 0, none as clipped low. The ratios come with the objective.
    """
    high = 1.0 + options.epsilon_high
    ratio_N = _ratio(tokens, options).detach()
    return _Surrogate(
        ratio_N.clamp(max=high) * tokens.advantages_N * tokens.logprobs_N, ratio_N,
        torch.zeros_like(tokens.mask_N), (ratio_N > high) & (tokens.advantages_N > 0),
    )  # fmt: skip


def _probability_trust_region(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """Return r A, or 0 outside the trust region: DPPO with binary total variation (arXiv:2602.04879).

    r is the token's ratio policy / old (its sequence's with importance_sampling_level "sequence"), A its
    advantage; the ratios come with the objective. A token is outside, and counts as clipped, if its
    probability is below the behaviour policy's by more than epsilon and A < 0 (clipped low), or above it
    by more than epsilon_high and A > 0 (clipped high). Example: with epsilon_high 0.28 and A > 0 a
    probability that rose from 0.3 to 0.6 gives 0, one that rose to 0.5 gives r A.
    """
    ratio_N = _ratio(tokens, options)
    moved_N = safe_exp(tokens.logprobs_N.detach()) - safe_exp(tokens.behaviour_N)
    low_N = (moved_N < -options.epsilon) & (tokens.advantages_N < 0)
    high_N = (moved_N > options.epsilon_high) & (tokens.advantages_N > 0)
    objective_N = torch.where(low_N | high_N, 0.0, ratio_N * tokens.advantages_N)
    return _Surrogate(objective_N, ratio_N, low_N, high_N)


_OBJECTIVES: dict[LossType, Callable[[LossTokens, LossOptions], _Surrogate]] = {
    "grpo": _clipping, "bnpo": _clipping, "dr_grpo": _clipping, "dapo": _clipping, "gspo": _clipping,
    "cispo": _clipped_ratio_as_weight, "dppo": _probability_trust_region, "sapo": _soft_gate,
}  # fmt: skip


def _kl(tokens: LossTokens, options: LossOptions) -> Tensor:
    """Return each token's estimated KL of the policy to the reference policy, in nats, (N,).

    With x = log(reference / policy) the kl_estimator k1 gives -x, k2 x**2 / 2, and k3 exp(x) - 1 - x,
    all with gradient. If reference_N is None all values are 0.
    """
    if tokens.reference_N is None:
        return torch.zeros_like(tokens.logprobs_N)
    return _KL_ESTIMATORS[options.kl_estimator](tokens.reference_N - tokens.logprobs_N)


_KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_N: -log_N,
    "k2": lambda log_N: 0.5 * log_N.square(),
    "k3": lambda log_N: safe_exp(log_N) - 1.0 - log_N,
}
"""Estimators of the KL from log(reference / policy), by Schulman, http://joschu.net/blog/kl-approx.html.

GRPO uses k3 (arXiv:2402.03300, eq. 4). Example: log(reference / policy) = -0.5 gives k1 0.5, k2 0.125
and k3 0.107."""
