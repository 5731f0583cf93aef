"""The loss as a pure function of flat vectors.

Dimensions: N completion tokens of a packed row, S sequences. No padding: a token that must not be
trained is masked out. What each option does, and from which paper, is in docs/losses.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.common.config.learner_settings import (
    CorrectionLevel,
    CorrectionMode,
    KLEstimator,
    LearnerSettings,
    LossType,
)
from penstock.learner.algorithm.correction import Correction, correct, reduce_per_sequence, safe_exp


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The completion tokens of one packed row; logarithms of probabilities after temperature."""

    logprobs_N: Tensor
    """Of the policy now, with gradient."""
    entropy_N: Tensor
    """Of the policy now; with gradient if there is an entropy bonus."""
    old_N: Tensor
    """What the ratio is taken against: the behaviour policy, or (decoupled) the proximal one."""
    behaviour_N: Tensor
    """Of the policy that sampled the token."""
    reference_N: Tensor | None
    """Of the reference policy, if there is one."""
    advantages_N: Tensor
    weight_N: Tensor
    """See `aggregation_weights`."""
    mask_N: Tensor
    """bool: which tokens are trained."""
    sequence_N: Tensor
    """int64: which of the `sequences` a token belongs to."""
    sequences: int


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The settings that the loss depends on."""

    loss_type: LossType
    epsilon: float
    epsilon_high: float
    delta: float
    entropy_coef: float
    beta: float
    kl_estimator: KLEstimator
    correction: CorrectionLevel
    correction_mode: CorrectionMode
    correction_min: float
    correction_cap: float
    decoupled: bool

    @classmethod
    def from_settings(cls, settings: LearnerSettings) -> "LossOptions":
        """Those of a run."""
        return cls(
            loss_type=settings.loss_type,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            delta=settings.delta,
            entropy_coef=settings.entropy_coef,
            beta=settings.beta,
            kl_estimator=settings.kl_estimator,
            correction=settings.importance_sampling_correction,
            correction_mode=settings.importance_sampling_mode,
            correction_min=settings.importance_sampling_min,
            correction_cap=settings.importance_sampling_cap,
            decoupled=settings.decoupled_loss,
        )


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A row's share of the loss, and values of its trained tokens for the metrics (no gradient)."""

    loss: Tensor
    ratio_N: Tensor
    """What the loss clips: per token, or with gspo per sequence."""
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    kl_N: Tensor
    """To the reference; zeros without one."""
    bounded_N: Tensor
    """See `Correction`."""


@dataclass(frozen=True, slots=True)
class _Surrogate:
    objective_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def policy_loss(tokens: LossTokens, options: LossOptions) -> LossTerms:
    """A row's share of the loss: those of all rows of a mini-batch add up to the mini-batch's.

    loss = -sum(weight x factor x objective) + beta x sum(weight x kl)
           - entropy_coef x sum(weight x entropy), over the trained tokens

    The objective is that of `loss_type`, the factor what the correction makes of the ratio to the
    behaviour policy. What stands at masked tokens, even NaN, reaches neither loss nor gradient.
    """
    tokens = _zero_masked_tokens(tokens)
    surrogate = _SURROGATES[options.loss_type](tokens, options)
    correction = _correction(tokens, options)
    kl_N = _kl(tokens, options)
    loss = -(tokens.weight_N * correction.factor_N * surrogate.objective_N).sum()
    if options.beta:
        loss = loss + options.beta * (tokens.weight_N * kl_N).sum()
    if options.entropy_coef:
        loss = loss - options.entropy_coef * (tokens.weight_N * tokens.entropy_N).sum()
    return LossTerms(
        loss,
        surrogate.ratio_N.detach(),
        surrogate.clipped_low_N,
        surrogate.clipped_high_N,
        kl_N.detach(),
        correction.bounded_N,
    )


def aggregation_weights(
    lengths_S: np.ndarray,
    *,
    loss_type: LossType,
    batch_tokens: int,
    mini_batches: int,
    max_completion_length: int,
) -> np.ndarray:
    """What a token of each sequence weighs in the loss of ONE mini-batch, (S,).

    `lengths_S` are the trained tokens of all the mini-batch's sequences, over all ranks and
    micro-batches; so micro-batches just add up. `batch_tokens` are those of the whole batch. A
    sequence without trained tokens weighs nothing, but counts in S.

    grpo and gspo take the mean over each sequence, then over the sequences; dr_grpo divides by the
    longest possible completion instead (arXiv:2503.20783); bnpo takes the mean over the mini-batch's
    tokens; dapo (arXiv:2503.14476), cispo and dppo over the batch's, so that a token weighs the same
    in whichever mini-batch it falls.
    """
    lengths_S = np.asarray(lengths_S, dtype=np.float64)
    divisors: dict[LossType, np.ndarray | float] = {
        "grpo": lengths_S * len(lengths_S),
        "gspo": lengths_S * len(lengths_S),
        "dr_grpo": float(len(lengths_S) * max_completion_length),
        "bnpo": lengths_S.sum(),
        "dapo": batch_tokens / mini_batches,
        "cispo": batch_tokens / mini_batches,
        "dppo": batch_tokens / mini_batches,
    }
    weights_S = np.zeros_like(lengths_S)
    np.divide(1.0, divisors[loss_type], out=weights_S, where=lengths_S > 0)
    return weights_S


