"""Measure what the actor costs beside bare vLLM, with the same engine and a real queue server.

    python -m benchmarks.actor [--model FOLDER] [--dtype float32] [--max-tokens 5] [--groups 400]
        [--rounds 5] [--json]

One engine serves both sides, in alternating rounds. Bare vLLM gets all requests at once, with the
actor's sampling arguments, log-probabilities included. The actor takes the same requests as tickets from
the server, follows new weights, hands off the groups, and renews leases. No learner and no rewarder
runs: contract, weights and tickets are written by this program, in longer rounds new weights each 10 s.
The goal is 97% of bare vLLM's tokens per second. The default model is the demo's, with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from penstock.actors.engine import hash_weights
from penstock.actors.loop import _run as run_actor
from penstock.actors.vllm_engine import VllmEngine
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings, RunSettings
from penstock.common.deadline import Deadline
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.messages import Group, Sampling, Ticket, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint
from penstock.learner.streams.learner_queue import LearnerQueue

GOAL = 0.97
GENERATIONS = 8
UPDATE_EVERY_S = 10.0
_PROMPT_TOKENS = 6
_LIMIT_S = 600.0


class KeptEngine:
    """The engine, which does not stop when an actor leaves: the next round uses it again."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: the model folder, the requests of a round, and the contract of the actor."""

    model: Path
    prompts: list[np.ndarray]
    max_tokens: int
    contract: Contract

    def sampling(self, number: int) -> Sampling:
        """The sampling of request `number`."""
        return Sampling(1.0, 1.0, 0, 0.0, self.max_tokens, number * GENERATIONS)


class HandMadeRun:
    """A run whose contract, weights and tickets this program writes, in the learner's place."""

    def __init__(self, server: LocalServer, folder: Path, name: str, setting: Setting) -> None:
        self.folder, self.name = folder, name
        self.connection = Connection(server.url, 10, 10)
        self._keys = Keys(name)
        self._setting = setting
        self._queue = LearnerQueue(self.connection, self._keys, 1)
        self._queue.claim("nonce", "benchmark")
        self._queue.set_state("running")
        self._queue.publish_contract(encode(setting.contract))

    def announce(self, step: int) -> None:
        """Announce weights. Those of even and of odd steps differ a little."""
        version = RunFolder(self.folder / self.name).version(1, step)
        version.mkdir(parents=True)
        weights = load_file(self._setting.model / "model.safetensors")
        changed = {name: tensor * (1.0 + 1e-4 * (step % 2)) for name, tensor in weights.items()}
        save_file(changed, version / "model.safetensors", {"format": "pt"})
        digest = hash_weights(version)
        self._queue.announce(Weights(Version(1, step), str(version), digest, ""))

    def issue(self, step: int) -> None:
        """Issue a ticket for each request, all in one call as the learner does."""
        tickets = [
            Ticket(
                f"train:{number}", "train", prompt, GENERATIONS, self._setting.sampling(number),
                Version(1, step), 0, self._setting.contract.hash, {},
            )
            for number, prompt in enumerate(self._setting.prompts)
        ]  # fmt: skip
        self._queue.issue("train", [(one.id, one.version, encode(one)) for one in tickets])

    def wait_for_groups(self, step: int) -> None:
        """Wait for the groups of all tickets, and announce new weights every 10 s, from `step` on."""
        deadline = Deadline(_LIMIT_S)
        update_at = time.monotonic() + UPDATE_EVERY_S
        while self.connection.execute("XLEN", self._keys.rollouts) < len(self._setting.prompts):
            if deadline.expired():
                raise TimeoutError(f"the actor did not finish a round within {_LIMIT_S:g} s")
            if time.monotonic() >= update_at:
                self.announce(step)
                step, update_at = step + 1, update_at + UPDATE_EVERY_S
            time.sleep(0.01)

    def tokens(self) -> int:
        """The tokens of all groups."""
        entries = self.connection.execute("XRANGE", self._keys.rollouts, "-", "+")
        groups = [decode(fields[b"d"], Group) for _, fields in entries]
        return sum(rollout.length for group in groups for rollout in group.rollouts)


