"""Correction of the importance ratio between the policy and the policy that sampled the tokens.

Dimensions: N completion tokens of a packed row, S sequences in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.common.config.learner_settings import CorrectionLevel, CorrectionMode

_MAX_EXPONENT = 80.0  # exp(80) and exp(-80) are finite and above 0 in fp32; exp(89) is infinite


@dataclass(frozen=True, slots=True)
class Correction:
    """Per-token correction. Entries of untrained tokens are undefined."""

    factor_N: Tensor  # factor of the token's objective in the loss, without gradient
    bounded_N: Tensor  # bool: whether the ratio was outside the bounds, and so was changed


def correct(
    log_ratio_N: Tensor, sequence_N: Tensor, mask_N: Tensor, sequences: int, *,
    level: CorrectionLevel, mode: CorrectionMode, lower: float, upper: float, weight: bool,
) -> Correction:  # fmt: skip
    """Return the correction for R, a token's ratio to the behaviour policy that sampled the token.

    The Correction has, without gradient, the factors (N,) of the tokens, and a bool (N,) that is True
    for trained tokens whose R, or that of their sequence, was out of bounds. The factors of untrained
    tokens mean nothing. `log_ratio_N` is log R. `sequence_N` (int64) is the index of each token's
    sequence, from 0 to `sequences` - 1. `mask_N` (bool) is True for trained tokens.
    Levels: `token` bounds each token's R. `sequence` bounds the product of R over the trained tokens of
    the sequence, `geometric` their geometric mean; all tokens of a sequence then get the same factor.
    `off` gives each token factor 1, and no token is out of bounds.
    Modes: `truncate` corrects R to min(R, upper), as in IMPALA (arXiv:1802.01561), and only R above
    `upper` is out of bounds. `clip` also raises R
    to at least `lower`. `mask` keeps R within the bounds and corrects any other R to 0.
    With `weight` the factor is the corrected R: the decoupled form, whose objective does not contain R.
    Without `weight` the factor is corrected R / R: the direct form, whose objective contains R already.
    Example: token level, R = [0.25, 1, 4], lower 0.5 and upper 2. The factors without `weight` are
    [1, 1, 0.5] for truncate, [2, 1, 0.5] for clip and [0, 1, 0] for mask; with `weight` they are
    [0.25, 1, 2], [0.5, 1, 2] and [0, 1, 0].
    """
    if level == "off":
        return Correction(torch.ones_like(log_ratio_N), torch.zeros_like(mask_N))
    log_ratio_N = torch.where(mask_N, log_ratio_N.detach(), 0.0)
    if level != "token":
        mean = level == "geometric"
        log_ratio_N = reduce_per_sequence(log_ratio_N, sequence_N, mask_N, sequences, mean=mean)
    ratio_N = safe_exp(log_ratio_N)
    corrected_N, outside_N = _bound_ratio(ratio_N, mode, lower, upper)
    return Correction(corrected_N if weight else corrected_N / ratio_N, outside_N & mask_N)


def reduce_per_sequence(
    values_N: Tensor, sequence_N: Tensor, mask_N: Tensor, sequences: int, *, mean: bool
) -> Tensor:
    """Return for each token the sum (or `mean`) of the values over its sequence's trained tokens, (N,).

    `sequence_N` (int64) is the index of each token's sequence, from 0 to `sequences` - 1. `mask_N` is
    True for trained tokens. The values of untrained tokens must be 0, because they are added too. A
    sequence without trained tokens gives 0. The gradient of `values_N` passes through.
    Example: values [1, 3, 5] of sequences [0, 0, 1], all trained, give the means [2, 2, 5].
    """
    total_S = values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)
    if mean:
        length_S = values_N.new_zeros(sequences).index_add(0, sequence_N, mask_N.to(values_N.dtype))
        total_S = total_S / length_S.clamp(min=1.0)
    return total_S[sequence_N]


def safe_exp(log_N: Tensor) -> Tensor:
    """Return exp(x) for each value x of `log_N`, finite and above 0 in fp32.

    A value below -80 or above 80 counts as -80 or 80, and gets the gradient 0. NaN stays NaN. Without
    this clamp a later clamp would bound an infinite exp in the forward pass, but its gradient would be
    0 x inf = NaN.
    """
    return torch.exp(log_N.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))


def _bound_ratio(
    ratio_N: Tensor, mode: CorrectionMode, lower: float, upper: float
) -> tuple[Tensor, Tensor]:
    """Return the corrected ratios, and a bool that is True where a ratio was out of bounds, both (N,).

    The mode "truncate" lowers ratios above `upper` to `upper` and ignores `lower`. "clip" moves each
    ratio to the nearest value within [lower, upper]. "mask" sets each ratio out of these bounds to 0.
    """
    if mode == "truncate":
        return ratio_N.clamp(max=upper), ratio_N > upper
    outside_N = (ratio_N < lower) | (ratio_N > upper)
    if mode == "clip":
        return ratio_N.clamp(lower, upper), outside_N
    return torch.where(outside_N, 0.0, ratio_N), outside_N
