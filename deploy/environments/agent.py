"""An agent that owns its loop: LEARNER_AGENT=agent.py:rollout. Rows have the gold number as `answer`."""

import json
import re
from typing import Any

from openai import AsyncOpenAI, BadRequestError

TEXT = {"type": "string", "description": "Numbers, brackets and the signs + - * /"}
INPUT = {"type": "object", "properties": {"expression": TEXT}, "required": ["expression"]}
TOOL: Any = {"type": "function", "function": {"name": "calculate", "parameters": INPUT}}

# Imports all of the library, which else each rollout would do.
CHAT = AsyncOpenAI(base_url="-", api_key="-").chat.completions


def calculate(arguments: str) -> str:
    """Return, as text, the value of the expression in a call's arguments, or what is wrong with them.

    `arguments` is the JSON text of a call, such as {"expression": "12*(3+4)"}. No error is raised.
    """
    try:
        expression = json.loads(arguments)["expression"]
        if set(expression) - set("0123456789.+-*/() ") or "**" in expression:
            return "only numbers, brackets and + - * /"
        return str(eval(expression))
    except Exception as error:  # the policy reads what went wrong
        return f"{type(error).__name__}: {error}"


def last_number(text: str) -> float | None:
    """Return the last number in a text, 1200.5 for "It is 1,200.5."; None if there is no number."""
    numbers = re.findall(r"(?<![\d.])-?(?:\d+\.?\d*|\.\d+)", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


async def rollout(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return 1.0 if the last number of the last answer is the row's gold number, else 0.0.

    `task` has the row's columns, and `base_url` and `api_key` are the actor's endpoint, which is called
    up to five times. Each call of the tool is answered by `calculate`. A conversation that gets too long
    ends with the answers so far.
    """
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    said = ""
    for _ in range(5):
        try:
            reply: Any = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            break
        messages.append(message := reply.choices[0].message)
        said = message.content or ""
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    gold = last_number(str(task["answer"]).rpartition("####")[2])
    return float(gold is not None and last_number(said) == gold)
