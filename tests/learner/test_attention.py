"""Packed attention: a row computes what its sequences alone do, and they do not see each other."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.common.errors import ConfigError
from penstock.learner.algorithm.batch import TrainSequence
from penstock.learner.policy.attention import NAME, packed_attention, use_packed_attention
from penstock.learner.policy.model import PolicyModel, load_model
from penstock.learner.policy.packing import Row, build_row
from tests.learner.builders import make_settings

TINY = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 64,
}  # fmt: skip
LENGTHS = [5, 1, 17, 9]
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-gqa": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2}),
    "qwen2-window": (
        Qwen2ForCausalLM, Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 1}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6, "num_key_value_heads": 2}),
}  # fmt: skip


def make_model(name: str, attention: str = NAME):
    torch.manual_seed(0)
    model, config, changes = MODELS[name]
    built = model(config(**(TINY | changes))).eval()
    built.set_attn_implementation("sdpa")
    if attention == NAME:
        use_packed_attention(built)
    return built


def make_row(changed: int | None = None) -> Row:
    """A row of sequences of LENGTHS; `changed` has other tokens."""
    random = np.random.default_rng(0)
    tokens = [random.integers(1, 40, length) for length in LENGTHS]
    if changed is not None:
        tokens[changed] = 1 + tokens[changed] % 39
    items = [TrainSequence(ids[:1], *[ids[1:].astype(float)] * 4, 0.0, 1.0) for ids in tokens]
    return build_row(items, torch.device("cpu"))


def sequences_of(row: Row) -> list[slice]:
    bounds = row.cu_seqlens.tolist()
    return [slice(start, end) for start, end in pairwise(bounds)]


def hidden_of(model, row: Row) -> Tensor:
    return model.base_model(**row.model_inputs).last_hidden_state[0]


def hidden_alone(model, row: Row) -> Tensor:
    """Every sequence in a forward pass of its own."""
    return torch.cat(
        [model.base_model(row.input_ids[:, part]).last_hidden_state[0] for part in sequences_of(row)]
    )


def gradients(model, hidden: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (hidden * weights).sum().backward()
    return {name: value.grad.clone() for name, value in model.base_model.named_parameters()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_row_computes_what_its_sequences_alone_do(name, checkpointing):
    row, reference, model = make_row(), make_model(name, "sdpa"), make_model(name)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    expected, found = hidden_alone(reference, row), hidden_of(model, row)
    assert_close(found, expected)
    right = gradients(reference, expected)
    for parameter, gradient in gradients(model, found).items():
        assert_close(gradient, right[parameter])


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_sequence_changes_no_other_sequences_output(name):
    model = make_model(name)
    before, after = hidden_of(model, make_row()), hidden_of(model, make_row(changed=2))
    for number, part in enumerate(sequences_of(make_row())):
        assert torch.equal(before[part], after[part]) == (number != 2)


def make_shared_row() -> tuple[Row, list[TrainSequence]]:
    """A row of six sequences, of which two and three have the same prompt."""
    random = np.random.default_rng(1)
    prompts = [random.integers(1, 40, length) for length in (7, 3, 5)]
    shapes = [(0, 4), (1, 2), (0, 0), (2, 6), (1, 1), (1, 9)]
    items = []
    for prompt, length in shapes:
        ids = random.integers(1, 40, length)
        items.append(TrainSequence(prompts[prompt], ids, *[ids.astype(float)] * 3, 0.0, 1.0))
    return build_row(items, torch.device("cpu")), items


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sequences_that_share_a_prompt_compute_what_they_do_alone(name, checkpointing):
    (row, items), reference, model = make_shared_row(), make_model(name, "sdpa"), make_model(name)
    assert row.input_ids.shape == (1, 7 + 3 + 5 + 4 + 2 + 0 + 6 + 1 + 9)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    alone = []
    for item in items:
        ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.token_ids]))[None]
        hidden = reference.base_model(ids).last_hidden_state[0]
        alone.append(hidden[len(item.prompt_ids) - 1 : -1])
    expected, found = torch.cat(alone), hidden_of(model, row)[row.predict_N.index]
    assert_close(found, expected)
    right = gradients(reference, expected)
    for parameter, gradient in gradients(model, found).items():
        assert_close(gradient, right[parameter])


def test_a_model_that_drops_the_shared_prompts_is_refused(monkeypatch):
    model = make_model("llama")
    policy = PolicyModel(model, make_settings())
    row, _ = make_shared_row()
    assert torch.isfinite(policy(row)[0]).all()
    monkeypatch.setattr(type(model.base_model), "forward", without_shared_prompts(model.base_model))
    row, _ = make_shared_row()
    with pytest.raises((ConfigError, IndexError), match="LEARNER_PACKING=false"):
        policy(row)


def without_shared_prompts(base):
    """A forward pass that leaves them out, and whose attention reads as far as the bounds say."""
    forward = type(base).forward

    def drop(self, shared_prompts=None, cu_seq_lens_q=None, **kwargs):
        length = kwargs["input_ids"].shape[1]
        return forward(self, cu_seq_lens_q=cu_seq_lens_q.clamp(max=length), **kwargs)

    return drop


def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """One sequence (heads, length, width), as loops."""
    heads, length, width = query.shape
    output = torch.zeros(length, heads, width, dtype=query.dtype)
    for head in range(heads):
        source = head * key.shape[0] // heads
        for at in range(length):
            first = 0 if window is None else max(0, at - window + 1)
            scores = torch.stack(
                [query[head, at] @ key[source, past] * 0.3 for past in range(first, at + 1)]
            )
            output[at, head] = scores.softmax(dim=0) @ value[source, first : at + 1]
    return output


@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_attention_is_that_of_slow_loops(window):
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 15, 8, dtype=torch.float64, generator=random) for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, 6, 7, 15], dtype=torch.int32)
    found, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None,
        scaling=0.3, sliding_window=window, cu_seq_lens_q=bounds, max_length_q=8,
    )  # fmt: skip
    for start, end in ((0, 6), (6, 7), (7, 15)):
        parts = (tensor[0, :, start:end] for tensor in (query, key, value))
        assert torch.allclose(found[0, start:end], attend(*parts, window), atol=1e-12)


def varlen_2_11(query, key, value, bounds, bounds_k, longest, longest_k, *, scale, window_size):
    """torch 2.11's varlen_attn in slow loops: as many key heads as query heads."""
    assert query.shape == key.shape == value.shape
    left, right = window_size
    assert (right, longest, scale) == (0, longest_k, 0.3)
    assert bounds is bounds_k
    parts = [
        attend(*(part[start:end].transpose(0, 1) for part in (query, key, value)), left + 1 or None)
        for start, end in pairwise(bounds.tolist())
    ]
    return torch.cat(parts)


