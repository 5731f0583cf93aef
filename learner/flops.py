"""How much arithmetic an Update takes, and what share of the device's peak that is (MFU)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_PEAK_TFLOPS = {"H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362}
"""Dense bf16, from the makers' data sheets; the first name found in the device's counts."""


class FlopCounter:
    """Floating-point operations of a decoder, by the lengths of the sequences.

    A forward pass takes 2 per weight of a matrix product and token, and in attention 2 x length^2 x
    heads x head size per layer (causal: half of the square); training takes three times a forward
    pass. As in PaLM (arXiv:2204.02311, appendix B), with the causal half. Recomputation under
    gradient checkpointing does not count.
    """

    def __init__(self, model: Any) -> None:
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
        self._weights = matrices - (0 if tied else embedding.numel())
        config = model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attention = 2 * config.num_hidden_layers * config.num_attention_heads * head

    def forward(self, lengths: Iterable[int]) -> float:
        """Of one forward pass over sequences of these lengths."""
        return float(sum(2 * self._weights * n + self._attention * n * n for n in lengths))

    def training(self, lengths: Iterable[int]) -> float:
        """Of forward and backward."""
        return 3.0 * self.forward(lengths)


def peak_flops(tflops: float) -> float | None:
    """The device's peak per second: as set, else by its name; None when it is not known."""
    if tflops:
        return tflops * 1e12
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if name in device), None)
