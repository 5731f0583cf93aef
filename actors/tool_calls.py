"""The tool calls in a completion's text. Pure.

Two forms are read, which cover most chat templates that know tools:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
    {"name": "add", "parameters": {"a": 1, "b": 2}}

The first is that of Hermes, Qwen 2.5 and 3, and SmolLM, the second, as the whole text, that of Llama 3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.common.chat.known_format import DEEPEST_CALL, MOST_CALLS
from penstock.common.files.reading import parse_json
from penstock.common.text import short
from penstock.common.wire.plain import find_fault

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHT = "</think>"
_PREFIX = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote. `error` is "", or why the call cannot be run."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def as_message(self) -> dict[str, Any]:
        """Return {"type": "function", "function": {"name": ..., "arguments": {...}}}, without `error`.

        This is the form of an item of `tool_calls` in a chat message.
        """
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return a completion's text without its tool calls, and the calls in their order.

    Calls are <tool_call> blocks, or a whole text that is one JSON object with a name and the key
    arguments or parameters. A block that is no call gives a call with an `error`, and so does the 65th,
    the last that is returned. A text without calls is returned unchanged with []. Calls in a model's
    reasoning, up to the last </think>, are not read, and the reasoning stays in the text.
    Example:
        >>> read_calls('Sum: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        ('Sum:', [ToolCall(name='add', arguments={'a': 1}, error='')])
    """
    thought, mark, said = text.rpartition(_THOUGHT)
    if blocks := _BLOCK.findall(said):
        calls = [_read_call(block) for block in blocks[:MOST_CALLS]]
        if len(blocks) > MOST_CALLS:
            most = f"{len(blocks)} tool calls in one turn, expected at most {MOST_CALLS}"
            calls.append(ToolCall("", error=most))
        return (thought + mark + _BLOCK.sub("", said)).strip(), calls
    whole = said.strip().removeprefix(_PREFIX).strip()
    if whole.startswith("{") and whole.endswith("}"):
        call = _read_call(whole)
        if not call.error and re.search(r'"(arguments|parameters)"\s*:', whole):
            return thought + mark, [call]
    return text, []


def _read_call(text: str) -> ToolCall:
    """Return the call in a JSON text; for a text that is no call, one whose `error` says why."""
    try:
        found = parse_json(text)
    except ValueError as error:
        return ToolCall("", error=f"the tool call is no JSON: {short(error)}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(
            "", error='the tool call has no name, expected {"name": ..., "arguments": {...}}'
        )
    arguments = found.get("arguments", found.get("parameters")) or {}
    if isinstance(arguments, str):  # some models write the arguments as a text with JSON
        try:
            arguments = parse_json(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict) or find_fault(arguments, DEEPEST_CALL):
        expected = f"expected a JSON map of at most {DEEPEST_CALL} levels"
        return ToolCall(found["name"], error=f"the arguments of the tool call: {expected}")
    return ToolCall(found["name"], arguments)