def _zero_masked_tokens(tokens: LossTokens) -> LossTokens:
    """Zeros where the mask is false.

    There every ratio becomes 1 and every product 0. Masking the products instead would let a NaN
    through backwards: 0 x NaN = NaN.
    """

    def cleaned(values_N: Tensor) -> Tensor:
        return torch.where(tokens.mask_N, values_N, 0.0)

    return replace(
        tokens,
        logprobs_N=cleaned(tokens.logprobs_N),
        entropy_N=cleaned(tokens.entropy_N),
        old_N=cleaned(tokens.old_N),
        behaviour_N=cleaned(tokens.behaviour_N),
        reference_N=None if tokens.reference_N is None else cleaned(tokens.reference_N),
        advantages_N=cleaned(tokens.advantages_N),
        weight_N=cleaned(tokens.weight_N),
    )


def _correction(tokens: LossTokens, options: LossOptions) -> Correction:
    # Direct: the surrogate's ratio is the one to bound. Decoupled: it leaves out proximal / behaviour.
    above_N = tokens.old_N if options.decoupled else tokens.logprobs_N.detach()
    return correct(
        above_N - tokens.behaviour_N,
        tokens.sequence_N,
        tokens.mask_N,
        tokens.sequences,
        level=options.correction,
        mode=options.correction_mode,
        lower=options.correction_min,
        upper=options.correction_cap,
        weight=options.decoupled,
    )


def _token_clipping(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """min(r A, clip(r) A), DAPO (arXiv:2503.14476, eq. 8); GRPO is the case of equal bounds."""
    return _clipped_objective(safe_exp(tokens.logprobs_N - tokens.old_N), tokens.advantages_N, options)


def _sequence_clipping(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """The same with the geometric mean of the sequence's ratios: GSPO (arXiv:2507.18071)."""
    log_ratio_N = reduce_per_sequence(
        tokens.logprobs_N - tokens.old_N,
        tokens.sequence_N,
        tokens.mask_N,
        tokens.sequences,
        mean=True,
    )
    return _clipped_objective(safe_exp(log_ratio_N), tokens.advantages_N, options)


def _clipped_objective(ratio_N: Tensor, advantages_N: Tensor, options: LossOptions) -> _Surrogate:
    """Pessimistic clipping; delta bounds the ratios that it leaves, those at negative advantages."""
    low, high = 1.0 - options.epsilon, 1.0 + options.epsilon_high
    left_N = ratio_N.clamp(max=options.delta) if options.delta else ratio_N
    return _Surrogate(
        torch.minimum(left_N * advantages_N, ratio_N.clamp(low, high) * advantages_N),
        ratio_N,
        (ratio_N < low) & (advantages_N < 0),
        (ratio_N > high) & (advantages_N > 0),
    )


def _clipped_ratio_as_weight(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """CISPO (arXiv:2506.13585): the clipped ratio only weighs, so every token keeps its gradient."""
    high = 1.0 + options.epsilon_high
    ratio_N = safe_exp(tokens.logprobs_N.detach() - tokens.old_N)
    return _Surrogate(
        ratio_N.clamp(max=high) * tokens.advantages_N * tokens.logprobs_N,
        ratio_N,
        torch.zeros_like(tokens.mask_N),
        (ratio_N > high) & (tokens.advantages_N > 0),
    )


def _probability_trust_region(tokens: LossTokens, options: LossOptions) -> _Surrogate:
    """DPPO with binary total variation (arXiv:2602.04879).

    A token leaves the objective when its probability is already further from the behaviour policy's
    than allowed, and the advantage would move it further.
    """
    ratio_N = safe_exp(tokens.logprobs_N - tokens.old_N)
    moved_N = safe_exp(tokens.logprobs_N.detach()) - safe_exp(tokens.behaviour_N)
    low_N = (moved_N < -options.epsilon) & (tokens.advantages_N < 0)
    high_N = (moved_N > options.epsilon_high) & (tokens.advantages_N > 0)
    objective_N = torch.where(low_N | high_N, 0.0, ratio_N * tokens.advantages_N)
    return _Surrogate(objective_N, ratio_N, low_N, high_N)


_SURROGATES: dict[LossType, Callable[[LossTokens, LossOptions], _Surrogate]] = {
    "grpo": _token_clipping,
    "bnpo": _token_clipping,
    "dr_grpo": _token_clipping,
    "dapo": _token_clipping,
    "gspo": _sequence_clipping,
    "cispo": _clipped_ratio_as_weight,
    "dppo": _probability_trust_region,
}


def _kl(tokens: LossTokens, options: LossOptions) -> Tensor:
    """Of the policy to the reference, estimated per token; zeros without a reference."""
    if tokens.reference_N is None:
        return torch.zeros_like(tokens.logprobs_N)
    return _KL_ESTIMATORS[options.kl_estimator](tokens.reference_N - tokens.logprobs_N)


_KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_N: -log_N,
    "k2": lambda log_N: 0.5 * log_N.square(),
    "k3": lambda log_N: safe_exp(log_N) - 1.0 - log_N,
}
"""By the logarithm of reference / policy: Schulman, http://joschu.net/blog/kl-approx.html; k3 is
GRPO's (arXiv:2402.03300, eq. 4)."""