def varlen_2_13(query, key, value, *bounds, enable_gqa=False, **options):
    """torch 2.13's: fewer key heads if it is told so."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    repeats = query.shape[1] // key.shape[1]
    return varlen_2_11(
        query, *(part.repeat_interleave(repeats, 1) for part in (key, value)), *bounds, **options
    )


@pytest.mark.parametrize("varlen", [varlen_2_11, varlen_2_13])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 4])
def test_a_gpu_gets_what_its_torch_takes(varlen, key_heads, window, monkeypatch):
    """A GPU's kernel is called with the same row as the other ways; loops stand in for it here."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("penstock.learner.policy.attention._can_use_flash", lambda *_: True)
    random = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, heads, 9, 8, generator=random) for heads in (4, key_heads, key_heads)]
    call = partial(
        packed_attention, torch.nn.Identity(), *qkv, None, scaling=0.3, sliding_window=window,
        cu_seq_lens_q=torch.tensor([0, 6, 9], dtype=torch.int32), max_length_q=6,
    )  # fmt: skip
    found, _ = call()
    monkeypatch.undo()
    assert torch.allclose(found, call()[0], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_mask_over_the_row_is_made(name, monkeypatch):
    shapes = []

    def watched(*args, attn_mask=None, **kwargs):
        shapes.append(None if attn_mask is None else tuple(attn_mask.shape))
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr("penstock.learner.policy.attention.scaled_dot_product_attention", watched)
    hidden_of(make_model(name), make_row())
    masks = [shape for shape in shapes if shape is not None]
    assert bool(masks) == (name == "mistral")
    assert all(max(shape) <= make_row().max_seqlen for shape in masks)


@pytest.mark.parametrize(
    "sizes", [[1], [16, 17], [128, 129], [1, 16, 17, 31, 32, 33, 128, 129, 140, 129]]
)
def test_short_and_long_sequences_come_back_in_their_order(sizes):
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 2, sum(sizes), 4, dtype=torch.float64, generator=random) for _ in range(3)]
    bounds = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
    found, _ = packed_attention(torch.nn.Identity(), *parts, None, cu_seq_lens_q=bounds)
    starts = [0, *np.cumsum(sizes)]
    for start, size in zip(starts, sizes, strict=False):
        alone = [part[:, :, start : start + size] for part in parts]
        expected = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)
        assert torch.allclose(found[:, start : start + size], expected.transpose(1, 2), atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_without_boundaries_it_is_ordinary_attention(name):
    """Whole sequences, padded batches, and generation with a cache."""
    reference, model = make_model(name, "sdpa"), make_model(name)
    ids = torch.randint(1, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    assert_close(model(ids).logits, reference(ids).logits)
    found = model(ids, attention_mask=padding).logits[padding.bool()]
    assert_close(found, reference(ids, attention_mask=padding).logits[padding.bool()])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


def test_packed_positions_without_boundaries_are_refused():
    row = make_row()
    with pytest.raises(ConfigError, match="was not given cu_seq_lens_q"):
        make_model("llama")(row.input_ids, position_ids=row.position_ids, use_cache=False)


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**TINY)), "caps its attention scores"),
        (
            lambda: GptOssForCausalLM(GptOssConfig(**TINY, num_local_experts=2, num_experts_per_tok=1)),
            "has attention sinks",
        ),
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1)),
         "carries a state from token to token"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=2)),
         "does not let its attention be replaced"),
        (lambda: Llama4ForCausalLM(Llama4TextConfig(**TINY, num_local_experts=2)),
         "another kind than causal attention"),
    ],
)  # fmt: skip
def test_a_model_of_which_rows_would_not_be_exact_is_refused(build, found):
    model = build()
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=found):
        use_packed_attention(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_a_call_that_asks_for_more_is_refused(extra):
    tensors = [torch.zeros(1, 4, 3, 8)] * 3
    bounds = torch.tensor([0, 3])
    with pytest.raises(ConfigError, match="packed rows do not compute"):
        packed_attention(
            torch.nn.Identity(), *tensors, None, cu_seq_lens_q=bounds, **{extra: tensors[0]}
        )


def test_attention_to_later_tokens_is_refused():
    tensors = [torch.zeros(1, 4, 3, 8)] * 3
    with pytest.raises(ConfigError, match="attends to later tokens"):
        packed_attention(torch.nn.Identity(), *tensors, None, is_causal=False)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_an_implementation_of_transformers_computes_the_same(model_folder, name) -> None:
    settings = make_settings(packing=False, attn_implementation=name)
    model = load_model(model_folder, settings)
    assert model.config._attn_implementation == name
    packed = load_model(model_folder, make_settings())
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, packed(ids).logits, atol=1e-5)


def test_an_implementation_is_refused_for_packed_rows_or_if_it_is_unknown(model_folder) -> None:
    with pytest.raises(ValueError, match="Set LEARNER_PACKING=false"):
        make_settings(attn_implementation="sdpa")
    for name in ("flash_attention_2", "no_such"):
        with pytest.raises(ConfigError, match=f"LEARNER_ATTN_IMPLEMENTATION={name} cannot be used here"):
            load_model(model_folder, make_settings(packing=False, attn_implementation=name))
