"""The count of operations, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from penstock.learner.policy.flops import FlopCounter, peak_flops
from penstock.learner.policy.lora import add_adapter
from penstock.learner.policy.packing import token_counts
from penstock.learner.policy.policy import Policy
from tests.learner.builders import make_settings
from tests.learner.gradients import make_batch


@pytest.mark.parametrize("packing", [False, True])
def test_the_count_is_torchs_own_of_what_the_policy_computes(model_folder, packing):
    """But for the causal half of attention, which torch counts whole, or not at all."""
    policy = Policy(model_folder, make_settings(micro_batch_tokens=10_000, packing=packing), steps=1)
    if not packing:  # torch does not count fused attention on a CPU
        policy.model.set_attn_implementation("eager")
    sequences = [*make_batch().sequences] * 2
    with FlopCounterMode(display=False) as counted:
        policy.logprobs(sequences)
    config, lengths = policy.model.config, [sequence.length for sequence in sequences]
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    half = sum(2 * width * length**2 for length in lengths)
    expected = FlopCounter(policy.model).forward(token_counts(sequences, packing))
    expected += -half if packing else half
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-6)


def test_training_takes_three_forward_passes_and_with_lora_little_more_than_two(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    lengths = [(30, 30, 3), (50, 20, 5)]
    counter = FlopCounter(model)
    assert counter.training(lengths) == 3 * counter.forward(lengths)
    adapted = FlopCounter(add_adapter(model, make_settings(lora_rank=1)).get_base_model())
    assert 2.0 < adapted.training(lengths) / adapted.forward(lengths) < 2.7


def test_the_peak_is_what_was_set_or_unknown():
    assert peak_flops(2.0) == 2e12
    if not torch.cuda.is_available():
        assert peak_flops(0.0) is None
