"""Agents that the tests name by file. A row's column `case` says what the agent does."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import openai

CHAT = openai.AsyncOpenAI(base_url="-", api_key="-").chat.completions  # imports the rest of the library


async def rollout(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    case = task.get("case", "")
    if case == "never asks":
        return 1.0
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    said = [{"role": "user", "content": str(task["prompt"])}]
    first = await client.chat.completions.create(model="policy", messages=said)
    if case == "raises":
        raise LookupError("no such level")
    if case == "exits":
        os._exit(3)
    if case == "leaves":
        raise SystemExit("the service is lost")
    if case == "hangs":
        await asyncio.sleep(60)
    return {
        "nan": float("nan"), "none": None, "text": "1.0", "no reward": {"steps": 1},
        "metrics": {"reward": 0.5, "steps": 2}, "unscored": {"reward": None},
    }.get(case, float(len(first.choices[0].message.content or "")))  # fmt: skip


not_callable = 7
