"""The reference policy of the KL term: a frozen copy, or LoRA's base with the adapter off."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

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


class Reference(Protocol):
    """Scores rows like the policy, and does not learn."""

    def logprobs(self, row: Row) -> Tensor:
        """Log-probabilities of the row's completion tokens, (N,), no gradient."""

    def soft_update(self, parameters: Iterator[tuple[str, torch.nn.Parameter]], alpha: float) -> None:
        """Become alpha x policy + (1 - alpha) x what it was."""

    def save(self, folder: Path) -> None:
        """Write what `load` needs, if it ever changed."""

    def load(self, folder: Path) -> None:
        """Become what was saved."""


class BaseModelReference:
    """The policy's own base weights: costs no memory, and never changes."""

    def __init__(self, engine: DeepSpeedEngine, adapter: PeftModel) -> None:
        self._engine, self._adapter = engine, adapter

    def logprobs(self, row: Row) -> Tensor:
        """See Reference."""
        with self._adapter.disable_adapter(), torch.no_grad():
            return self._engine(row)[0]

    def soft_update(self, parameters: Iterator[tuple[str, torch.nn.Parameter]], alpha: float) -> None:
        """Never asked for: LearnerSettings refuses it."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Nothing: the base weights are the model's."""

    def load(self, folder: Path) -> None:
        """Nothing."""


class FrozenCopyReference:
    """A second model in evaluation, on the policy's device or on one of its own.

    Every rank holds it whole.
    """

    def __init__(self, folder: Path, settings: LearnerSettings, device: torch.device) -> None:
        self._device = _find_device(settings.ref_device) if settings.ref_device else device
        model = load_model(folder, settings)
        self._model = PolicyModel(model, settings).to(self._device).requires_grad_(False)
        self._changed = False

    def logprobs(self, row: Row) -> Tensor:
        """See Reference."""
        with torch.no_grad():
            return self._model(_row_on(row, self._device))[0].to(row.input_ids.device)

    def soft_update(self, parameters: Iterator[tuple[str, torch.nn.Parameter]], alpha: float) -> None:
        """See Reference; TR-DPO's soft update, arXiv:2404.09656, eq. 3."""
        self._changed = True
        own = dict(self._model.named_parameters())
        for name, parameter in parameters:
            own[name].lerp_(parameter.detach().to(self._device), alpha)

    def save(self, folder: Path) -> None:
        """See Reference."""
        if self._changed:
            folder.mkdir(parents=True, exist_ok=True)
            save_weights(self._model, str(folder / _FILE))

    def load(self, folder: Path) -> None:
        """See Reference."""
        if (folder / _FILE).is_file():
            load_weights(self._model, str(folder / _FILE))
            self._changed = True


def _find_device(name: str) -> torch.device:
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"LEARNER_REF_DEVICE={name}: not a device of this machine: {error}") from error


def _row_on(row: Row, device: torch.device) -> Row:
    values = ((field.name, getattr(row, field.name)) for field in fields(row))
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in values if isinstance(value, Tensor)
    }
    return replace(row, **moved)


def make_reference(
    folder: Path, settings: LearnerSettings, engine: DeepSpeedEngine, adapter: PeftModel | None
) -> Reference | None:
    """The reference the settings ask for; None without KL term. Raises ConfigError."""
    if not settings.beta:
        return None
    return (
        FrozenCopyReference(folder, settings, engine.device)
        if adapter is None
        else BaseModelReference(engine, adapter)
    )
