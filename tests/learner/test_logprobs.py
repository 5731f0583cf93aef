"""Chunked log-probabilities against dense ones, and which models' heads they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
)

from penstock.common.errors import ConfigError
from penstock.learner.policy.logprobs import LogprobHead, make_logprob_head, token_logprobs

N, V, D = 11, 37, 6
TINY = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip


def random_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(N, D, dtype=dtype, generator=random).requires_grad_(),
        "weight": torch.randn(V, D, dtype=dtype, generator=random).requires_grad_(),
        "bias": torch.randn(V, dtype=dtype, generator=random).requires_grad_(),
        "ids": torch.randint(0, V, (N,), generator=random),
        "temperature": 0.5 + torch.rand(N, generator=random),
        "upstream": torch.randn(2, N, dtype=dtype, generator=random),
    }


def dense(inputs: dict[str, Tensor], bias: bool = True) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once."""
    logits = inputs["hidden"] @ inputs["weight"].T + (inputs["bias"] if bias else 0)
    heat = 1.0 if inputs["temperature"] is None else inputs["temperature"][:, None]
    logprobs = torch.log_softmax(logits / heat, dim=-1)
    return logprobs[torch.arange(N), inputs["ids"]], -(logprobs.exp() * logprobs).sum(dim=-1)


def chunked(
    inputs: dict[str, Tensor], chunk: int, bias: bool = True, fp32: bool = False
) -> tuple[Tensor, Tensor]:
    return token_logprobs(
        inputs["hidden"], inputs["weight"], inputs["ids"], inputs["temperature"],
        bias_V=inputs["bias"] if bias else None, chunk=chunk, fp32=fp32,
    )  # fmt: skip


def gradients(
    results: tuple[Tensor, Tensor], inputs: dict[str, Tensor], bias: bool = True
) -> tuple[Tensor, ...]:
    """Of a random weighting of all results whose upstream weights are not all zero."""
    used = [n for n in (0, 1) if inputs["upstream"][n].any()]
    wanted = [inputs[name] for name in ("hidden", "weight", "bias")[: 3 if bias else 2]]
    return torch.autograd.grad([results[n] for n in used], wanted, [inputs["upstream"][n] for n in used])


def assert_same(results, expected, tolerance: float = 1e-9) -> None:
    for result, right in zip(results, expected, strict=True):
        assert (result - right).abs().max() <= tolerance


