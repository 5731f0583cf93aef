"""Exact attention for packed rows: causal within each sequence, none between sequences.

Registered with transformers as "penstock_packed". The sequences' boundaries reach the attention as the
model's keyword arguments `cu_seq_lens_q` and `max_length_q`, the names of transformers' own flash
attention (see `Row.model_inputs`). No mask of the row's size is made: a row of two sequences of 100 and
300 tokens costs 100^2 + 300^2 scores, not 400^2.

A call without boundaries computes ordinary causal attention like transformers' "sdpa", so the model can
still generate and accept padded batches. Packed positions without boundaries raise ConfigError.
"""

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.common.errors import ConfigError
from penstock.learner.policy.packing import SharedPrompts, gather_rows

NAME = "penstock_packed"

_UNSUPPORTED_ARGUMENTS = {
    "softcap": "caps its attention scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a bias to its attention scores",
    "indices": "has sparse attention",
    "block_indices": "has sparse attention",
}
"""Arguments of an attention call that packed attention does not implement, with a text for the error."""

_REFUSAL = "{}, which packed rows do not compute. Set LEARNER_PACKING=false, or choose another model."

_SHORT_TOKENS, _PADDING_STEP = 128, 16
"""Sequences of up to 128 tokens are padded to a multiple of 16 and computed in one call per length.

Example: sequences of 17, 20 and 30 tokens are one call of three sequences of up to 32 tokens. One call
costs more than the scores of at most 15 padding tokens."""

_BOUNDARIES_NEEDED = torch.empty(0)
"""Passed to the attention instead of a mask when position ids restart at 0 within the row. The sequences
of such a row need boundaries; without boundaries the attention raises ConfigError."""


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a Hugging Face model, in place, to packed attention: rows of several sequences.

    Raise ConfigError, before any change, if packed attention cannot compute the model exactly, because
    of a feature that `_unsupported_feature` finds, such as attention sinks.
    """
    reason = _unsupported_feature(model)
    if reason:
        raise ConfigError(_REFUSAL.format(f"{type(model).__name__} {reason}"))
    model.set_attn_implementation(NAME)


def _unsupported_feature(model: PreTrainedModel) -> str:
    """Return why packed attention cannot compute the model, as "has attention sinks"; "" if it can.

    Other reasons: a state carried from token to token, attention that transformers cannot replace,
    layers of another kind than full or sliding-window attention, and attention scores with a cap.
    """
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


_QKV = tuple[Tensor, Tensor, Tensor]  # query, key, value


class _Options(NamedTuple):
    """The options of an attention call, named as by torch's scaled_dot_product_attention."""

    dropout: float
    scale: float | None
    window: int | None


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None,
    shared_prompts: SharedPrompts | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention output (1, L, heads, width) of a row's query (1, heads, L, width), and None.

    `cu_seq_lens_q` has the starts of the sequences, then their end: [0, 3, 8] are 3 and 5 tokens, of
    which `max_length_q` is 5, and `attention_mask` is unused. `shared_prompts`: the sequences share
    positions. cu_seq_lens_q None: each of B rows is one sequence, padded by `attention_mask`. Key and
    value may have fewer heads. `sliding_window` counts the tokens that a token sees, itself too. Raise
    ConfigError for unsupported `kwargs`, or a packed row without boundaries.
    """
    _refuse_unsupported_call(module, kwargs)
    qkv, options = (query, key, value), _Options(dropout, scaling, sliding_window)
    if cu_seq_lens_q is None:
        return _unpacked_attention(module, qkv, attention_mask, options, kwargs)
    if shared_prompts is None:
        return _attend(qkv, cu_seq_lens_q, max_length_q, options), None
    shared_prompts.used = True
    query, key, value = (
        gather_rows(part[0].transpose(0, 1), shared_prompts.positions_F).transpose(0, 1)[None]
        for part in qkv
    )
    output = _attend((query, key, value), cu_seq_lens_q, max_length_q, options)
    return gather_rows(output[0], shared_prompts.first_L)[None], None


def _attend(qkv: _QKV, bounds: Tensor, longest: int | None, options: _Options) -> Tensor:
    """Return the attention (1, F, heads, width) of whole sequences, one after the other.

    `qkv` are query, key and value, (1, heads, F, width) each. `bounds` [0, 3, 8] are sequences of 3 and
    5 tokens; `longest` is then 5, or None if it is not known.
    """
    query, _, value = qkv
    if _can_use_flash(query, value, options.dropout):
        return _flash_attention(qkv, bounds, longest or int(bounds.diff().max()), options)
    return _attend_per_sequence(qkv, bounds.tolist(), options)


def _refuse_unsupported_call(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError if the call asks for attention that packed rows do not compute.

    Refused is each of the arguments softcap, s_aux, position_bias, indices and block_indices that is in
    `kwargs` and not None. Refused is attention to later tokens too: is_causal is False in `kwargs` or,
    if missing or None there, as an attribute of `module`. Without is_causal the attention is causal.
    """
    found = [what for name, what in _UNSUPPORTED_ARGUMENTS.items() if kwargs.get(name) is not None]
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        found.append("attends to later tokens")
    if found:
        raise ConfigError(_REFUSAL.format(f"the model {found[0]} ({type(module).__name__})"))


