"""The agent of the runs that are killed. It imports little, as its processes start so often."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

UP = {"type": "function", "function": {"name": "up", "parameters": {"type": "object"}}}


async def count_up(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Counts up as the environment does, by a loop of its own; the rewards are those of Counter."""
    began, count = time.time(), 0
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(4):
        try:
            message = await asyncio.to_thread(ask, base_url, api_key, messages)
        except HTTPError as error:
            if error.code == 400:  # no token is left
                break
            raise
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            await asyncio.sleep(0.2)
            count += json.loads(call["function"]["arguments"])["by"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(count)})
    return count + began % 1.0


def ask(base_url: str, api_key: str, messages: list[Any]) -> Any:
    """The model's next message."""
    body = json.dumps({"model": "-", "messages": messages, "tools": [UP]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=300) as reply:
        return json.load(reply)["choices"][0]["message"]
