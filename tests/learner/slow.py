"""What the formulas of docs/losses.md say, token by token: plain loops, nothing vectorised.

Values with a gradient are torch scalars in float64, so autograd gives the gradient to compare with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.learner.algorithm.loss import LossOptions, LossTokens

EPSILON = 1e-4


def advantages(groups: Sequence[Sequence[float]], estimator: str, scale: str) -> list[list[float]]:
    """Of each rollout of each group; NaN means no reward."""
    whole = [total for group in groups for total in group if not math.isnan(total)]
    found = []
    for group in groups:
        known = [total for total in group if not math.isnan(total)]
        row = []
        for place, total in enumerate(group):
            needed = whole if estimator == "reinforce_plus_plus" and scale != "group" else known
            if math.isnan(total) or len(needed) < 2:
                row.append(0.0)
                continue
            others = [x for i, x in enumerate(group) if i != place and not math.isnan(x)]
            baselines = {"grpo": known, "rloo": others, "reinforce_plus_plus": whole}
            value = total - statistics.fmean(baselines[estimator])
            if scale != "none":
                value /= statistics.stdev(known if scale == "group" else whole) + EPSILON
            row.append(value)
        found.append(row)
    return found


def weights(
    lengths: Sequence[int],
    loss_type: str,
    batch_tokens: int,
    mini_batches: int,
    max_completion_length: int,
) -> list[float]:
    """Of a token of each sequence of one mini-batch."""
    found = []
    for length in lengths:
        if length == 0:
            found.append(0.0)
        elif loss_type in ("grpo", "gspo", "sapo"):
            found.append(1 / length / len(lengths))
        elif loss_type == "dr_grpo":
            found.append(1 / max_completion_length / len(lengths))
        elif loss_type == "bnpo":
            found.append(1 / sum(lengths))
        else:
            found.append(mini_batches / batch_tokens)
    return found


def factor(
    ratios: Sequence[float], place: int, level: str, mode: str, lower: float, upper: float, weight: bool
) -> tuple[float, bool]:
    """Of the token at `place` among its sequence's trained tokens, and whether it was bounded."""
    if level == "off":
        return 1.0, False
    product = math.prod(ratios)
    levels = {"token": ratios[place], "sequence": product, "geometric": product ** (1 / len(ratios))}
    ratio = corrected = levels[level]
    if ratio > upper:
        corrected = {"truncate": upper, "clip": upper, "mask": 0.0}[mode]
    elif ratio < lower:
        corrected = {"truncate": ratio, "clip": lower, "mask": 0.0}[mode]
    return corrected if weight else corrected / ratio, corrected != ratio


def kl(logprob: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Schulman's k1, k2, k3 with r = reference / policy."""
    r = torch.exp(reference) / torch.exp(logprob)
    return {"k1": -torch.log(r), "k2": torch.log(r) ** 2 / 2, "k3": (r - 1) - torch.log(r)}[estimator]


def clipped(ratio: Tensor, advantage: float, options: LossOptions) -> Tensor:
    """PPO's objective; delta as dual-clip PPO (arXiv:1912.09729) writes it: max(..., delta A)."""
    bounded = min(max(ratio, one(1 - options.epsilon)), one(1 + options.epsilon_high))
    objective = min(ratio * advantage, bounded * advantage)
    if options.delta and advantage < 0:
        objective = max(objective, one(options.delta * advantage))
    return objective


def objective(tokens: LossTokens, place: int, mates: Sequence[int], options: LossOptions) -> Tensor:
    """Of the trained token at `place`; `mates` are its sequence's trained tokens, itself among them."""
    advantage = tokens.advantages_N[place].item()
    ratio = ratio_of(tokens, place, mates, options)
    if options.loss_type == "sapo":
        heat = options.sapo_temperature_pos if advantage > 0 else options.sapo_temperature_neg
        return 4 / heat / (1 + torch.exp(-heat * (ratio - 1))) * advantage
    if options.loss_type == "cispo":
        return min(ratio.item(), 1 + options.epsilon_high) * advantage * tokens.logprobs_N[place]
    if options.loss_type == "dppo":
        now, then = tokens.logprobs_N[place].exp().item(), tokens.behaviour_N[place].exp().item()
        if advantage > 0 and now > then and abs(now - then) > options.epsilon_high:
            return one(0.0)
        if advantage < 0 and now < then and abs(now - then) > options.epsilon:
            return one(0.0)
        return ratio * advantage
    return clipped(ratio, advantage, options)


def ratio_of(tokens: LossTokens, place: int, mates: Sequence[int], options: LossOptions) -> Tensor:
    """The ratio of the token at `place`, or the geometric mean over its sequence."""
    if options.loss_type != "gspo" and options.importance_sampling_level == "token":
        return torch.exp(tokens.logprobs_N[place]) / torch.exp(tokens.old_N[place])
    product = one(1.0)
    for mate in mates:
        product = product * torch.exp(tokens.logprobs_N[mate] - tokens.old_N[mate])
    return product ** (1 / len(mates))


def is_kept(tokens: LossTokens, place: int, mates: Sequence[int], options: LossOptions) -> bool:
    """Whether the off-policy mask keeps the token's sequence."""
    drift = statistics.fmean((tokens.behaviour_N[x] - tokens.logprobs_N[x]).item() for x in mates)
    limit = options.off_policy_mask_threshold
    return not limit or tokens.advantages_N[place].item() >= 0 or drift <= limit


def highest(entropies: Sequence[float], share: float) -> list[bool]:
    """Which are at or above the share's quantile, with linear interpolation."""
    ordered = sorted(entropies)
    at = (1 - share) * (len(ordered) - 1)
    low = math.floor(at)
    bound = ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
    return [value >= bound for value in entropies]


def loss(tokens: LossTokens, options: LossOptions) -> Tensor:
    """The whole loss of one row."""
    total = one(0.0)
    for place in range(len(tokens.mask_N)):
        if not tokens.mask_N[place]:
            continue
        mates = _mates(tokens, place)
        above = tokens.old_N if options.decoupled_loss else tokens.logprobs_N
        ratios = [math.exp(above[mate].item() - tokens.behaviour_N[mate].item()) for mate in mates]
        token_factor, _ = factor(
            ratios,
            mates.index(place),
            options.importance_sampling_correction,
            options.importance_sampling_mode,
            options.importance_sampling_min,
            options.importance_sampling_cap,
            options.decoupled_loss,
        )
        high = tokens.high_entropy_N is None or bool(tokens.high_entropy_N[place])
        value = one(0.0)
        if high and is_kept(tokens, place, mates, options):
            value = -token_factor * objective(tokens, place, mates, options)
        if tokens.reference_N is not None:
            estimate = kl(tokens.logprobs_N[place], tokens.reference_N[place], options.kl_estimator)
            if options.use_bias_correction_kl:
                estimate = estimate * ratio_of(tokens, place, mates, options)
            value = value + options.beta * estimate
        if high:
            value = value - options.entropy_coef * tokens.entropy_N[place]
        total = total + tokens.weight_N[place].item() * value
    return total


def one(value: float) -> Tensor:
    """A float64 scalar."""
    return torch.tensor(value, dtype=torch.float64)


def _mates(tokens: LossTokens, place: int) -> list[int]:
    found = []
    for other in range(len(tokens.mask_N)):
        if tokens.mask_N[other] and tokens.sequence_N[other] == tokens.sequence_N[place]:
            found.append(other)
    return found


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[float, Tensor]:
    """A function's value and gradient."""
    point = at.detach().clone().requires_grad_()
    value = function(point)
    value.backward()
    assert point.grad is not None
    return value.item(), point.grad