async def bare_rate(engine: VllmEngine, setting: Setting, number: int) -> float:
    """Tokens per second of bare vLLM: all requests at once."""
    from vllm.inputs import tokens_input

    async def complete(at: int) -> int:
        prompt = tokens_input(setting.prompts[at].tolist(), cache_salt=f"bare-{number}")
        parameters = engine._sampling(setting.sampling(at), GENERATIONS)
        output: Any = None
        async for latest in engine._llm.generate(prompt, parameters, f"bare-{number}-{at}"):
            output = latest
        return sum(len(made.token_ids) for made in output.outputs)

    began = time.monotonic()
    tokens = sum(await asyncio.gather(*map(complete, range(len(setting.prompts)))))
    return tokens / (time.monotonic() - began)


async def actor_rate(
    engine: VllmEngine, server: LocalServer, folder: Path, setting: Setting, number: int
) -> float:
    """Tokens per second of the whole actor, from the first ticket's issue to the last group."""
    run = HandMadeRun(server, folder, f"round-{number}", setting)
    step = 1000 * number
    run.announce(step)
    settings = ActorCommand(
        redis_url=server.url, run=RunSettings(name=run.name, dir=folder), actor=ActorSettings()
    )
    stopping = threading.Event()
    acting = asyncio.create_task(run_actor(settings, stopping, lambda *_: KeptEngine(engine)))
    try:
        while engine.version != Version(1, step):
            if acting.done():
                acting.result()
            await asyncio.sleep(0.05)
        began = time.monotonic()
        await asyncio.to_thread(run.issue, step)
        await asyncio.to_thread(run.wait_for_groups, step + 1)
        took_s = time.monotonic() - began
    finally:
        stopping.set()
        await acting
    rate = run.tokens() / took_s
    run.connection.close()
    return rate


async def measure(
    setting: Setting, server: LocalServer, folder: Path, rounds: int
) -> list[tuple[float, float]]:
    """The rates of bare vLLM and of the actor for each round; the side that begins alternates."""
    engine = VllmEngine(ActorSettings(), setting.contract, setting.model)
    found = []
    try:
        for number in range(rounds + 1):
            rates = {}
            for side in ("bare", "actor") if number % 2 else ("actor", "bare"):
                if side == "bare":
                    rates[side] = await bare_rate(engine, setting, number)
                else:
                    rates[side] = await actor_rate(engine, server, folder, setting, number)
            found.append((rates["bare"], rates["actor"]))
    finally:
        await engine.stop()
    return found[1:]  # the first round warms up


def main() -> int:
    """Measure; return 1 if the median ratio misses the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.actor", description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: the demo's, random weights)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-tokens", type=int, default=5, help="longest completion")
    parser.add_argument("--groups", type=int, default=400, help="requests of 8 completions per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    guard_children()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in deploy/recipes/demo.env
    with tempfile.TemporaryDirectory() as made, LocalServer(Path(made) / "server") as server:
        folder, model = Path(made), options.model
        if model is None:
            model, tokenizer = folder / "model", make_tokenizer()
            save_checkpoint(make_model(tokenizer), tokenizer, model)
        draw = np.random.default_rng(1)
        prompts = [draw.integers(4, 14, _PROMPT_TOKENS).astype("<i4") for _ in range(options.groups)]
        contract = Contract(
            str(model), hash_tokenizer(model), options.dtype, _PROMPT_TOKENS + options.max_tokens,
            (RewardSpec("accuracy"),), True, groups_per_step=options.groups, credit=options.groups,
        )  # fmt: skip
        setting = Setting(model, prompts, options.max_tokens, contract)
        rates = asyncio.run(measure(setting, server, folder, options.rounds))
    ratios = [actor / bare for bare, actor in rates]
    median = statistics.median(ratios)
    if options.json:
        print(json.dumps({"rates": rates, "median": median, "goal": GOAL}))
    else:
        for bare, actor in rates:
            print(f"bare {bare:7.0f} tokens/s  actor {actor:7.0f} tokens/s  {actor / bare:.1%}")
        print(f"median {median:.1%} ({min(ratios):.1%} to {max(ratios):.1%}); the goal is {GOAL:.0%}")
    return int(median < GOAL)


if __name__ == "__main__":
    sys.exit(main())
