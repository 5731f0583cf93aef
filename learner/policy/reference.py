"""The reference policy of the KL term: a frozen copy, or with LoRA the base model without adapter."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import Tensor

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.learner.policy.deepspeed_engine import DeepSpeedEngine
from penstock.learner.policy.model import PolicyModel, load_model
from penstock.learner.policy.packing import Row

_FILE = "reference.safetensors"


class BaseModelReference:
    """LoRA's base model: the policy with its adapter switched off. No extra memory, never changes."""

    def __init__(self, engine: DeepSpeedEngine, adapter: PeftModel) -> None:
        self._engine, self._adapter = engine, adapter

    def logprobs(self, row: Row) -> Tensor:
        """Return the row's log-probabilities under the base model, (N,), without gradient."""
        with self._adapter.disable_adapter(), torch.no_grad():
            return self._engine(row)[0]


class FrozenCopyReference:
    """A second model, not trained, whole on every rank, on the policy's device or LEARNER_REF_DEVICE.

    Creating one raises ConfigError if LEARNER_REF_DEVICE is no device here, and load_model's errors.
    """

    def __init__(self, folder: Path, settings: LearnerSettings, device: torch.device) -> None:
        self._device = _find_device(settings.ref_device) if settings.ref_device else device
        self._model = PolicyModel(load_model(folder, settings), settings).to(self._device)
        self._model.requires_grad_(False)
        self._changed = False

    def logprobs(self, row: Row) -> Tensor:
        """Return the row's log-probabilities under the copy, (N,), without gradient."""
        with torch.no_grad():
            logprobs_N: Tensor = self._model(_row_on(row, self._device))[0]
            return logprobs_N.to(row.input_ids.device)

    def soft_update(self, parameters: Iterator[tuple[str, torch.nn.Parameter]], alpha: float) -> None:
        """Set weights to alpha x parameters + (1 - alpha) x weights (TR-DPO, arXiv:2404.09656, eq. 3).

        Example: alpha 0.6, parameter 1.0 and weight 0.0 make 0.6.
        """
        self._changed = True
        own = dict(self._model.named_parameters())
        for name, parameter in parameters:
            own[name].lerp_(parameter.detach().to(self._device), alpha)

    def save(self, folder: Path) -> None:
        """Write the weights into the existing folder, if `soft_update` ever changed them."""
        if self._changed:
            save_weights(self._model, str(folder / _FILE))

    def load(self, folder: Path) -> None:
        """Restore the weights that `save` wrote, if it wrote any."""
        if (folder / _FILE).is_file():
            load_weights(self._model, str(folder / _FILE))
            self._changed = True


def _find_device(name: str) -> torch.device:
    """Return the device of this name. Raise ConfigError if this machine has none."""
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"LEARNER_REF_DEVICE={name}: not a device of this machine ({error}). Name a device, for "
            "example cuda:1, or leave the variable out"
        ) from error


def _row_on(row: Row, device: torch.device) -> Row:
    """Return the row with its tensors on the device."""
    values = ((field.name, getattr(row, field.name)) for field in fields(row))
    moved: dict[str, Any] = {name: v.to(device) for name, v in values if isinstance(v, Tensor)}
    return replace(row, **moved)


def make_reference(
    folder: Path, settings: LearnerSettings, engine: DeepSpeedEngine, adapter: PeftModel | None
) -> BaseModelReference | FrozenCopyReference | None:
    """Return the KL term's reference, None if LEARNER_BETA is 0.

    With an `adapter` this is the model of `engine` with the adapter off. Without one (None) a frozen
    copy is loaded from `folder`, which raises as FrozenCopyReference does.
    """
    if not settings.beta:
        return None
    if adapter is not None:
        return BaseModelReference(engine, adapter)
    return FrozenCopyReference(folder, settings, engine.device)
