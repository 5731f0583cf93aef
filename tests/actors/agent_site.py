"""For agents: rollouts through a real endpoint, whose agents run in threads of the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
from tokenizers import Tokenizer

from penstock.actors.agents.endpoint import Endpoint
from penstock.actors.rollout_groups import Agents
from penstock.common.episodes.pool import EpisodeFailed
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import ChatSpec, Contract
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.common.wire.messages import Group, Rollout, Sampling, Ticket, Version
from penstock.common.wire.reward_spec import RewardSpec
from tests.actors.talking import CHATML, TalkingEngine

AGENT = OwnCode("rollout", str(Path(__file__).with_name("agents_of_tests.py")), "")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

Agent = Callable[[openai.AsyncOpenAI], Awaitable[float]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class InThread:
    """A pool whose episodes run an agent of the test in this process. `keys` are those given out."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.keys: list[str] = []
        self.url = ""

    def begin(self, row: Any) -> InThread:
        return self

    def agent(self, url: str, key: str) -> tuple[float | None, dict[str, float]]:
        self.url = url
        self.keys.append(key)

        async def drive() -> float:
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                return await self._agent(client)

        try:
            return asyncio.run(drive()), {}
        except Exception as error:
            raise EpisodeFailed(f"agent: {type(error).__name__}: {error}") from error

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_contract(folder: Path, template: str, sequences: int = 4, prompt: int = 500) -> Contract:
    spec = EpisodeSpec(step_timeout_s=60.0, agent=AGENT, agent_timeout_s=60.0, agent_sequences=sequences)
    return Contract(
        str(folder), "", "float32", 1000 + prompt, (RewardSpec("environment"),), True, 1, 1,
        episodes=spec, chat=ChatSpec(template),
    )  # fmt: skip


def make_ticket(folder: Path, **changes: Any) -> Ticket:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    values: dict[str, Any] = {
        "id": "train:0", "purpose": "train",
        "prompt_ids": np.array(tokenizer.encode("What is 1+2?").ids, dtype="<i4"), "num_generations": 1,
        "sampling": Sampling(1.0, 1.0, 0, 0.0, 1000, 7), "version": Version(1, 0), "min_step": 0,
        "contract": "", "columns": {"prompt": "What is 1+2?"},
    }  # fmt: skip
    return Ticket(**(values | changes))


async def roll_out(
    folder: Path, engine: TalkingEngine, pool: Any, template: str = CHATML, sequences: int = 4,
    prompt: int = 500, **changes: Any,
) -> tuple[Rollout, ...]:  # fmt: skip
    """The rollouts of one ticket, as they are after a way through bytes."""
    endpoint = Endpoint()
    await endpoint.start()
    contract = make_contract(folder, template, sequences, prompt)
    groups = Agents(engine, contract, folder, pool, 8, endpoint)
    ticket = make_ticket(folder, **changes)
    try:
        found = await groups.generate("g", ticket)
    finally:
        await groups.close()
    again = decode(encode(Group(ticket, found, "actor")), Group).rollouts
    assert [one.token_ids.tolist() for one in again] == [one.token_ids.tolist() for one in found]
    return again
