"""LoRA adapters by peft: added to a model before training, merged into its weights on export."""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.wire.messages import ADAPTER_FILE

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


def adapted_modules(config: PreTrainedConfig, settings: LearnerSettings) -> tuple[str, ...]:
    """Return the last parts of the names of the layers that get an adapter, sorted, such as q_proj.

    No weights are read: a model of this `config` is made without memory. Raise ConfigError for settings
    for which `add_adapter` raises it, and if the head, which computes the logits, gets one: vLLM fails
    then when it scores a text.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
        adapted = add_adapter(model, settings)
    named = {name: layer for name, layer in adapted.named_modules() if isinstance(layer, LoraLayer)}
    if model.get_output_embeddings() in named.values():
        raise ConfigError(
            f"LEARNER_LORA_TARGET_MODULES={','.join(settings.lora_target_modules)} puts an adapter on "
            "the model's head, which vLLM cannot score: leave it out, or set "
            "LEARNER_LORA_PUBLISH_MERGED=true"
        )
    return tuple(sorted({name.rpartition(".")[2] for name in named}))


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

    `state` holds its values by name, as `whole_state` returns them, and may hold others too. The folder
    is made if it is missing.
    """
    peft.save_pretrained(str(folder), state_dict=_by_peft_name(state))


def write_adapter(peft: PeftModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter's weights, without its config, as adapter_model.safetensors in `folder`."""
    folder.mkdir(exist_ok=True)
    weights = get_peft_model_state_dict(peft, state_dict=_by_peft_name(state))
    whole = {name: value.contiguous() for name, value in weights.items()}
    save_file(whole, folder / ADAPTER_FILE, {"format": "pt"})


def _by_peft_name(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that they have in peft's wrapper of the model."""
    return {f"base_model.model.{name}": value for name, value in state.items()}
