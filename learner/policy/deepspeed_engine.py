"""The only module that imports deepspeed: gradients, optimizer steps, sharding and saving."""

import gc
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
from penstock.learner.policy.model import PolicyModel
from penstock.learner.policy.optimizer import make_optimizer
from penstock.learner.policy.packing import Row
from penstock.learner.policy.processes import message_group, set_single_process_environment, world_size

_TAG = "trainer"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The result of an optimizer step. If `skipped`, `grad_norm` is not finite and no weight changed."""

    grad_norm: float
    skipped: bool


class DeepSpeedEngine:
    """The PolicyModel `module` in training under ZeRO 0 to 3. Creating one joins the process group.

    `settings` give the stage of ZeRO, the precision and the optimizer. In bf16 the stage is at least 1,
    because only then DeepSpeed keeps fp32 master weights: a step of 1e-6 on a weight of 1.0 rounds to
    nothing in bf16. All ranks call a method together.
    """

    def __init__(self, module: PolicyModel, settings: LearnerSettings) -> None:
        join_process_group()
        self.module, self.stage = module, settings.resolved_zero_stage
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module, optimizer=make_optimizer(module.parameters(), settings),
            config=_config(settings, self.stage),
        )  # fmt: skip
        self.device: torch.device = self._engine.device  # of the weights, and of the rows to compute
        if self.stage:  # DeepSpeed leaves the check out in fp32, and NaN would reach the weights
            self._optimizer.check_grad_overflow = True
        if self.stage in (1, 2):  # the norm, which is looked at in any case, says it for all gradients
            self._optimizer.check_overflow = lambda partition_gradients=True: None

    def __call__(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies of the row's completion tokens, both (N,), in nats.

        They are after temperature, and have gradients unless torch.no_grad() is on.
        """
        logprobs_N, entropy_N = self._engine(row)
        return logprobs_N, entropy_N

    def accumulate(self, loss: torch.Tensor, last: bool) -> None:
        """Compute the gradient of a row's loss and add it to the mini-batch's.

        `last` is True for the mini-batch's last row on this rank: the caller calls `step` next. No
        weight changes here. The gradient of the step is that of the sum of all rows' losses over all
        ranks. All ranks call together.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * world_size())  # DeepSpeed averages over the ranks
        if not last:
            self._engine.step()

    def step(self) -> OptimizerStep:
        """Clip the accumulated gradients, step the optimizer, clear the gradients; return the result.

        grad_norm is the norm before clipping. If the gradients are not finite, no weight changes, and
        `skipped` of the result is True. All ranks call together.
        """
        if self.stage == 0:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if torch.isfinite(norm):
                self._engine.step()
            else:  # ZeRO's optimizers (stage 1 to 3) skip such a step by themselves
                self.module.zero_grad(set_to_none=True)
            return OptimizerStep(float(norm), skipped=not torch.isfinite(norm))
        self._engine.step()
        if self._optimizer.overflow:
            return OptimizerStep(float("nan"), skipped=True)
        return OptimizerStep(float(self._engine.get_global_grad_norm()), skipped=False)

    def set_optimizer_options(self, options: Mapping[str, Any]) -> None:
        """Set options of AdamW, such as {"lr": 1e-6}, for all weights and the steps from now on."""
        for group in self._optimizer.param_groups:
            group.update(options)

    def reset_optimizer(self) -> None:
        """Clear the optimizer's moments: the next step is as the first of a new optimizer."""
        inner = self._optimizer.optimizer if self.stage else self._optimizer
        inner.state.clear()

    def full_parameters(self, trained: bool = False) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield each parameter's name and the whole parameter, not a copy; with `trained` those trained.

        Under ZeRO 3 all ranks must iterate together, and a parameter is whole only until the next one.
        """
        for name, parameter in self.module.named_parameters():
            if trained and not parameter.requires_grad:
                continue
            whole = deepspeed.zero.GatheredParameters([parameter]) if self.stage == 3 else nullcontext()
            with whole:
                yield name, parameter

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to the CPU, and free the device's memory.

        Only `reload` may be called then. All ranks call together.
        """
        if self.stage:
            self._engine.offload_states(pin_memory=False)
        self._move_rest(torch.device("cpu"))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move back to the device what `offload` moved away, unchanged. All ranks call together."""
        if self.stage:
            self._engine.reload_states()
        self._move_rest(self.device)

    def _move_rest(self, device: torch.device) -> None:
        """Move to `device` what no ZeRO optimizer holds: frozen weights, and without ZeRO everything."""
        held = bool(self.stage)
        for parameter in self.module.parameters():
            if not (held and parameter.requires_grad):
                parameter.data = parameter.data.to(device)
                parameter.grad = None  # an optimizer step has cleared it
        for state in () if held else self._optimizer.state.values():
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor) and value.dim()
                ):  # the count of steps stays on the CPU
                    state[name] = value.to(device)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into FOLDER/trainer, for `load`. All ranks call together.

        Each rank writes its part; the folder is made if it is missing.
        """
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state exactly as `save` wrote them. All ranks call together.

        The files are unpickled, which can execute code: load only the run's own folder.
        """
        self._engine.load_checkpoint(str(folder), tag=_TAG)


def join_process_group() -> None:
    """Join the launcher's process group; without a launcher, make one of this process alone.

    Without one, the environment variables of a launcher are set too. A process that has joined already
    stays in its group. The backend is nccl with a GPU, else gloo. DeepSpeed's shared-memory messages are
    switched off.
    """
    # DeepSpeed would compile its shared-memory op for a minute, which only saves gloo some copies.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    set_single_process_environment()
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")


def leave_process_group() -> None:
    """Destroy process and message groups. A process that ends without this call ends in SIGABRT."""
    message_group.cache_clear()
    deepspeed.comm.destroy_process_group()  # and what DeepSpeed keeps of it: a replay may follow


def _config(settings: LearnerSettings, stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for ZeRO stage `stage` (0 to 3).

    Of `settings` count dtype (bf16 or not), max_grad_norm (clipping), and offload_optimizer and
    offload_param, each of which moves its part to the CPU.
    """
    offloaded = [name for name in ("offload_optimizer", "offload_param") if getattr(settings, name)]
    zero = {"stage": stage} | {name: {"device": "cpu"} for name in offloaded}
    return {
        "train_micro_batch_size_per_gpu": 1,
        # `accumulate` sets the boundary: mini-batches have different numbers of rows. DeepSpeed would
        # divide the loss by a fixed number, but the loss is normalised already.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
