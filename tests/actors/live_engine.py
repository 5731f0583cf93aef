"""A real engine for tests that are plain functions."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.actors.vllm_engine import VllmEngine
from penstock.common.config.settings import ActorSettings
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.state.versions import with_hashes
from tests.actors.tiny_llama import load

PROMPTS = [np.array([1, *(3 + (i * k) % 10 for k in (1, 3, 7)), 3 + i % 10], "<i4") for i in range(50)]
SAMPLING = Sampling(1.0, 1.0, 0, 0.0, 40, 11)

Result = TypeVar("Result")


class Live:
    """An engine with its event loop in a thread, so that tests are plain functions."""

    def __init__(
        self, a: Path, b: Path, dtype: str, adapter: AdapterSpec | None = None, ranks: int = 1
    ) -> None:
        self.dtype, self._ranks = dtype, ranks
        self._adapter = adapter
        self.a, self.b = a, b
        contract = Contract(str(self.a), "", dtype, 384, (RewardSpec("accuracy"),), True, 4, 8)
        contract = replace(contract, adapter=adapter)
        self.loop = asyncio.new_event_loop()
        self._steps = 0
        self.shards = a.parent / "shards"  # what the engine starts with
        shutil.copytree(a, self.shards, ignore=shutil.ignore_patterns("*.safetensors"))
        load(a).save_pretrained(self.shards, max_shard_size="120KB")
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.call(self._start(contract))
        self.first_scores = self.call(self.engine.score("first", PROMPTS[0]))

    async def _start(self, contract: Contract) -> VllmEngine:
        settings = ActorSettings(
            max_num_seqs=128,
            kv_cache_gib=0.5,
            max_num_batched_tokens=2048,
            engine_args={"block_size": 32},
            tensor_parallel_size=self._ranks,
        )
        return VllmEngine(settings, contract, self.shards)

    def stop(self) -> None:
        self.call(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=600)

    def next_weights(self, folder: Path) -> Weights:
        self._steps += 1
        made = Weights(Version(1, self._steps), str(folder), "", "", adapter=self._adapter)
        return with_hashes(made)

    def take(self, folder: Path) -> Version:
        weights = self.next_weights(folder)
        self.call(self.engine.take_weights(weights))
        return weights.version

    async def sample_all(
        self, prompts: list[Int32s], sampling: Sampling, count: int
    ) -> list[tuple[Rollout, ...]]:
        return await asyncio.gather(
            *(
                self.engine.generate(f"{number}", prompt, sampling, count)
                for number, prompt in enumerate(prompts)
            )
        )

    def sample(
        self, prompts: list[Int32s], sampling: Sampling = SAMPLING, count: int = 4
    ) -> list[tuple[Rollout, ...]]:
        return self.call(self.sample_all(prompts, sampling, count))

    def sample_alone(self, prompts: list[Int32s], sampling: Sampling = SAMPLING) -> list[Rollout]:
        """A rollout per prompt, one after another: equal to the bit whenever the weights are.

        With vLLM 0.27 the last bit depends on the batch, and so on the moment at which others came.
        """
        return [self.sample([prompt], sampling, count=1)[0][0] for prompt in prompts]
