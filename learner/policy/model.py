"""The policy's model: loading, and the way from a packed row to log-probabilities."""

from errno import ENOENT
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.reading import ADAPTER
from penstock.learner.policy.attention import use_packed_attention
from penstock.learner.policy.logprobs import make_logprob_head
from penstock.learner.policy.lora import add_adapter
from penstock.learner.policy.packing import Row, gather_rows

disable_progress_bar()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(nn.Module):
    """A model that maps packed rows to log-probabilities: `model` without its output layer, then a head.

    `settings` say whether rows are packed (packing), and how the head computes (logprob_chunk,
    cast_lm_head_to_fp32). Raise ConfigError for a model whose logits are more than a torch.nn.Linear of
    its last hidden states.
    """

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings) -> None:
        super().__init__()
        self.model = model
        self._packed = settings.packing
        self.head = make_logprob_head(model, settings.logprob_chunk, settings.cast_lm_head_to_fp32)

    def forward(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the row's completion tokens, both (N,), in nats.

        They are after temperature. Without packing the row has one sequence, and the model does not get
        the bounds of sequences. Raise ConfigError if the model's attention gets no shared prompts.
        """
        inputs = row.model_inputs
        if not self._packed:  # the row is one sequence; the model's own attention knows no boundaries
            inputs = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
        hidden_ND = gather_rows(self.model.base_model(**inputs).last_hidden_state[0], row.predict_N)
        if row.shared and not row.shared.used:
            raise ConfigError(
                f"{type(self.model).__name__} does not pass the positions of shared prompts on to its "
                "attention: set LEARNER_PACKING=false"
            )
        logprobs_N, entropy_N = self.head(hidden_ND, row.token_ids_N, row.temperature_N)
        return logprobs_N, entropy_N


def load_model(folder: Path, settings: LearnerSettings) -> PreTrainedModel:
    """Return the model in a folder, in LEARNER_DTYPE and with dropout off.

    With LEARNER_PACKING its attention is that of packed rows, else that of LEARNER_ATTN_IMPLEMENTATION.
    LEARNER_USE_LIGER_KERNEL replaces layers. With LEARNER_TRUST_REMOTE_CODE code in the folder is run.
    The model is in eval mode, on the CPU. Raise ConfigError if the folder holds no causal language model
    as safetensors, or one that the settings do not fit; OSError if the disk or the network fails.
    """
    if (folder / ADAPTER).exists():  # transformers would load it too, from a pickle if it is one
        raise ConfigError(
            f"{folder} (LEARNER_MODEL, or a checkpoint's model) has {ADAPTER}, expected whole weights: "
            "merge the adapter into them, or remove its files"
        )
    dtype = _DTYPES[settings.dtype]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True,
            trust_remote_code=settings.trust_remote_code,
            attn_implementation=settings.attn_implementation or None,
        )  # fmt: skip
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        if isinstance(error, ImportError) or "attn_implementation" in str(error):
            raise ConfigError(
                f"LEARNER_ATTN_IMPLEMENTATION={settings.attn_implementation} cannot be used here: "
                f"{error}; install what it needs, or leave it empty"
            ) from error
        if isinstance(error, OSError) and error.errno not in (None, ENOENT):
            raise  # of the disk or the network: a restart may help
        raise ConfigError(
            f"{folder} (LEARNER_MODEL, or a checkpoint's model): expected a causal language model with "
            f"weights as *.safetensors, choose one: {error}"
        ) from error
    if settings.packing:
        use_packed_attention(model)
    if settings.use_liger_kernel:
        _use_liger(model)
    # With dropout the trained policy would be another function than the one that sampled.
    for module in model.modules():
        name = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        if isinstance(getattr(module, name, None), float):  # in some models it is a Dropout itself
            setattr(module, name, 0.0)
    model.eval()
    return model


def load_policy(folder: Path, settings: LearnerSettings) -> tuple[PolicyModel, PeftModel | None]:
    """Return the model to train, from the folder, and its new LoRA adapter, None if lora_rank is 0.

    With gradient_checkpointing activations are computed again in the backward pass, and the model is in
    training mode. Raise ConfigError if the model cannot be used with the settings; OSError if the disk
    fails.
    """
    model = load_model(folder, settings)
    adapter = add_adapter(model, settings) if settings.lora_rank else None
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints activations only in this mode; dropout is 0
    return PolicyModel(model, settings), adapter


def _use_liger(model: PreTrainedModel) -> None:
    """Replace layers of the model, in place, by liger-kernel's fused ones.

    Raise ConfigError if liger-kernel is not installed.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ConfigError(
            "LEARNER_USE_LIGER_KERNEL is set but liger-kernel is not installed: install the package "
            "liger-kernel beside penstock, or leave the setting out"
        ) from error
    _apply_liger_kernel_to_instance(model=model)
