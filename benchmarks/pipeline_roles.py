"""Learner and actor of the pipeline's benchmark: the product's, with parts that take a known time.

    python -m benchmarks.pipeline_roles learner|actor

PIPELINE_UPDATE_S is the time of an Update. An engine generates PLACES groups at a time, each of which
takes PIPELINE_GROUP_S.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import penstock.learner.start
from penstock.actors.engine import Engine, verify_weights
from penstock.actors.loop import run
from penstock.common.config.command import execute_command
from penstock.common.config.role_command import ActorCommand
from penstock.common.role import begin_role
from penstock.common.wire.messages import Float32s, Int32s, Rollout, Sampling, Span, Version, Weights
from penstock.learner.__main__ import Learner
from penstock.learner.algorithm.batch import Batch
from penstock.learner.policy.collective import Form
from penstock.learner.policy.update import TokenRecord, Update

PLACES = 16
"""Groups that the engine generates at a time."""
_WEIGHTS = "model.safetensors"
_DIGIT, _END = 4, 2


class PacedPolicy:
    """A TrainablePolicy whose Update takes PIPELINE_UPDATE_S. Its weights are the number of Updates."""

    def __init__(self) -> None:
        self._updates = 0

    def update(self, batch: Batch, step: int) -> Update:
        time.sleep(float(os.environ["PIPELINE_UPDATE_S"]))
        self._updates += 1
        return Update(0.0, 0.0, 0.0, 1, 0, 1.0, TokenRecord.join([]))

    def score(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.full(len(text) - 1, -1.0) for text in texts]

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        folder.mkdir(exist_ok=True)
        (folder / _WEIGHTS).write_text(str(self._updates))

    def save(self, folder: Path) -> None:
        self.export(folder)

    def load(self, folder: Path) -> None:
        self._updates = int((folder / _WEIGHTS).read_text())

    def close(self) -> None:
        pass


class StandIn(Engine):
    """What engines without a model have in common: weights, but no computation and no cache."""

    _weights: Weights | None = None

    @property
    def version(self) -> Version | None:
        return self._weights.version if self._weights else None

    async def stop(self) -> None:
        pass

    async def abort(self, request_id: str) -> None:
        pass

    async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
        return np.full(len(token_ids) - 1, -1.0, dtype="<f4")

    async def take_weights(self, weights: Weights, again: bool = False) -> None:
        await asyncio.to_thread(verify_weights, weights)
        self._weights = weights

    def prefix_cache(self) -> tuple[int, int]:
        return 0, 0


class PacedEngine(StandIn):
    """An Engine with PLACES places. A group holds one for PIPELINE_GROUP_S, later ones wait for one."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(PLACES)
        self._group_s = float(os.environ["PIPELINE_GROUP_S"])
        self._completions = self._tokens = 0

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int,
        since: Version | None = None,
    ) -> tuple[Rollout, ...]:  # fmt: skip
        self._completions += num_generations
        try:
            async with self._free:
                assert self._weights is not None
                made = self._weights
                await asyncio.sleep(self._group_s)
        finally:
            self._completions -= num_generations
        self._tokens += 2 * num_generations
        return tuple(_rollout(made) for _ in range(num_generations))

    def room(self) -> int:
        return PLACES * 8 - self._completions

    def tokens_generated(self) -> int:
        return self._tokens


def _rollout(weights: Weights) -> Rollout:
    return Rollout(
        token_ids=np.array([_DIGIT, _END], dtype="<i4"),
        logprobs=np.full(2, -1.0, dtype="<f4"),
        mask=np.ones(2, dtype=bool),
        spans=(Span(weights.version, 0, 2, weights.hash),),
        finish_reason="stop",
    )


class PacedActor(ActorCommand):
    """Generate with the paced engine."""

    def work(self) -> int:
        run(self, begin_role(), lambda *_: PacedEngine())
        return 0


class PacedLearner(Learner):
    """Train with the paced policy."""

    def work(self) -> int:
        start: Any = penstock.learner.start
        start.Policy, start.join_process_group = lambda *_: PacedPolicy(), lambda: None
        return super().work()


if __name__ == "__main__":
    role = sys.argv.pop(1)
    sys.exit(execute_command({"learner": PacedLearner, "actor": PacedActor}[role], role))