@pytest.mark.parametrize("chunk", [1, 2, 4, N, N + 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silent", [None, 0, 1], ids=["both", "entropy", "logprob"])
@pytest.mark.parametrize("heated", [True, False])
def test_values_and_gradients_are_those_of_a_dense_log_softmax(chunk, bias, silent, heated):
    inputs = random_inputs()
    if not heated:
        inputs["temperature"] = None
    if silent is not None:
        inputs["upstream"][silent] = 0
    results, expected = chunked(inputs, chunk, bias), dense(inputs, bias)
    assert_same(results, expected)
    assert_same(gradients(results, inputs, bias), gradients(expected, inputs, bias))


@pytest.mark.parametrize("dead", [slice(2, 7), slice(0, N)], ids=["some", "all"])
def test_tokens_without_a_gradient_give_none(dead):
    inputs = random_inputs()
    inputs["upstream"][:, dead] = 0
    results = chunked(inputs, 3)
    loss = (torch.stack(results) * inputs["upstream"]).sum()
    wanted = [inputs[name] for name in ("hidden", "weight", "bias")]
    found = torch.autograd.grad(loss, wanted)
    expected = torch.autograd.grad((torch.stack(dense(inputs)) * inputs["upstream"]).sum(), wanted)
    assert_same(found, expected)
    assert not found[0][dead].any()


def test_a_gradient_that_is_not_finite_is_not_hidden():
    inputs = random_inputs()
    inputs["upstream"][0, 3] = float("nan")
    hidden, *_ = gradients(chunked(inputs, 4), inputs)
    assert hidden[3].isnan().all()


def test_finite_differences_agree():
    inputs = random_inputs()
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: token_logprobs(
            hidden, weight, inputs["ids"], inputs["temperature"].double(),
            bias_V=bias, chunk=4, fp32=False,
        ),
        (inputs["hidden"], inputs["weight"], inputs["bias"]),
    )  # fmt: skip


def test_no_tokens_are_no_log_probabilities():
    inputs = random_inputs()
    hidden = inputs["hidden"][:0]
    logprobs, entropy = token_logprobs(
        hidden, inputs["weight"], inputs["ids"][:0], inputs["temperature"][:0], chunk=4, fp32=False
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert not inputs["weight"].grad.any()


def test_a_weight_shared_with_the_embedding_gets_both_gradients():
    inputs = random_inputs()

    def gradient(function) -> Tensor:
        embedded = torch.nn.functional.embedding(inputs["ids"].flip(0), inputs["weight"])
        results = function(inputs | {"hidden": embedded.tanh()})
        return torch.autograd.grad(results[0].sum() + results[1].sum(), inputs["weight"])[0]

    assert_same([gradient(lambda tied: chunked(tied, 3))], [gradient(dense)])


def test_checkpointing_changes_nothing():
    inputs = random_inputs()
    results = checkpoint(chunked, inputs, 4, use_reentrant=False)
    assert_same(gradients(results, inputs), gradients(dense(inputs), inputs))


def test_bf16_logits_are_rounded_and_fp32_ones_are_not():
    inputs = random_inputs(torch.bfloat16)
    exact = {name: value.detach() for name, value in inputs.items()}
    for name in ("hidden", "weight", "bias"):
        exact[name] = exact[name].double().requires_grad_()
    exact["upstream"] = inputs["upstream"] = inputs["upstream"].float()
    rounded, cast = chunked(inputs, 4), chunked(inputs, 4, fp32=True)
    assert rounded[0].dtype == cast[0].dtype == torch.float32
    assert_same(cast, dense(exact), 1e-5)
    assert 1e-4 < (rounded[0] - dense(exact)[0]).abs().max() < 0.1
    for result, right in zip(gradients(cast, inputs), gradients(dense(exact), exact), strict=True):
        assert result.dtype == torch.bfloat16  # the one rounding there is: half of 2^-7 of the value
        assert torch.allclose(result.double(), right, rtol=2**-8, atol=1e-5)


def test_in_bf16_the_weights_gradient_is_rounded_once_however_small_the_chunks():
    inputs = random_inputs(torch.bfloat16)
    inputs["upstream"] = inputs["upstream"].float()
    _, whole, _ = gradients(chunked(inputs, N), inputs)
    _, pieces, _ = gradients(chunked(inputs, 1), inputs)
    assert torch.allclose(pieces, whole, rtol=2**-7, atol=1e-6)


def largest_tensor(function) -> int:
    """Elements of the largest tensor that `function` makes, forwards and backwards."""
    seen = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple | list) else [result]
            seen[0] = max([seen[0], *(out.numel() for out in outputs if isinstance(out, Tensor))])
            return result

    with Watch():
        function()
    return seen[0]


@pytest.mark.parametrize("fp32", [False, True])
def test_no_tensor_is_larger_than_a_chunks_logits(fp32):
    inputs = random_inputs(torch.bfloat16)
    largest = largest_tensor(lambda: torch.stack(chunked(inputs, 7, fp32=fp32)).sum().backward())
    assert largest == 7 * V > V * D


def test_a_models_head_gives_what_its_logits_give():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))
    head = make_logprob_head(model, chunk=3, fp32=False)
    ids = torch.randint(0, 32, (1, 9))
    temperature = torch.full((8,), 0.7)
    hidden = model.base_model(ids).last_hidden_state[0, :-1]
    logprobs, _ = head(hidden, ids[0, 1:], temperature)
    dense_logprobs = torch.log_softmax(model(ids).logits[0, :-1] / 0.7, dim=-1)
    assert head.weight is model.model.embed_tokens.weight
    assert torch.allclose(logprobs, dense_logprobs[torch.arange(8), ids[0, 1:]], atol=1e-6)


def tiny(model, config, **changes):
    return model(config(**(TINY | changes)))


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: tiny(Gemma2ForCausalLM, Gemma2Config), "final_logit_softcapping=30.0"),
        (lambda: tiny(CohereForCausalLM, CohereConfig, logit_scale=0.0625), "logit_scale=0.0625"),
        (lambda: tiny(GraniteForCausalLM, GraniteConfig, logits_scaling=8.0), "logits_scaling=8.0"),
        (
            lambda: tiny(
                ModernBertDecoderForCausalLM, ModernBertDecoderConfig, layer_types=["full_attention"]
            ),
            "lm_head",
        ),
    ],
)
def test_a_model_that_reworks_its_logits_is_refused(build, found):
    with pytest.raises(ConfigError, match=found):
        make_logprob_head(build(), chunk=4, fp32=False)


def test_a_scale_of_one_is_no_reworking():
    model = tiny(GraniteForCausalLM, GraniteConfig, logits_scaling=1.0)
    assert isinstance(make_logprob_head(model, chunk=4, fp32=False), LogprobHead)


def test_a_quantised_or_adapted_head_is_refused():
    class Adapted(torch.nn.Linear):
        pass

    model = tiny(LlamaForCausalLM, LlamaConfig)
    model.set_output_embeddings(Adapted(32, 32, bias=False))
    with pytest.raises(ConfigError, match="is Adapted, not"):
        make_logprob_head(model, chunk=4, fp32=False)
