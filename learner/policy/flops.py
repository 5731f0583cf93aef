"""How much arithmetic an Update takes, and what share of the device's peak that is (MFU)."""

from collections.abc import Iterable
from typing import Any

import torch

_PEAK_TFLOPS = {"H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362}
"""Dense bf16, from the makers' data sheets; the first name found in the device's counts."""


class FlopCounter:
    """Floating-point operations of a dense decoder, by prompt and completion lengths.

    Forwards 2 per weight of a matrix product and token, and in attention 2 x length^2 x heads x head
    size per layer (causal: half of the square). The output layer sees completion tokens only.
    Backwards the same for the activations, and again for the weights that are trained. As in PaLM
    (arXiv:2204.02311, appendix B), with the causal half. What is computed twice to save memory counts
    once; experts of a mixture do not count.
    """

    def __init__(self, model: Any) -> None:
        self._body = self._trained_body = 0
        head = model.get_output_embeddings().weight
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.weight is not head:
                self._body += module.weight.numel()
                self._trained_body += module.weight.numel() * module.weight.requires_grad
        self._head, self._trained_head = head.numel(), head.numel() * head.requires_grad
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attention = 2 * config.num_hidden_layers * config.num_attention_heads * width

    def forward(self, lengths: Iterable[tuple[int, int]]) -> float:
        """Of one forward pass over sequences, each given as (all tokens, tokens of the completion)."""
        return float(
            sum(
                2 * self._body * whole + 2 * self._head * completion + self._attention * whole**2
                for whole, completion in lengths
            )
        )

    def training(self, lengths: Iterable[tuple[int, int]]) -> float:
        """Of forward and backward."""
        lengths = list(lengths)
        weights = sum(
            2 * self._trained_body * whole
            + 2 * self._trained_head * completion
            + self._attention * whole**2
            for whole, completion in lengths
        )
        return 2.0 * self.forward(lengths) + float(weights)


def peak_flops(tflops: float) -> float | None:
    """The device's peak per second: as set, else by its name; None when it is not known."""
    if tflops:
        return tflops * 1e12
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if name in device), None)
