"""Log-probabilities and entropies of chosen tokens, without ever holding all of their logits.

Logits of N tokens over V words are the largest tensor of an Update: 16,384 x 151,936 in fp32 are 10 GB,
and a plain log_softmax with its gradient needs several of that size. Here the forward pass goes over
chunks of tokens and keeps three numbers per token; the backward pass computes the logits again.

Dimensions: N tokens, D width of the hidden states, V words of the vocabulary.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from penstock.common.errors import ConfigError

_LOGIT_CHANGING_SETTINGS = (
    "final_logit_softcapping",  # Gemma 2 to 4, NanoChat, VaultGemma
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
    "logit_scale",  # Cohere
    "logits_scaling",  # Granite divides by it, HyperCLOVAX multiplies, MiniCPM3 scales before the head
    "logits_mup_width_multiplier",  # Inkling
    "output_multiplier",  # Muse
    "lm_head_multiplier",  # Falcon-H1
)
"""Settings of transformers' models whose logits are more than the output layer of the hidden states."""


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, token_ids_N: Tensor, temperature_N: Tensor | None, *,
    bias_V: Tensor | None = None, chunk: int, fp32: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-probabilities of the tokens at their temperatures, and entropies; both (N,), in nats.

    logits = (hidden @ weight.T + bias) / temperature, computed in the hidden states' dtype, or in fp32
    with `fp32`. A temperature of None is 1 for all, and saves time. Softmax and sums are computed in
    fp32 (float64 for float64). Both results carry gradients to hidden, weight and bias; second
    derivatives are not implemented. Memory: the logits of `chunk` >= 1 tokens in two tensors, forwards,
    and backwards if the entropy has a gradient; also the results and the weight's gradient. 1,024 tokens
    x 151,936 words in fp32: 0.6 GB.
    Example: logits [0, 0] at any temperature give log-probability -0.693 and entropy 0.693.
    """
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, token_ids_N, temperature_N, chunk, fp32
    )
    return logprobs_N, entropy_N


class LogprobHead(nn.Module):
    """The module form of `token_logprobs` for an output layer with weight (V, D) and bias (V,) or None.

    `chunk` is the number of tokens whose logits are held at a time; `fp32` computes the logits in fp32.
    The module holds the Parameter itself, so that ZeRO-3 gathers the weight as for any other layer.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chunk: int, fp32: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.chunk, self.fp32 = weight, bias, chunk, fp32

    def forward(
        self, hidden_ND: Tensor, token_ids_N: Tensor, temperature_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `token_ids_N` and entropies, both (N,), in nats, with gradients.

        The logits of the hidden states `hidden_ND` are divided by `temperature_N`, above 0; None is 1.
        """
        return token_logprobs(
            hidden_ND, self.weight, token_ids_N, temperature_N,
            bias_V=self.bias, chunk=self.chunk, fp32=self.fp32,
        )  # fmt: skip


def make_logprob_head(model: PreTrainedModel, chunk: int, fp32: bool) -> LogprobHead:
    """Return the head that maps a Hugging Face model's last hidden states to log-probabilities.

    `chunk` is the number of tokens whose logits are held at a time; `fp32` computes the logits in fp32.
    For a PEFT model pass the wrapped model (`get_base_model()`). Raise ConfigError for a model whose
    logits are more than its output layer, a torch.nn.Linear, applied to these hidden states.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    for key in _LOGIT_CHANGING_SETTINGS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"{name} has {key}={getattr(config, key)}, so its logits are not head(hidden states), "
                "which the learner computes. Choose a model without this setting."
            )
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"the output layer of {name} is {type(head).__name__}, not torch.nn.Linear. Choose a plain "
            "causal language model, unquantised, and keep adapters off its output layer."
        )
    others = (part for part in model.named_children() if part[1] not in (head, model.base_model))
    between = [child for child, module in others if list(module.parameters())]
    if between:
        raise ConfigError(
            f"{name} has layers besides its base model and its output layer ({', '.join(between)}), so "
            "its logits are not head(hidden states). Choose a plain causal language model."
        )
    return LogprobHead(head.weight, head.bias, chunk, fp32)


