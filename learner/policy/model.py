"""The policy's model: loaded, fitted for packed rows, and from a row to log-probabilities."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.learner.policy.attention import use_packed_attention
from penstock.learner.policy.logprobs import make_logprob_head
from penstock.learner.policy.lora import add_adapter
from penstock.learner.policy.packing import Row

disable_progress_bar()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(nn.Module):
    """A Hugging Face model that maps packed rows to log-probabilities, without whole logits."""

    def __init__(self, model: Any, settings: LearnerSettings) -> None:
        super().__init__()
        self.model = model
        self._packed = settings.packing
        self.head = make_logprob_head(model, settings.logprob_chunk, settings.cast_lm_head_to_fp32)

    def forward(self, row: Row) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the row's completion tokens, both (N,)."""
        inputs = row.model_inputs
        if not self._packed:  # the row is one sequence, and the attention is the model's own
            inputs = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
        hidden_1LD = self.model.base_model(**inputs).last_hidden_state
        return self.head(hidden_1LD[0, row.predict_N], row.token_ids_N, row.temperature_N)


def load_model(folder: Path, settings: LearnerSettings) -> Any:
    """A Hugging Face model without dropout, ready for packed rows; raises ConfigError."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[settings.dtype])
    if settings.packing:
        use_packed_attention(model)
    if settings.use_liger_kernel:
        _use_liger(model)
    # Sampled and trained policy must be the same function.
    for module in model.modules():
        name = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        if isinstance(getattr(module, name, None), float):  # in some models it is a Dropout itself
            setattr(module, name, 0.0)
    return model.eval()


def load_policy(folder: Path, settings: LearnerSettings) -> tuple[PolicyModel, PeftModel | None]:
    """The model to train, with an adapter if there is to be one."""
    model = load_model(folder, settings)
    adapter = add_adapter(model, settings) if settings.lora_rank else None
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # what transformers asks before it checkpoints; there is no dropout
    return PolicyModel(model, settings), adapter


def _use_liger(model: Any) -> None:
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ConfigError(
            "LEARNER_USE_LIGER_KERNEL is set but liger-kernel is not installed: pip install liger-kernel"
        ) from error
    _apply_liger_kernel_to_instance(model=model)
