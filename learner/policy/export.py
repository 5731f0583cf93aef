"""Export of the policy in training as a Hugging Face model folder."""

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


def whole_state(engine: DeepSpeedEngine, trained: bool = False) -> dict[str, Tensor]:
    """Return the Hugging Face model's parameters and persistent buffers by name; {} on ranks above 0.

    With `trained` those parameters alone that are trained. All ranks call together. Parameters are the
    model's own tensors, under ZeRO 3 copies on the CPU; buffers are the model's own. Raise NotFinite on
    all ranks if a parameter has NaN or infinity.
    """
    state, finite = {}, {}
    for name, parameter in engine.full_parameters(trained):
        finite[name] = torch.isfinite(parameter).all().to(engine.device)
        if rank() == 0 and name.startswith(_MODEL):
            value = parameter.detach()
            gathered = engine.stage == 3  # its memory is freed after this turn
            state[name.removeprefix(_MODEL)] = value.cpu().clone() if gathered else value
    _check_finite(finite)
    if rank() == 0 and not trained:
        model = engine.module.model
        persistent = model.state_dict().keys()
        state |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return state


def _check_finite(finite: dict[str, Tensor]) -> None:
    """Raise NotFinite unless all these flags, one per parameter by name, are True.

    They are read in one piece: a GPU that is busy with other work answers each question late.
    """
    flags = torch.stack(list(finite.values())).tolist()
    if not all(flags):
        name = next(name for name, flag in zip(finite, flags, strict=True) if not flag)
        raise NotFinite(
            f"the weights hold NaN or infinity ({name}), so they are not written. Lower "
            "LEARNER_LEARNING_RATE, then start again: the learner resumes from its last checkpoint"
        )


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state: dict[str, Tensor],
    settings: LearnerSettings, max_shard_size: str,
) -> None:  # fmt: skip
    """Write config, tokenizer and the weights of `state`, as safetensors, into the folder.

    The weights are model.safetensors, or if larger than `max_shard_size`, such as "5GB", several files
    with an index. `state` is as `whole_state` returns it. An adapter in it is merged, with the scale
    settings.lora_alpha / settings.lora_rank. The folder is made if it is missing. Existing files are
    overwritten.
    """
    if settings.lora_rank:
        state = merge_adapter(state, settings.lora_alpha / settings.lora_rank)
    model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