class _TokenLogprobs(torch.autograd.Function):
    """The autograd function of `token_logprobs`.

    Gradients, with p the softmax, H the entropy and T the temperature:
    d logprob / d logits = (onehot - p) / T and d H / d logits = -p (log p + H) / T.
    The chosen token's is computed on its own, from its log-probability.

    The backward pass goes over slices of the vocabulary, not of the tokens. The saved log-sum-exp makes
    the slices independent, and one matrix product gives the rows of the weight's gradient. A sum over
    chunks of tokens would round these rows to bf16 once per chunk, or need an fp32 copy of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_ids_N: Tensor,
        temperature_N: Tensor | None, chunk: int, fp32: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return log-probabilities, entropies (N,) by chunks of tokens; save in `ctx` for `backward`."""
        count, dtype = len(hidden_ND), _reduction_dtype(hidden_ND)
        logprobs, entropy, lse = (hidden_ND.new_empty(count, dtype=dtype) for _ in range(3))
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            temperature = None if temperature_N is None else temperature_N[part]
            logits = _compute_logits(hidden_ND[part], weight_VD, bias_V, fp32)
            reduced = _on_device(_reduce, logits, token_ids_N[part], temperature)
            logprobs[part], entropy[part], lse[part] = reduced
            del logits  # or two chunks' logits would exist while the next chunk is computed
        # The Parameter itself: ZeRO-3 frees its data until the backward pass, which a view would keep.
        per_token = token_ids_N, temperature_N, lse, entropy, logprobs
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, *per_token)
        ctx.chunk, ctx.fp32 = chunk, fp32
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients to hidden states, weight and bias, and None for the other four inputs.

        `grads` are those to log-probabilities and entropies, None for one without. A gradient that is
        not wanted is None. The logits are computed again.
        """
        hidden, weight, bias, ids, temperature, lse, entropy, logprobs = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * 7
        sums = _GradientSums(hidden, weight, bias, ctx.needs_input_grad)
        chosen = _chosen_grad(logprobs, temperature, entropy, *grads)
        width = _slice_width(ctx.chunk * len(weight) // max(1, len(hidden)))
        for start in range(0, len(weight), width):
            part = slice(start, start + width)
            logits = _compute_logits(
                hidden, weight[part], None if bias is None else bias[part], ctx.fp32
            )
            grad = _on_device(_logit_grad, logits, temperature, lse, entropy, *grads)
            _put_chosen_(grad, start, ids, chosen)
            sums.add(part, grad, ctx.fp32)
            del logits, grad  # or two slices' would exist while the next slice is computed
        return sums.to_hidden, sums.to_weight, sums.to_bias, None, None, None, None


class _GradientSums:
    """Sums of the gradients to hidden states (N, D), weight (V, D) and bias (V,), over parts of words.

    `wanted` says in this order which are computed; the others are None.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self._hidden, self._weight = hidden, weight
        self._to_hidden = torch.zeros_like(hidden, dtype=_reduction_dtype(hidden)) if wanted[0] else None
        self.to_weight = torch.empty_like(weight) if wanted[1] else None
        self.to_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None

    def add(self, part: slice, grad: Tensor, fp32: bool) -> None:
        """Take in `grad` (N, width), the gradient of the logits of words `part`; each part comes once.

        `fp32` multiplies in fp32, else in the dtype of the hidden states.
        """
        hidden, weight = self._hidden, self._weight[part]
        if self.to_bias is not None:
            self.to_bias[part] = grad.sum(dim=0)
        if fp32:
            hidden, weight = hidden.to(grad.dtype), weight.to(grad.dtype)
        else:
            grad = grad.to(hidden.dtype)
        if self._to_hidden is not None and grad.dtype == self._to_hidden.dtype:
            self._to_hidden.addmm_(grad, weight)
        elif self._to_hidden is not None:
            self._to_hidden += grad @ weight
        if self.to_weight is not None and grad.dtype == self.to_weight.dtype:
            torch.mm(grad.T, hidden, out=self.to_weight[part])
        elif self.to_weight is not None:
            self.to_weight[part] = grad.T @ hidden

    @property
    def to_hidden(self) -> Tensor | None:
        """Return the gradient to the hidden states (N, D) in their dtype, None if not wanted."""
        return None if self._to_hidden is None else self._to_hidden.to(self._hidden.dtype)


def _reduction_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of softmax and sums: float64 for float64, else float32."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


_CAST_ROWS = 8192  # rows of the output weight that are cast to fp32 at a time


def _compute_logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, fp32: bool) -> Tensor:
    """Return new logits (N, V) before temperature, in the dtype of the hidden states.

    With `fp32` they are computed in float32, float64 for float64 hidden states.
    """
    dtype = _reduction_dtype(hidden_ND)
    if not fp32 or weight_VD.dtype == dtype:
        hidden = hidden_ND.to(weight_VD.dtype) if fp32 else hidden_ND
        return nn.functional.linear(hidden, weight_VD, bias_V)
    hidden = hidden_ND.to(dtype)
    logits = hidden.new_empty(len(hidden), len(weight_VD))
    for start in range(0, len(weight_VD), _CAST_ROWS):
        part = slice(start, start + _CAST_ROWS)
        torch.mm(hidden, weight_VD[part].to(dtype).T, out=logits[:, part])
    return logits if bias_V is None else logits.add_(bias_V)


