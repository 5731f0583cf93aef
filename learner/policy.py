"""The policy under training: a DeepSpeed engine around a Hugging Face model.

The only module that imports deepspeed. One process, ZeRO stage 0 in fp32; in bf16 stage 1, which is
where DeepSpeed keeps the fp32 master weights that small learning rates need.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.utils.logging import disable_progress_bar

from common.log import get_logger
from common.settings import LearnerSettings
from learner.batch import Batch, TrainSequence, micro_batches
from learner.loss import policy_loss, token_logprobs

disable_progress_bar()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TAG = "trainer"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Per trained token of an Update, (N,): what the metrics are computed from."""

    logprobs: np.ndarray
    behaviour: np.ndarray
    ratio: np.ndarray
    entropy: np.ndarray
    clipped_low: np.ndarray
    clipped_high: np.ndarray
    staleness: np.ndarray


@dataclass(frozen=True, slots=True)
class Update:
    """What one Update did."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: TokenRecord


class Policy:
    """A model that Updates change; saved and loaded whole, exported for others to load."""

    def __init__(self, model_folder: Path, settings: LearnerSettings, steps: int) -> None:
        _join_process_group()
        self._settings = settings
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=_DTYPES[settings.dtype])
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        warm = settings.warmup_steps and settings.lr_scheduler_type == "constant"
        kind = "constant_with_warmup" if warm else settings.lr_scheduler_type
        scheduler = get_scheduler(kind, optimizer, settings.warmup_steps, steps)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=_config(settings)
        )
        self._engine.eval()  # no dropout: sampled and trained policy must be the same function

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self._engine.module

    def update(self, batch: Batch) -> Update:
        """One optimizer step on a batch."""
        pieces = list(micro_batches(batch, self._settings.micro_batch_tokens))
        tokens = max(batch.trained_tokens, 1)
        loss, records = 0.0, []
        for number, piece in enumerate(pieces, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(pieces))
            piece_loss, record = self._accumulate(piece, tokens, len(batch.sequences))
            loss += piece_loss
            records.append(record)
            if number < len(pieces):
                self._engine.step()
        learning_rate = self._engine.get_lr()[0]
        grad_norm = self._step()
        return Update(loss, grad_norm, learning_rate, _join(records))

    def _accumulate(
        self, piece: list[TrainSequence], tokens: int, sequences: int
    ) -> tuple[float, TokenRecord]:
        padded = _pad(piece, self._engine.device)
        logprobs_BT, entropy_BT = self._completion_logprobs(padded, piece[0].temperature)
        terms = policy_loss(
            logprobs_BT,
            padded["behaviour"],
            padded["advantages"],
            padded["mask"],
            epsilon=self._settings.epsilon,
            epsilon_high=self._settings.epsilon_high,
            cap=self._settings.importance_sampling_cap,
            loss_type=self._settings.loss_type,
            tokens=tokens,
            sequences=sequences,
        )
        self._engine.backward(terms.loss)
        mask = padded["mask"]
        values = (
            logprobs_BT.detach(),
            padded["behaviour"],
            terms.ratio_BT,
            entropy_BT,
            terms.clipped_low_BT,
            terms.clipped_high_BT,
            padded["staleness"],
        )
        return terms.loss.item(), TokenRecord(*(value[mask].cpu().numpy() for value in values))

    def _completion_logprobs(
        self, padded: dict[str, Tensor], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the next tokens, (B, W).

        W are the last positions, from where the shortest prompt ends: no logits are computed for
        what every prompt of the micro-batch covers.
        """
        ids, width = padded["input_ids"], padded["mask"].shape[1]
        positions = torch.arange(ids.shape[1] - 1 - width, ids.shape[1] - 1, device=ids.device)
        logits = self._engine(
            input_ids=ids,
            attention_mask=padded["attention"],
            logits_to_keep=positions,
            use_cache=False,
        ).logits
        return token_logprobs(logits, ids[:, -width:], temperature)

    def logprobs(self, piece: list[TrainSequence]) -> list[np.ndarray]:
        """Per sequence the log-probabilities of its completion, (T,), without training."""
        with torch.no_grad():
            padded = _pad(piece, self._engine.device)
            table, _ = self._completion_logprobs(padded, piece[0].temperature)
        shortest = min(len(item.prompt_ids) for item in piece)
        return [
            table[row, len(item.prompt_ids) - shortest : item.length - shortest].cpu().numpy()
            for row, item in enumerate(piece)
        ]

    def _step(self) -> float:
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        )
        if not torch.isfinite(norm):  # DeepSpeed skips such a step in bf16 only
            log.error("gradients are not finite: the step is skipped", grad_norm=float(norm))
            self.model.zero_grad(set_to_none=True)
        self._engine.step()
        reported = self._engine.get_global_grad_norm()  # None without ZeRO
        return float(norm if reported is None else reported)

    def save(self, folder: Path) -> None:
        """Weights, optimizer and scheduler, for `load`."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Become exactly what was saved. Only ever the run's own folder: it is unpickled."""
        self._engine.load_checkpoint(str(folder), tag=_TAG)

    def export(self, folder: Path) -> None:
        """A Hugging Face folder: config, tokenizer and model.safetensors."""
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def close(self) -> None:
        """Leave the process group; without it the process ends in SIGABRT."""
        torch.distributed.destroy_process_group()


def _config(settings: LearnerSettings) -> dict[str, Any]:
    bf16 = settings.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        # The boundary is set by hand: micro-batches vary in number, and the loss is normalised here.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": 1 if bf16 else 0},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
    }


def _join_process_group() -> None:
    """A process group of one, on loopback, unless a launcher made a larger one."""
    if os.environ.setdefault("WORLD_SIZE", "1") == "1":
        # Only several ranks use the shared-memory op, and it takes a compiler and a minute to build.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")


def _pad(piece: list[TrainSequence], device: torch.device) -> dict[str, Tensor]:
    """Right-padded tensors (B, L); those over next tokens are (B, W), see `_completion_logprobs`."""
    shortest = min(len(item.prompt_ids) for item in piece)

    def stack(rows: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        tensors = [torch.as_tensor(np.array(row), dtype=dtype) for row in rows]
        return pad_sequence(tensors, batch_first=True).to(device)

    def shifted(name: str, dtype: torch.dtype) -> Tensor:
        return stack(
            (
                np.concatenate([np.zeros(len(item.prompt_ids) - shortest), getattr(item, name)])
                for item in piece
            ),
            dtype,
        )

    return {
        "input_ids": stack(
            (np.concatenate([item.prompt_ids, item.token_ids]) for item in piece), torch.long
        ),
        "attention": stack((np.ones(item.length) for item in piece), torch.long),
        "behaviour": shifted("behaviour", torch.float32),
        "mask": shifted("mask", torch.bool),
        "staleness": shifted("staleness", torch.long),
        "advantages": torch.tensor([item.advantage for item in piece], dtype=torch.float32).to(device),
    }


def _join(records: list[TokenRecord]) -> TokenRecord:
    return TokenRecord(
        *(
            np.concatenate([getattr(record, name) for record in records])
            for name in TokenRecord.__dataclass_fields__
        )
    )
