"""From the policy in training to a Hugging Face folder that anything can load."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import NotFinite
from penstock.learner.policy.deepspeed_engine import DeepSpeedEngine
from penstock.learner.policy.lora import merge_adapter, save_adapter
from penstock.learner.policy.processes import rank

_MODEL = "model."
"""Where the Hugging Face model lies in the module that is trained."""


def whole_state(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The Hugging Face model's parameters and persistent buffers by name; collective, on rank 0 only.

    Raises NotFinite, on every rank.
    """
    state = {}
    for name, parameter in engine.full_parameters():
        if not torch.isfinite(parameter).all():
            raise NotFinite(f"the weights hold NaN or infinity ({name}): nothing is published")
        if rank() == 0 and name.startswith(_MODEL):
            value = parameter.detach()
            gathered = engine.stage == 3  # its memory is given back
            state[name.removeprefix(_MODEL)] = value.cpu().clone() if gathered else value
    if rank() == 0:
        model = engine.module.model
        persistent = model.state_dict().keys()
        state |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return state


def write_model(
    folder: Path,
    model: Any,
    tokenizer: Any,
    state: dict[str, Tensor],
    adapter: PeftModel | None,
    settings: LearnerSettings,
) -> None:
    """Config, tokenizer and one model.safetensors; LoRA merged, the adapter alone in adapter/."""
    if adapter is not None:
        save_adapter(adapter, state, folder / "adapter")
        state = merge_adapter(state, settings.lora_alpha / settings.lora_rank)
    model.save_pretrained(folder, state_dict=state, max_shard_size="1TB")  # one file has one hash
    tokenizer.save_pretrained(folder)
