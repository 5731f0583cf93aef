"""Floating-point operations of an Update, and the device's peak rate: their quotient is the MFU."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

_PEAK_TFLOPS = {"H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362}
"""Peak TFLOP/s in dense bf16, from the manufacturers' data sheets.

The first name that the device's name contains counts, so "H100 NVL" stands before "H100"."""


Lengths = tuple[int, int, int]
"""Numbers of tokens of a sequence: all, those that the linear layers compute, and the completion's.

The linear layers compute a prompt for the first sequence that has it, and not for others."""


class FlopCounter:
    """Count of floating-point operations of a dense decoder, as in PaLM (arXiv:2204.02311, appendix B).

    A forward pass takes 2 operations per token and weight of a linear layer, and in attention
    2 x length^2 x heads x head size per layer (causal: half of PaLM's). The output layer counts for
    completion tokens only, and a prompt that sequences share counts once in the linear layers. A
    backward pass takes the same for the activations, and once more for the trained weights.
    Activations that checkpointing computes again count once. Experts of a mixture of experts count 0.
    Example: for 10 tokens 1,000 linear weights take 20,000 operations forwards, 60,000 in training.
    """

    def __init__(self, model: PreTrainedModel) -> None:
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

    def forward(self, lengths: Iterable[Lengths]) -> float:
        """Return the operations of a forward pass over sequences with these lengths."""
        return self._operations(lengths, self._body, self._head)

    def training(self, lengths: Iterable[Lengths]) -> float:
        """Return the operations of a forward and a backward pass over sequences with these lengths."""
        lengths = list(lengths)
        trained = self._operations(lengths, self._trained_body, self._trained_head)
        return 2.0 * self.forward(lengths) + trained

    def _operations(self, lengths: Iterable[Lengths], body: int, head: int) -> float:
        """Return the operations of one pass over sequences: of linear layers and of attention.

        `body` weights count for the computed tokens, those of the output layer, `head`, for completion
        tokens.
        """
        return float(
            sum(
                2 * body * computed + 2 * head * new + self._attention * whole**2
                for whole, computed, new in lengths
            )
        )


def peak_flops(tflops: float) -> float | None:
    """Return the device's peak operations per second.

    This is `tflops` x 10^12 if not 0. Else the GPU's name gives it; None for a CPU or an unknown name.
    """
    if tflops:
        return tflops * 1e12
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if name in device), None)
