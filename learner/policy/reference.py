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
    """LoRA's base model as reference: the policy of `engine` with its `adapter` switched off.

    It needs no extra memory and never changes.
    """

    def __init__(self, engine: DeepSpeedEngine, adapter: PeftModel) -> None:
        self._engine, self._adapter = engine, adapter

    def logprobs(self, row: Row) -> Tensor:
        """Return the completion tokens' log-probabilities under the base model, (N,), no gradient.

        The adapter is off during the call, and on again afterwards. All ranks call together.
        """
        with self._adapter.disable_adapter(), torch.no_grad():
            return self._engine(row)[0]


class FrozenCopyReference:
    """A second model, loaded from `folder` and not trained, whole on every rank.

    It is on `device`, or on LEARNER_REF_DEVICE if that is set. Raise ConfigError if that is no device
    here, or the folder holds no usable model.
    """

    def __init__(self, folder: Path, settings: LearnerSettings, device: torch.device) -> None:
        self._device = _find_device(settings.ref_device) if settings.ref_device else device
        self._model = PolicyModel(load_model(folder, settings), settings).to(self._device)
        self._model.requires_grad_(False)
        self._changed = False

    def logprobs(self, row: Row) -> Tensor:
        """Return the completion tokens' log-probabilities under the copy, (N,), without gradient.

        They are on the row's device.
        """
        with torch.no_grad():
            logprobs_N: Tensor = self._model(_row_on(row, self._device))[0]
            return logprobs_N.to(row.input_ids.device)

    def move_to(self, device: torch.device) -> None:
        """Move the weights to `device`, for the calls from now on."""
        self._device = device
        self._model.to(device)

    def soft_update(self, parameters: Iterator[tuple[str, torch.nn.Parameter]], alpha: float) -> None:
        """Set weights to alpha x parameters + (1 - alpha) x weights (TR-DPO, arXiv:2404.09656, eq. 3).

        `parameters` are the policy's, by the same names. alpha 1 copies them. From now on `save` writes
        the weights. Raise KeyError for another name. Example: alpha 0.6, parameter 1.0 and weight 0.0
        make 0.6.
        """
        self._changed = True
        own = dict(self._model.named_parameters())
        for name, parameter in parameters:
            own[name].lerp_(parameter.detach().to(self._device), alpha)

    def save(self, folder: Path) -> None:
        """Write the weights, unless they never changed, into FOLDER/reference.safetensors.

        `soft_update` changes them. Weights that `load` restored have changed too.
        """
        if self._changed:
            save_weights(self._model, str(folder / _FILE))

    def load(self, folder: Path) -> None:
        """Restore the weights that `save` wrote into the folder; do nothing if it wrote none."""
        if (folder / _FILE).is_file():
            load_weights(self._model, str(folder / _FILE))
            self._changed = True


def _find_device(name: str) -> torch.device:
    """Return the device called `name`, such as cuda:1. Raise ConfigError if this machine has none."""
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"LEARNER_REF_DEVICE={name}: not a device of this machine ({error}). Name a device, for "
            "example cuda:1, or leave the variable out"
        ) from error


def _row_on(row: Row, device: torch.device) -> Row:
    """Return a copy of the row with its tensors on the device; those already there are shared."""
    values = ((field.name, getattr(row, field.name)) for field in fields(row))
    moved: dict[str, Any] = {name: value.to(device) for name, value in values if hasattr(value, "to")}
    return replace(row, **moved)


def make_reference(
    folder: Path, settings: LearnerSettings, engine: DeepSpeedEngine, adapter: PeftModel | None
) -> BaseModelReference | FrozenCopyReference | None:
    """Return the KL term's reference, None if LEARNER_BETA is 0.

    With an `adapter` this is the model of `engine` with the adapter off. Without one (None) a frozen
    copy is loaded from `folder`. Raise ConfigError if the folder or LEARNER_REF_DEVICE cannot be used.
    """
    if not settings.beta:
        return None
    if adapter is not None:
        return BaseModelReference(engine, adapter)
    return FrozenCopyReference(folder, settings, engine.device)
