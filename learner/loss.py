"""The GRPO/DAPO loss as a pure function.

Dimensions: B sequences of a micro-batch, T completion positions (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_LARGEST_LOG = 80.0
"""exp of it is finite in fp32."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the loss, and per-token values for the metrics (no gradient)."""

    loss: Tensor
    ratio_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor


def policy_loss(
    logprobs_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    cap: float,
    loss_type: Literal["grpo", "dapo"],
    tokens: int,
    sequences: int,
) -> LossTerms:
    """Clipped surrogate with the importance ratio taken directly against the behaviour policy.

    ratio = min(pi / mu, cap), per token: pi is the policy now, mu the one that sampled, however many
    versions ago. With epsilon_high > epsilon this is DAPO's clip-higher (arXiv:2503.14476, eq. 8);
    GRPO (arXiv:2402.03300, eq. 3) is the case of equal bounds. The cap truncates what the clip leaves
    unbounded: ratios above 1 at negative advantages.

    dapo divides by `tokens`, the trained tokens of the whole batch; grpo takes the mean over each
    sequence's own tokens, then over the batch's `sequences`. So the micro-batches' losses add up to
    the batch's.
    """
    # An overflow to inf would pass the cap forwards, but its gradient is 0 x inf = NaN.
    ratio = torch.exp((logprobs_BT - behaviour_BT).clamp(max=_LARGEST_LOG)).clamp(max=cap)
    advantages = advantages_B.unsqueeze(1)
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    objective = torch.where(mask_BT, objective, 0.0)
    if loss_type == "dapo":
        loss = -objective.sum() / tokens
    else:
        per_sequence = objective.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
        loss = -per_sequence.sum() / sequences
    with torch.no_grad():
        low = (ratio < 1.0 - epsilon) & (advantages < 0) & mask_BT
        high = (ratio > 1.0 + epsilon_high) & (advantages > 0) & mask_BT
    return LossTerms(loss, ratio.detach(), low, high)


def token_logprobs(
    logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens at a temperature, and the entropy (no gradient); both (B, T).

    The engine reports log-probabilities after temperature, so the logits are divided by it here too.
    """
    logprobs_BTV = torch.log_softmax(logits_BTV.float() / temperature, dim=-1)
    chosen = logprobs_BTV.gather(-1, token_ids_BT.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(logprobs_BTV.exp() * logprobs_BTV).sum(dim=-1)
    return chosen, entropy
