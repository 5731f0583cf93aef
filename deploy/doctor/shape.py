"""The size of a model by its config.json: parameters, layers, keys and values per token."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.files.reading import parse_json

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TIED = ("gemma",)
"""Beginnings of the model types that tie input and output embeddings unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's numbers. `experts` is 1 for a dense model; `tied`: the head is the embedding."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Return the number of parameters. Biases and parts that few models have are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.inner * self.experts
        head = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp + 2 * self.hidden) + head + self.hidden

    @property
    def adapter_parameters(self) -> int:
        """Return the parameters of a LoRA adapter of rank 1 on all linear layers."""
        attention = 4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * (self.hidden + self.inner) * self.experts)

    @property
    def kv_values(self) -> int:
        """Return the numbers that the key-value cache holds per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def activations(self) -> int:
        """Return about how many numbers per token an Update keeps, without gradient checkpointing."""
        return self.layers * (10 * self.hidden + 4 * self.inner)


def find_config(model: str, revision: str) -> Path | None:
    """Return config.json of a model folder, or of a hub id that was downloaded before, else None."""
    path = Path(model) / "config.json"
    if not model or os.path.isfile(path):
        return path if model else None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except (ImportError, ValueError):  # a name that is no hub id
        return None
    return Path(found) if isinstance(found, str) else None


def read_shape(path: Path) -> Shape:
    """Return the shape that the config.json `path` describes.

    Raise ConfigError if the file cannot be read, or lacks a number that transformers' decoders state.
    """
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        return _shape(config.get("text_config") or config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: no size of the model can be read ({type(error).__name__}: {error}), expected the "
            "numbers of layers, heads and so on by their usual names"
        ) from error


def _shape(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a model by its configuration. Raise KeyError if a number is missing."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 1)
    inner = config["intermediate_size"]
    if experts > 1:
        inner = config.get("moe_intermediate_size") or inner
    default = str(config.get("model_type", "")).startswith(_TIED)
    return Shape(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        inner=int(inner),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        experts=experts,
        tied=bool(config.get("tie_word_embeddings", default)),
    )
