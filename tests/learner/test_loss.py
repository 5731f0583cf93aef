"""The loss against a slow version written as loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.loss import policy_loss, token_logprobs

OPTIONS = {"epsilon": 0.2, "epsilon_high": 0.28, "cap": 2.0}


def ragged(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    size, length = 6, 9
    new = -torch.rand(size, length, generator=generator, dtype=torch.float64) * 2
    old = new + torch.randn(size, length, generator=generator, dtype=torch.float64) * 0.6
    advantages = torch.randn(size, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (size, 1), generator=generator)
    mask = torch.arange(length) < lengths
    return new, old, advantages, mask


def slow_loss(new, old, advantages, mask, loss_type):
    """Equation 8 of DAPO (or equation 3 of GRPO), token by token."""
    per_sequence, all_tokens = [], []
    for row in range(len(new)):
        terms = []
        for position in range(new.shape[1]):
            if not mask[row, position]:
                continue
            ratio = torch.exp(new[row, position] - old[row, position])
            if ratio.item() > OPTIONS["cap"]:
                ratio = torch.tensor(OPTIONS["cap"], dtype=new.dtype)
            low, high = 1 - OPTIONS["epsilon"], 1 + OPTIONS["epsilon_high"]
            bounds = torch.tensor([low, high], dtype=new.dtype)
            clipped = min(max(ratio, bounds[0]), bounds[1])
            terms.append(min(ratio * advantages[row], clipped * advantages[row]))
        per_sequence.append(sum(terms) / len(terms))
        all_tokens += terms
    if loss_type == "dapo":
        return -sum(all_tokens) / len(all_tokens)
    return -sum(per_sequence) / len(per_sequence)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_slow_version(loss_type, seed):
    new, old, advantages, mask = ragged(seed)
    fast_input, slow_input = new.clone().requires_grad_(), new.clone().requires_grad_()
    fast = policy_loss(
        fast_input, old, advantages, mask, **OPTIONS, loss_type=loss_type,
        tokens=int(mask.sum()), sequences=len(new),
    ).loss  # fmt: skip
    slow = slow_loss(slow_input, old, advantages, mask, loss_type)
    fast.backward()
    slow.backward()
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    assert torch.allclose(fast_input.grad, slow_input.grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_micro_batches_add_up_to_the_batch(loss_type):
    new, old, advantages, mask = ragged(3)
    sizes = {"tokens": int(mask.sum()), "sequences": len(new), "loss_type": loss_type}
    whole = policy_loss(new, old, advantages, mask, **OPTIONS, **sizes).loss
    parts = sum(
        policy_loss(new[rows], old[rows], advantages[rows], mask[rows], **OPTIONS, **sizes).loss
        for rows in (slice(0, 2), slice(2, 6))
    )
    assert parts.item() == pytest.approx(whole.item(), rel=1e-12)


def test_a_positive_advantage_is_clipped_higher_than_it_is_clipped_low():
    old = torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)

    def gradient(log_ratio: float, advantage: float) -> float:
        new = torch.tensor([[log_ratio]], requires_grad=True)
        terms = policy_loss(
            new, old, torch.tensor([advantage]), mask, **OPTIONS, loss_type="dapo", tokens=1,
            sequences=1,
        )  # fmt: skip
        terms.loss.backward()
        return new.grad.item()

    assert gradient(math.log(1.25), 1.0) != 0.0  # between 1 + epsilon and 1 + epsilon_high
    assert gradient(math.log(1.30), 1.0) == 0.0
    assert gradient(math.log(0.75), -1.0) == 0.0
    assert gradient(math.log(1.9), -1.0) != 0.0
    assert gradient(math.log(2.1), -1.0) == 0.0  # truncated by the cap


def test_a_hopeless_behaviour_probability_gives_no_nan():
    """exp overflows to inf; the cap hides that forwards, but its gradient would be 0 x inf."""
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    terms = policy_loss(
        new, torch.tensor([[-100.0, -1.0]]), torch.tensor([1.0]), torch.tensor([[True, True]]),
        **OPTIONS, loss_type="dapo", tokens=2, sequences=1,
    )  # fmt: skip
    terms.loss.backward()
    assert torch.isfinite(new.grad).all()


def test_masked_tokens_change_nothing():
    new, old, advantages, mask = ragged(1)
    sizes = {"tokens": int(mask.sum()), "sequences": len(new), "loss_type": "dapo"}
    before = policy_loss(new, old, advantages, mask, **OPTIONS, **sizes).loss
    other = torch.where(mask, new, new + 5.0)
    assert policy_loss(other, old, advantages, mask, **OPTIONS, **sizes).loss == before


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropy_are_those_after_temperature(temperature):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    logprobs, entropy = token_logprobs(logits, tokens, temperature)
    for row in range(2):
        for position in range(3):
            scaled = np.exp(logits[row, position].double().numpy() / temperature)
            probabilities = scaled / scaled.sum()
            chosen = math.log(probabilities[tokens[row, position]])
            assert logprobs[row, position].item() == pytest.approx(chosen, abs=1e-5)
            expected = -(probabilities * np.log(probabilities)).sum()
            assert entropy[row, position].item() == pytest.approx(expected, abs=1e-5)
