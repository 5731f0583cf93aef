"""Measure how long generation pauses for new weights, with real vLLM and a full queue of requests.

    python -m benchmarks.pause [--model FOLDER] [--dtype float32] [--changes 40] [--json]

An engine of an actor samples long completions all the time, and gets other weights every half second.
The pause is the time from the call that pauses vLLM to the end of the one that resumes it, and the load
is the part of it in which vLLM reads the weights. The default model is the demo's, with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from penstock.actors.engine import hash_weights
from penstock.actors.vllm_engine import VllmEngine
from penstock.common.config.settings import ActorSettings
from penstock.common.guard import guard_children
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.messages import WEIGHTS_FILE, Sampling, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint

GOAL_MS = 50.0
REQUESTS, GENERATIONS = 64, 8
PROMPT_TOKENS, MAX_TOKENS = 6, 24
BETWEEN_S = 0.5
WARM_UP = 5


class Stopwatch:
    """Measures the calls of vLLM that pause, load and resume."""

    def __init__(self, llm: Any) -> None:
        self.pauses: list[float] = []
        self.loads: list[float] = []
        self._paused_at = 0.0
        self._pause, self._resume, self._load = (
            llm.pause_generation, llm.resume_generation, llm.collective_rpc,
        )  # fmt: skip
        llm.pause_generation, llm.resume_generation = self.pause, self.resume
        llm.collective_rpc = self.load

    async def pause(self, *arguments: Any, **named: Any) -> None:
        """Pause, and note when that began."""
        self._paused_at = time.perf_counter()
        await self._pause(*arguments, **named)

    async def load(self, *arguments: Any, **named: Any) -> Any:
        """Load, and note how long it took."""
        began = time.perf_counter()
        answer = await self._load(*arguments, **named)
        self.loads.append(1000 * (time.perf_counter() - began))
        return answer

    async def resume(self) -> None:
        """Resume, and note how long the pause was."""
        await self._resume()
        self.pauses.append(1000 * (time.perf_counter() - self._paused_at))


def make_versions(model: Path, folder: Path) -> list[Weights]:
    """Two versions that differ a little."""
    made = []
    for step in (1, 2):
        version = folder / f"version-{step}"
        version.mkdir()
        tensors = load_file(model / WEIGHTS_FILE)
        changed = {name: tensor * (1.0 + 1e-4 * step) for name, tensor in tensors.items()}
        save_file(changed, version / WEIGHTS_FILE, {"format": "pt"})
        made.append(Weights(Version(1, step), str(version), hash_weights(version), ""))
    return made


async def keep_busy(engine: VllmEngine, number: int) -> None:
    """Sample groups one after the other, until cancelled."""
    draw, count = np.random.default_rng(number), 0
    while True:
        prompt = draw.integers(4, 14, PROMPT_TOKENS).astype("<i4")
        sampling = Sampling(1.0, 1.0, 0, 0.0, MAX_TOKENS, count)
        await engine.generate(f"{number}-{count}", prompt, sampling, GENERATIONS)
        count += 1


async def measure(engine: VllmEngine, versions: list[Weights], changes: int) -> Stopwatch:
    """Change the weights so many times while all requests go on."""
    await engine.take_weights(versions[0])
    watch = Stopwatch(engine._llm)
    busy = [asyncio.create_task(keep_busy(engine, number)) for number in range(REQUESTS)]
    try:
        for change in range(changes + WARM_UP):
            await asyncio.sleep(BETWEEN_S)
            if failed := next((task for task in busy if task.done()), None):
                failed.result()
            await engine.take_weights(versions[(change + 1) % 2])
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    return watch


def spread(values: list[float]) -> dict[str, float]:
    """Median, the value that 90% stay below, least and most."""
    ordered = sorted(values[WARM_UP:])
    return {
        "median": statistics.median(ordered), "p90": ordered[int(0.9 * len(ordered))],
        "least": ordered[0], "most": ordered[-1],
    }  # fmt: skip


def main() -> int:
    """Measure and print; return 1 if the median pause is above the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.pause", description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: the demo's, random weights)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--changes", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    guard_children()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="penstock-pause-") as name:
        folder, model = Path(name), arguments.model
        if model is None:
            model, tokenizer = folder / "model", make_tokenizer()
            save_checkpoint(make_model(tokenizer), tokenizer, model)
        contract = Contract(
            str(model), hash_tokenizer(model), arguments.dtype, PROMPT_TOKENS + MAX_TOKENS,
            (RewardSpec("accuracy"),), True, REQUESTS, REQUESTS,
        )  # fmt: skip
        versions = make_versions(model, folder)

        async def run() -> Stopwatch:
            """Start an engine, and measure."""
            engine = VllmEngine(ActorSettings(), contract, model)
            try:
                return await measure(engine, versions, arguments.changes)
            finally:
                await engine.stop()

        watch = asyncio.run(run())
    found = {"pause_ms": spread(watch.pauses), "load_ms": spread(watch.loads)}
    print(json.dumps(found) if arguments.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return found["pause_ms"]["median"] > GOAL_MS


if __name__ == "__main__":
    sys.exit(main())
