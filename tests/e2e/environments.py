"""The environment and the agent of the runs that are killed: they count, and take their time."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from openai import AsyncOpenAI, BadRequestError


class Counter:
    """Counts up; the reward is the last number, a little different for each episode."""

    def __init__(self) -> None:
        self._count = 0
        self._began = time.time()

    def reset(self, question: str, **row: object) -> str:
        """Start at 0."""
        return "+0"

    def up(self, by: int) -> str:
        """Count up.

        Args:
            by: how much
        """
        time.sleep(0.2)
        self._count += by
        return str(self._count)

    def get_reward(self) -> float:
        return self._count + self._began % 1.0


UP: Any = {"type": "function", "function": {"name": "up", "parameters": {"type": "object"}}}


async def count_up(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Counts up as the environment does, by a loop of its own; the rewards are those of Counter."""
    began, count = time.time(), 0
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(4):
        try:
            reply: Any = await client.chat.completions.create(model="-", messages=messages, tools=[UP])
        except BadRequestError:  # no token is left
            break
        messages.append(message := reply.choices[0].message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            await asyncio.sleep(0.2)
            count += json.loads(call.function.arguments)["by"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(count)})
    return count + began % 1.0
