"""Learner and actor of the pipeline's benchmark: the product's, with parts that take a known time.

    python -m benchmarks.pipeline_roles learner|actor

PIPELINE_UPDATE_S is the time of an Update. An engine generates PIPELINE_PLACES groups at a time. A group
takes PIPELINE_GROUP_S on average. The times are lognormal with PIPELINE_SIGMA, 0 makes them equal. If
PIPELINE_TIMES names a JSON file, these three are read there at each use, so they may change.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
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

PLACES = int(os.environ.get("PIPELINE_PLACES", "16"))
"""Groups that the engine generates at a time."""
_TOKENS_PER_S = 4
_WEIGHTS = "model.safetensors"
_DIGIT, _END = 4, 2


def paced(name: str) -> float:
    """The present value of `name`, from the file PIPELINE_TIMES if there is one, else as it is set."""
    file = os.environ.get("PIPELINE_TIMES")
    found: Mapping[str, str] = json.loads(Path(file).read_text()) if file else os.environ
    return float(found[name])


def group_seconds(seed: int) -> float:
    """The seconds of a group with this seed, with the present mean and sigma."""
    sigma = paced("PIPELINE_SIGMA")
    drawn = random.Random(seed).lognormvariate(-sigma * sigma / 2, sigma)
    return paced("PIPELINE_GROUP_S") * drawn


class PacedPolicy:
    """A TrainablePolicy whose Update takes PIPELINE_UPDATE_S. Its weights are the number of Updates."""

    def __init__(self) -> None:
        self._updates = 0

    def update(self, batch: Batch, step: int) -> Update:
        time.sleep(paced("PIPELINE_UPDATE_S"))
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
    """An Engine with PLACES places. A group holds one for its seconds, later ones wait for one."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(PLACES)
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
                seconds = group_seconds(sampling.seed)
                await asyncio.sleep(seconds)
        finally:
            self._completions -= num_generations
        tokens = min(sampling.max_tokens, max(2, round(_TOKENS_PER_S * seconds)))
        self._tokens += tokens * num_generations
        return tuple(_rollout(made, tokens) for _ in range(num_generations))

    def room(self) -> int:
        return PLACES * 8 - self._completions

    def tokens_generated(self) -> int:
        return self._tokens


def _rollout(weights: Weights, tokens: int) -> Rollout:
    return Rollout(
        token_ids=np.array([*[_DIGIT] * (tokens - 1), _END], dtype="<i4"),
        logprobs=np.full(tokens, -1.0, dtype="<f4"),
        mask=np.ones(tokens, dtype=bool),
        spans=(Span(weights.version, 0, tokens, weights.hash),),
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
