"""Export of the policy in training as a Hugging Face model folder."""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import NotFinite
from penstock.learner.policy.deepspeed_engine import DeepSpeedEngine
from penstock.learner.policy.lora import merge_adapter
from penstock.learner.policy.processes import rank

_MODEL = "model."
"""Prefix of the Hugging Face model's parameters among the names of the trained module."""


_PINNED_BYTES = 4 * 2**30
"""Weights up to this size are copied through memory that the GPU reaches, which the process keeps."""


def whole_state(engine: DeepSpeedEngine, trained: bool = False) -> dict[str, Tensor]:
    """Return the Hugging Face model's parameters and persistent buffers by name; {} on ranks above 0.

    With `trained` those parameters alone that are trained. All ranks call together. The tensors are the
    model's own, under ZeRO 3 copies. Raise NotFinite on all ranks if a parameter has NaN or infinity.
    """
    state, largest = {}, {}
    for name, parameter in engine.full_parameters(trained):
        value = parameter.detach()
        if value.numel() and value.is_floating_point():  # the largest value is NaN or infinity if any is
            largest[name] = torch.linalg.vector_norm(value, math.inf).float().to(engine.device)
        if rank() == 0 and name.startswith(_MODEL):
            gathered = engine.stage == 3  # its memory is freed after this turn
            state[name.removeprefix(_MODEL)] = value.cpu().clone() if gathered else value
    _check_finite(largest)
    if rank() == 0 and not trained:
        model = engine.module.model
        persistent = model.state_dict().keys()
        state |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return state


def _check_finite(largest: dict[str, Tensor]) -> None:
    """Raise NotFinite unless all these values, one per parameter by name, are finite.

    They are read in one piece: a GPU that is busy with other work answers each question late.
    """
    flags = torch.stack(list(largest.values())).isfinite().tolist() if largest else []
    if not all(flags):
        name = next(name for name, flag in zip(largest, flags, strict=True) if not flag)
        raise NotFinite(
            f"the weights hold NaN or infinity ({name}), so they are not written. Lower "
            "LEARNER_LEARNING_RATE, then start again: the learner resumes from its last checkpoint"
        )


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU. Those of a small model leave a GPU together, with one wait."""
    size = sum(value.nbytes for value in state.values())
    together = torch.cuda.is_available() and size <= _PINNED_BYTES
    copies = {name: value.to("cpu", non_blocking=together) for name, value in state.items()}
    if together:
        torch.cuda.synchronize()
    return copies


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state: dict[str, Tensor],
    settings: LearnerSettings,
) -> None:  # fmt: skip
    """Write config, tokenizer and the weights of `state`, as safetensors, into the folder.

    The weights are model.safetensors, or if larger than settings.max_shard_size, such as "5GB", several
    files with an index, as transformers names them. `state` is as `whole_state` returns it. An adapter
    in it is merged, with the scale settings.lora_alpha / settings.lora_rank. The folder is made if it is
    missing. Existing files are overwritten.
    """
    if settings.lora_rank:
        state = merge_adapter(state, settings.lora_alpha / settings.lora_rank)
    model.save_pretrained(folder, state_dict=on_cpu(state), max_shard_size=settings.max_shard_size)
    tokenizer.save_pretrained(folder)