def _unpacked_attention(
    module: torch.nn.Module, qkv: _QKV, mask: Tensor | None, options: _Options, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Return the attention (B, L, heads, width) of a batch whose rows are one sequence each, and None.

    If there is a `mask` or a key cache, transformers' sdpa computes it with `kwargs`, to which dropout
    and scaling are added. Else it is causal, within options.window. Raise ConfigError for a packed row,
    whose mask is the marker _BOUNDARIES_NEEDED.
    """
    if mask is _BOUNDARIES_NEEDED:
        raise ConfigError(
            f"this model cannot train on packed rows: set LEARNER_PACKING=false. (Position ids start "
            f"over within a row, but {type(module).__name__} was not given cu_seq_lens_q.)"
        )
    query, key, _ = qkv
    if mask is None and query.shape[2] == key.shape[2]:
        return _causal_attention(*qkv, options).transpose(1, 2).contiguous(), None
    dropout, scale, _ = options
    kwargs |= {"dropout": dropout, "scaling": scale}
    return cast(tuple[Tensor, None], sdpa_attention_forward(module, *qkv, mask, **kwargs))


def _attend_per_sequence(qkv: _QKV, bounds: list[int], options: _Options) -> Tensor:
    """Return the row's attention (1, L, heads, width). Short sequences of like length share a call.

    `bounds` [0, 3, 8] are sequences of 3 and 5 tokens, which see only tokens of their own. `qkv` are
    query, key and value, (1, heads, L, width) each.
    """
    tokens = [part[0].transpose(0, 1) for part in qkv]
    outputs = []
    groups = _group_by_length(tuple(bounds), tokens[0].device)
    for sequences, width, index, valid in groups.parts:
        queries, keys, values = (
            part.index_select(0, index).unflatten(0, (sequences, width)).transpose(1, 2)
            for part in tokens
        )
        output = _causal_attention(queries, keys, values, options)
        outputs.append(output.transpose(1, 2).flatten(0, 1).index_select(0, valid))
    return torch.cat(outputs).index_select(0, groups.order).unsqueeze(0)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
    """Return causal attention (B, heads, width, head size) of B sequences of the same padded width.

    Key and value may have fewer heads. A token sees itself and all tokens before it; with
    `options.window` 3 itself and the 2 before it. Dropout and scale are those of `options`. Padding
    behind a sequence changes no output of the sequence, because attention is causal.
    """
    dropout, scale, window = options
    width, mask = query.shape[2], None
    if window is not None and width > window:  # row i is true at the `window` columns up to column i
        mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


class _SequencesByLength(NamedTuple):
    """The sequences of a row, grouped into parts of the same padded length."""

    parts: list[tuple[int, int, Tensor, Tensor]]
    """Per part: number of sequences, padded width, the position in the row of each padded token
    (sequences x width,), and the indices of those that are no padding."""
    order: Tensor
    """(L,): the index of each position of the row in the concatenated tokens of all parts."""


@lru_cache(maxsize=2)  # every layer of a forward pass calls with the same row
def _group_by_length(bounds: tuple[int, ...], device: torch.device) -> _SequencesByLength:
    """Return a row's sequences in parts of like length, on `device`; `bounds` [0, 3] is one of 3 tokens.

    Up to 128 tokens, those with the same next multiple of 16 share a part; a longer one has its own.
    """
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    padded = (lengths + _PADDING_STEP - 1) // _PADDING_STEP * _PADDING_STEP
    classes = torch.where(lengths <= _SHORT_TOKENS, padded, lengths)
    parts, places = [], []
    for size in classes.unique().tolist():
        same = (classes == size).nonzero()[:, 0]
        for members in [same] if size <= _SHORT_TOKENS else same.split(1):
            width = int(lengths[members].max())
            offsets = torch.minimum(torch.arange(width), lengths[members, None] - 1)
            index = (starts[members, None] + offsets).flatten()
            valid = (torch.arange(width) < lengths[members, None]).flatten().nonzero()[:, 0]
            parts.append((len(members), width, index.to(device), valid.to(device)))
            places.append(index[valid])
    return _SequencesByLength(parts, torch.argsort(torch.cat(places)).to(device))


def _can_use_flash(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether `_flash_attention` can compute the call.

    It can on a GPU (CUDA), in bf16 or fp16, with `dropout` 0, and if query and value have the same head
    size (last dimension), a multiple of 8 up to 256.
    """
    width = query.shape[-1]
    fits = width == value.shape[-1] and width <= 256 and width % 8 == 0
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout and fits


def _flash_attention(qkv: _QKV, bounds: Tensor, longest: int, options: _Options) -> Tensor:
    """Return the row's attention (1, L, heads, width) by one CUDA call for all sequences.

    `qkv` are query, key and value, (1, heads, L, width) each. `bounds` [0, 3, 8] are sequences of 3 and
    5 tokens; `longest` is then 5. options.dropout is not used.
    """
    from torch.nn.attention.varlen import varlen_attn

    queries, keys, values = (part.squeeze(0).transpose(0, 1).contiguous() for part in qkv)
    repeats = queries.shape[1] // keys.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": repeats > 1} if _takes_groups(varlen_attn) else {}
    if not grouped:
        keys, values = (part.repeat_interleave(repeats, dim=1) for part in (keys, values))
    left = -1 if options.window is None else options.window - 1  # without the token itself
    output = varlen_attn(
        queries, keys, values, bounds, bounds, longest, longest,
        scale=options.scale, window_size=(left, 0), **grouped,
    )  # fmt: skip
    assert isinstance(output, Tensor)  # no auxiliary output was index for
    return output.unsqueeze(0)


@lru_cache(maxsize=1)
def _takes_groups(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether torch's varlen_attn takes fewer key than query heads: 2.13 does, 2.11 does not."""
    return "enable_gqa" in signature(varlen_attn).parameters


def _make_mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, use_vmap: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask for `packed_attention`: transformers' sdpa mask, None, or a marker.

    It is the sdpa mask with padding (`attention_mask` is given) or a cache (`kv_length` is not
    `q_length`). Else it is None for whole sequences, and the marker _BOUNDARIES_NEEDED for packed rows,
    for which transformers passes `allow_is_causal_skip` False.
    Raise ConfigError, except with padding or cache, if the model adds a mask function of its own
    (`use_vmap`).
    """
    if attention_mask is not None or q_length != kv_length:
        kwargs |= {"allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap}
        lengths = {"q_length": q_length, "kv_length": kv_length}
        return cast(Tensor | None, sdpa_mask(**lengths, attention_mask=attention_mask, **kwargs))
    if use_vmap:
        raise ConfigError(_REFUSAL.format("the model has an attention mask of its own"))
    return None if allow_is_causal_skip else _BOUNDARIES_NEEDED


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _make_mask)
