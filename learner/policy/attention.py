"""Exact attention for packed rows: every sequence attends to itself alone, causally.

Registered with transformers as "penstock_packed". The row's boundaries travel as `cu_seq_lens_q` and
`max_length_q` through the model's keyword arguments, the names that transformers' own flash attention
uses (`Row.model_inputs` has them). The cost is the sum of the squares of the sequences' lengths; no
mask over the row is ever made.

A call without boundaries is ordinary causal attention, as transformers' "sdpa" does it, so the model
can still generate and take padded batches. Packed positions without boundaries are refused.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.common.errors import ConfigError

NAME = "penstock_packed"

_UNSUPPORTED_ARGUMENTS = {
    "softcap": "caps its attention scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a bias to its attention scores",
    "indices": "has sparse attention",
    "block_indices": "has sparse attention",
}
"""Arguments of an attention call that change what is computed, and what their model does."""

_SHORT_TOKENS, _PADDING_STEP = 128, 16
"""Sequences of up to so many tokens go together, padded to a multiple of the step: a call costs more
than the few scores that padding adds."""

_BOUNDARIES_NEEDED = torch.empty(0)
"""Stands where a mask would, if the position ids start over in the row."""


def use_packed_attention(model: Any) -> None:
    """Switch a loaded Hugging Face model to packed attention.

    Raises ConfigError for a model of which a packed row would not compute what its sequences alone do.
    """
    reason = _unsupported_feature(model)
    if reason:
        raise ConfigError(
            f"{type(model).__name__} {reason}, which packed rows do not compute. "
            "Set LEARNER_PACKING=false, or choose another model."
        )
    model.set_attn_implementation(NAME)


def _unsupported_feature(model: Any) -> str:
    """What the model does that packed attention cannot; empty if nothing is known."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False):
        return "carries a state from token to token"
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        return "does not let its attention be replaced (transformers' AttentionInterface)"
    if kinds or getattr(config, "attention_chunk_size", None):
        return f"has layers of another kind than causal attention {sorted(kinds)}"
    if getattr(config, "attn_logit_softcapping", None):
        return _UNSUPPORTED_ARGUMENTS["softcap"]
    if any(getattr(module, "sinks", None) is not None for module in model.modules()):
        return _UNSUPPORTED_ARGUMENTS["s_aux"]
    return ""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a row: query (1, heads, L, width), result (1, L, heads, width).

    `cu_seq_lens_q` (S + 1,) is where its sequences start, and the end. Key and value may have fewer
    heads. `sliding_window` counts the tokens that one sees, itself included.
    """
    _refuse_unsupported_call(module, kwargs)
    if cu_seq_lens_q is None:
        return _unpacked_attention(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window, kwargs
        )
    if _can_use_flash(query, value, dropout):
        longest = max_length_q or int(cu_seq_lens_q.diff().max())
        return _flash_attention(query, key, value, cu_seq_lens_q, longest, scaling, sliding_window), None
    bounds = cu_seq_lens_q.tolist()
    return _attend_per_sequence(query, key, value, bounds, dropout, scaling, sliding_window), None


def _refuse_unsupported_call(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    found = [what for name, what in _UNSUPPORTED_ARGUMENTS.items() if kwargs.get(name) is not None]
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        found.append("attends to later tokens")
    if found:
        raise ConfigError(
            f"the model {found[0]} ({type(module).__name__}), which packed rows do not compute. "
            "Set LEARNER_PACKING=false, or choose another model."
        )


def _unpacked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    window: int | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Rows that are one sequence each; with a mask or a cache, transformers' own sdpa."""
    if mask is _BOUNDARIES_NEEDED:
        raise ConfigError(
            f"position ids start over within the row, but {type(module).__name__} was not given "
            "cu_seq_lens_q. Pass Row.model_inputs; if they were passed, the model drops them: "
            "set LEARNER_PACKING=false."
        )
    if mask is None and query.shape[2] == key.shape[2]:
        return _causal_attention(query, key, value, dropout, scaling, window).transpose(
            1, 2
        ).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _attend_per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: list[int],
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One call per long sequence, and one for all short ones of like length."""
    tokens = [part[0].transpose(0, 1) for part in (query, key, value)]
    outputs = []
    alike = _group_by_length(tuple(bounds), query.device)
    for sequences, width, index, valid in alike.parts:
        queries, keys, values = (
            part.index_select(0, index).unflatten(0, (sequences, width)).transpose(1, 2)
            for part in tokens
        )
        output = _causal_attention(queries, keys, values, dropout, scaling, window)
        outputs.append(output.transpose(1, 2).flatten(0, 1).index_select(0, valid))
    return torch.cat(outputs).index_select(0, alike.order).unsqueeze(0)


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Sequences side by side, (B, heads, width, head size); padding behind them changes nothing."""
    width = query.shape[2]
    mask = _window_mask(width, window, query.device) if window is not None and width > window else None
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class _SequencesByLength(NamedTuple):
    """A row's sequences in parts of like length."""

    parts: list[tuple[int, int, Tensor, Tensor]]
    """Per part: sequences, width, their places in the row (sequences x width,), which are no padding."""
    order: Tensor
    """(L,): where each position of the row lies when the parts' tokens are put end to end."""


@lru_cache(maxsize=2)  # every layer of a pass asks for the same row
def _group_by_length(bounds: tuple[int, ...], device: torch.device) -> _SequencesByLength:
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    classes = torch.where(
        lengths <= _SHORT_TOKENS, (lengths + _PADDING_STEP - 1) // _PADDING_STEP * _PADDING_STEP, lengths
    )
    parts, places = [], []
    for size in classes.unique().tolist():
        alike = (classes == size).nonzero()[:, 0]
        for members in [alike] if size <= _SHORT_TOKENS else alike.split(1):
            width = int(lengths[members].max())
            offsets = torch.minimum(torch.arange(width), lengths[members, None] - 1)
            index = (starts[members, None] + offsets).flatten()
            valid = (torch.arange(width) < lengths[members, None]).flatten().nonzero()[:, 0]
            parts.append((len(members), width, index.to(device), valid.to(device)))
            places.append(index[valid])
    return _SequencesByLength(parts, torch.argsort(torch.cat(places)).to(device))


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length), true where a token (row) sees another."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril_().triu_(1 - window)


def _can_use_flash(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's variable-length flash attention can do it: no fp32, no dropout, width by 8."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and dropout == 0.0
        and width == value.shape[-1]
        and width <= 256
        and width % 8 == 0
    )


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One call for the row, on CUDA."""
    from torch.nn.attention.varlen import varlen_attn  # needs torch 2.10

    queries, keys, values = (
        part.squeeze(0).transpose(0, 1).contiguous() for part in (query, key, value)
    )
    # The kernel counts the tokens before the one that looks.
    left = -1 if window is None else window - 1
    output = varlen_attn(
        queries,
        keys,
        values,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    assert isinstance(output, Tensor)  # no auxiliary output was asked for
    return output.unsqueeze(0)


def _make_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """No mask for whole sequences; for padding and caches that of "sdpa"."""
    if attention_mask is not None or q_length != kv_length:
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            **kwargs,
        )
    if use_vmap:
        raise ConfigError(
            "the model has an attention mask of its own making, which packed rows do not compute. "
            "Set LEARNER_PACKING=false, or choose another model."
        )
    return None if allow_is_causal_skip else _BOUNDARIES_NEEDED


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _make_mask)
