"""DeepSpeed around the policy's model: gradients, optimizer steps, sharding, saving.

The only module that imports deepspeed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed

from penstock.common.config.learner_settings import LearnerSettings
from penstock.learner.policy.optimizer import make_optimizer
from penstock.learner.policy.processes import (
    drop_message_group,
    set_single_process_environment,
    world_size,
)

_TAG = "trainer"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What an optimizer step did; `skipped`: gradients were not finite, nothing changed."""

    grad_norm: float
    skipped: bool


class DeepSpeedEngine:
    """A module in training under ZeRO 0 to 3.

    In bf16 at least stage 1, which is where DeepSpeed keeps the fp32 master weights that small
    learning rates need.
    """

    def __init__(self, module: torch.nn.Module, settings: LearnerSettings) -> None:
        join_process_group()
        self.stage = settings.resolved_zero_stage
        optimizer = make_optimizer(module.parameters(), settings)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=_config(settings, self.stage),
        )
        if self.stage:  # off by default in fp32: NaN would reach the weights
            self._optimizer.check_grad_overflow = True

    @property
    def module(self) -> Any:
        """The module as DeepSpeed holds it."""
        return self._engine.module

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._engine.device

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The module's forward."""
        return self._engine(*inputs, **options)

    def accumulate(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch; the ranks' and micro-batches' losses add up."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * world_size())  # DeepSpeed averages over the ranks
        if not last:
            self._engine.step()

    def step(self) -> OptimizerStep:
        """Clip, step and forget the gradients accumulated since the last step."""
        if self.stage == 0:
            norm = self._gradient_norm()
            if torch.isfinite(norm):
                self._engine.step()
            else:  # what ZeRO's optimizers do by themselves
                self.module.zero_grad(set_to_none=True)
            return OptimizerStep(float(norm), skipped=not torch.isfinite(norm))
        self._engine.step()
        if self._optimizer.overflow:
            return OptimizerStep(float("nan"), skipped=True)
        return OptimizerStep(float(self._engine.get_global_grad_norm()), skipped=False)

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def set_optimizer_options(self, options: Mapping[str, Any]) -> None:
        """Learning rate and the like of the optimizer steps to come."""
        for group in self._optimizer.param_groups:
            group.update(options)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments, as if training began here."""
        inner = self._optimizer.optimizer if self.stage else self._optimizer
        inner.state.clear()

    def full_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Name and whole parameter, one after the other; collective under ZeRO 3."""
        for name, parameter in self.module.named_parameters():
            whole = deepspeed.zero.GatheredParameters([parameter]) if self.stage == 3 else nullcontext()
            with whole:
                yield name, parameter

    def save(self, folder: Path) -> None:
        """Weights and optimizer, for `load`; collective."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Become exactly what was saved. Only ever the run's own folder: it is unpickled."""
        self._engine.load_checkpoint(str(folder), tag=_TAG)


def join_process_group() -> None:
    """The launcher's process group, or one of this process alone."""
    # Its shared-memory op takes a compiler and a minute to build, and only saves gloo some copies.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    set_single_process_environment()
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")


def leave_process_group() -> None:
    """Without it the process ends in SIGABRT."""
    drop_message_group()
    torch.distributed.destroy_process_group()


def _config(settings: LearnerSettings, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        # The boundary is set by hand: micro-batches vary in number, and the loss is normalised here.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