def _slice_width(words: int) -> int:
    """Return how many words a slice of the vocabulary has: `words` or a few less, 1 at least.

    A multiple of 256 where possible: with odd widths products took 5 to 8 times as long on an H100.
    """
    return max(1, words // _ALIGNED * _ALIGNED or words)


_ALIGNED = 256


def _on_device(function: Callable[..., Any], logits: Tensor, *others: Tensor | None) -> Any:
    """Return function(logits, *others), on a GPU by kernels that read and write `logits` once.

    torch.compile makes them at the first call, in some seconds; TORCH_COMPILE_DISABLE=1 does without.
    """
    return (_compiled(function) if logits.is_cuda else function)(logits, *others)


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled for any sizes."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _reduce(
    logits_NV: Tensor, token_ids_N: Tensor, temperature_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the tokens, entropies and log-sum-exps, (N,) each, in fp32 or float64.

    `logits_NV` are before temperature, and may be overwritten.
    """
    dtype = _reduction_dtype(logits_NV)
    largest = logits_NV.amax(dim=-1).to(dtype)
    shifted = logits_NV.to(dtype).sub_(largest[:, None])
    if temperature_N is not None:  # each pass over all logits that is left out saves time
        shifted, largest = shifted.div_(temperature_N[:, None]), largest / temperature_N
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    entropy = log_total - torch.linalg.vecdot(weights, shifted) / total
    chosen = shifted.gather(-1, token_ids_N[:, None]).squeeze(-1)
    return chosen - log_total, entropy, largest + log_total


def _logit_grad(
    logits_NW: Tensor, temperature_N: Tensor | None, lse_N: Tensor, entropy_N: Tensor,
    grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient to the logits of W words, (N, W), in their dtype, right but for chosen tokens.

    `logits_NW` are before temperature, and may be overwritten. `lse_N` (log-sum-exp) and `entropy_N` are
    those of the whole vocabulary after temperature. `grad_logprobs_N` and `grad_entropy_N` are the
    gradients of the loss to the tokens' log-probabilities and entropies. One of them may be None: 0.
    """
    logits = logits_NW.to(lse_N.dtype)
    if temperature_N is not None:
        logits = logits.div_(temperature_N[:, None])
    logprobs = logits.sub_(lse_N[:, None])
    if grad_entropy_N is None:
        grad = logprobs.exp_()
        if grad_logprobs_N is not None:
            grad = grad.mul_(-grad_logprobs_N[:, None])
    else:
        probabilities = logprobs.exp()
        constant = grad_entropy_N * entropy_N
        if grad_logprobs_N is not None:
            constant = constant + grad_logprobs_N
        grad = logprobs.mul_(-grad_entropy_N[:, None]).sub_(constant[:, None]).mul_(probabilities)
    grad = grad if temperature_N is None else grad.div_(temperature_N[:, None])
    return grad.to(logits_NW.dtype)


def _chosen_grad(
    logprobs_N: Tensor, temperature_N: Tensor | None, entropy_N: Tensor,
    grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient to the logits of the tokens whose log-probabilities are `logprobs_N`, (N,).

    The other arguments are as for `_logit_grad`.
    """
    probabilities, grad = logprobs_N.exp(), torch.zeros_like(logprobs_N)
    if grad_logprobs_N is not None:
        grad = grad + grad_logprobs_N * -torch.expm1(logprobs_N)
    if grad_entropy_N is not None:
        grad = grad - grad_entropy_N * probabilities * (logprobs_N + entropy_N)
    return grad if temperature_N is None else grad / temperature_N


def _put_chosen_(grad_NW: Tensor, start: int, token_ids_N: Tensor, chosen_N: Tensor) -> None:
    """Write `chosen_N` into the columns of its tokens, of those among the W words from `start` on."""
    words = grad_NW.shape[1]
    inside = (token_ids_N >= start) & (token_ids_N < start + words)
    columns = (token_ids_N - start).clamp(0, words - 1)[:, None]
    present = grad_NW.gather(1, columns)
    chosen = torch.where(inside[:, None], chosen_N[:, None].to(grad_NW.dtype), present)
    grad_NW.scatter_(1, columns, chosen)
