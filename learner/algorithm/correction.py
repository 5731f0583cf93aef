"""What bounds the importance ratio between the policy and the one that sampled.

Dimensions: N completion tokens of a packed row, S sequences in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.common.config.learner_settings import CorrectionLevel, CorrectionMode

_MAX_EXPONENT = 80.0
"""exp of it, and one over that, are finite in fp32."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Of each trained token; what stands at the others means nothing."""

    factor_N: Tensor
    """To multiply the surrogate by; without gradient."""
    bounded_N: Tensor
    """Whether the ratio lay outside and was cut or masked."""


def correct(
    log_ratio_N: Tensor,
    sequence_N: Tensor,
    mask_N: Tensor,
    sequences: int,
    *,
    level: CorrectionLevel,
    mode: CorrectionMode,
    lower: float,
    upper: float,
    weight: bool,
) -> Correction:
    """Bound R, the ratio to the behaviour policy mu whose logarithms are given, without gradient.

    `sequence_N` (int64) says which sequence a token belongs to, `mask_N` (bool) which are trained.

    Levels: `token` takes R per token, `sequence` the product over the sequence's trained tokens,
    `geometric` their geometric mean, for all its tokens alike; `off` bounds nothing. Modes:
    `truncate` is min(R, upper), as in IMPALA (arXiv:1802.01561); `clip` also raises to lower;
    `mask` is R within the bounds, else 0.

    With `weight` the factor is the corrected R itself, for a surrogate whose own ratio is not
    against mu (the decoupled form). Else the surrogate's ratio is against mu already, and the factor
    is corrected R / R: at most 1 for truncate, 0 or 1 for mask.
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
    """Sum or mean over the trained tokens of each token's sequence, (N,); 0 where it has none.

    The values of other tokens must be 0.
    """
    total_S = values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)
    if mean:
        length_S = values_N.new_zeros(sequences).index_add(0, sequence_N, mask_N.to(values_N.dtype))
        total_S = total_S / length_S.clamp(min=1.0)
    return total_S[sequence_N]


def safe_exp(log_N: Tensor) -> Tensor:
    """exp that neither overflows nor reaches 0 in fp32; beyond its range the gradient is 0.

    An inf would pass a later clamp forwards, but its gradient is 0 x inf = NaN.
    """
    return torch.exp(log_N.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))


def _bound_ratio(
    ratio_N: Tensor, mode: CorrectionMode, lower: float, upper: float
) -> tuple[Tensor, Tensor]:
    """The corrected ratio, and where it differs."""
    if mode == "truncate":
        return ratio_N.clamp(max=upper), ratio_N > upper
    outside_N = (ratio_N < lower) | (ratio_N > upper)
    if mode == "clip":
        return ratio_N.clamp(lower, upper), outside_N
    return torch.where(outside_N, 0.0, ratio_N), outside_N
