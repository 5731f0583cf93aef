"""The count of operations, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from learner.flops import FlopCounter, peak_flops


def test_the_count_is_torchs_own_but_for_the_causal_half_of_attention(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    length = 24
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(length).unsqueeze(0) % 30)
    config = model.config
    half = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length**2
    rotary = 2 * length * config.head_dim // 2  # positions times frequencies, a product too
    assert FlopCounter(model).forward([length]) + half + rotary == pytest.approx(
        counted.get_total_flops(), rel=1e-3
    )


def test_training_takes_three_forward_passes(model_folder):
    counter = FlopCounter(AutoModelForCausalLM.from_pretrained(model_folder))
    assert counter.training([3, 5]) == 3 * (counter.forward([3]) + counter.forward([5]))


def test_the_peak_is_what_was_set_or_unknown():
    assert peak_flops(2.0) == 2e12
    if not torch.cuda.is_available():
        assert peak_flops(0.0) is None
