"""LoRA adapters by peft: added to a model before training, merged into its weights on export."""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError

_ADAPTER = "default"
_BASE = ".base_layer.weight"


def add_adapter(model: PreTrainedModel, settings: LearnerSettings) -> PeftModel:
    """Add new LoRA adapters to the model, in place; return peft's wrapper. All other weights are frozen.

    lora_rank, lora_alpha and lora_target_modules of `settings` describe them. Their first values are
    drawn from LEARNER_SEED; torch's random state stays as it was. Raise ConfigError if
    LEARNER_LORA_TARGET_MODULES names nothing in the model, or a layer that is no torch.nn.Linear.
    """
    targets = settings.lora_target_modules
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, task_type="CAUSAL_LM",
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )  # fmt: skip
    try:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)  # a resume without checkpoint starts from the same adapter
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"LEARNER_LORA_TARGET_MODULES={','.join(targets)}: {error}. Name linear layers of the "
            "model, or set all-linear"
        ) from error
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer) and type(layer.get_base_layer()) is not torch.nn.Linear:
            raise ConfigError(
                f"LEARNER_LORA_TARGET_MODULES={','.join(targets)} puts an adapter on {name}, a "
                f"{type(layer.get_base_layer()).__name__}: name torch.nn.Linear layers only"
            )
    return adapted


def merge_adapter(state: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Return the weights of a model without adapters that computes the same: W + scale x B A.

    `state` holds weights and adapters by peft's names, and is not changed. A merged weight is a new
    tensor and keeps its dtype; others are not copied. The names are those of the model without adapters.
    Merging into the trained weights and back would change them by rounding. LoRA, arXiv:2106.09685,
    sect. 4.1. Raise KeyError without A or B.
    Example: W = [[1]], A = [[2]], B = [[3]] and scale 0.5 give [[4]].
    """
    merged = {name: value for name, value in state.items() if ".lora_" not in name}
    for name in [name for name in merged if name.endswith(_BASE)]:
        stem, weight = name.removesuffix(_BASE), merged.pop(name)
        down = state[f"{stem}.lora_A.{_ADAPTER}.weight"].float()
        up = state[f"{stem}.lora_B.{_ADAPTER}.weight"].float()
        merged[f"{stem}.weight"] = (weight.float() + scale * (up @ down)).to(weight.dtype)
    return {name.replace(".base_layer.", "."): value for name, value in merged.items()}


def save_adapter(peft: PeftModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter of `peft` alone into the folder, with its config, in the form that peft loads.

    `state` holds all weights by name, as `whole_state` returns them; the adapter's values are taken from
    it. The folder is made if it is missing.
    """
    named = {f"base_model.model.{name}": value for name, value in state.items()}
    peft.save_pretrained(str(folder), state_dict=named)
