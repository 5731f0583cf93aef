"""OpenAI's form of chat completions: a call's bytes to a checked request, and an answer to JSON. Pure.

Whatever an agent sends is hostile: each value is checked, and what is wrong with it is said in an error
of OpenAI's form. Messages get one canonical form, so that equal messages are equal texts.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.actors.tool_calls import ToolCall
from penstock.actors.turns import Message
from penstock.common.chat.known_format import DEEPEST_CALL
from penstock.common.files.reading import parse_json
from penstock.common.text import short
from penstock.common.wire.messages import Sampling
from penstock.common.wire.plain import brief, find_fault

_MOST_MESSAGES = 10_000
"""Of one call. Each takes a few microseconds in which the actor does nothing else."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ONLY: dict[str, Any] = {
    "n": 1, "stream": False, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0,
    "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
    "logit_bias": {}, "store": False,
}  # fmt: skip
"""Parameters that may have this value alone, which is OpenAI's default."""
_READ = {"messages", "tools", "max_tokens", "max_completion_tokens", "stop"}
_UNUSED = {"model", "user", "metadata"}


class CallRefused(Exception):
    """An agent's call that gets an error in place of an answer.

    `message` is the error's text for the agent's author, `status` the status of HTTP, and `code` a name
    of the cause for the agent's client, such as "invalid_api_key".
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form, {"error": {"message", "type", "param": None, "code"}}.

        `type` is "server_error" for a status of 500 or more, else "invalid_request_error".
        """
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def ended() -> CallRefused:
    """Return the error of a call whose rollout has ended, status 503, for the caller to raise."""
    return CallRefused("the agent's rollout has ended: make no further calls", 503, "rollout_ended")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked call: messages in canonical form, tools, and the most tokens (0: as many as fit)."""

    messages: list[Message]
    tools: list[Any]
    max_tokens: int


def read_request(body: bytes, sampling: Sampling) -> ChatRequest:
    """Return the request in `body`, the bytes of a call. Raise CallRefused, which says what is wrong.

    The body must be a JSON object with `messages`; `tools` and `max_tokens` may be left out. `sampling`
    is the rollout's: a parameter that asks for something else, such as another temperature, is refused,
    and so is a parameter that is not known. A parameter that is null counts as left out.
    """
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise CallRefused(f"the call's body cannot be read as JSON: {short(error)}") from error
    if not isinstance(asked, dict):
        raise CallRefused(f"the call's body is {brief(asked)}: let the agent send a JSON object")
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        _check_parameter(name, value, sampling)
    return ChatRequest(
        read_messages(given.get("messages")), _tools(given.get("tools", [])), _most(given)
    )


def _check_parameter(name: str, value: Any, sampling: Sampling) -> None:
    """Raise CallRefused if a call's parameter `name` may not have this `value`, or is not known.

    The parameters that `sampling`, the rollout's, has too must be equal to it, those such as `n` equal
    OpenAI's default. Messages, tools, limits of tokens, and `model`, `user`, `metadata` may be anything.
    """
    if name in _SAMPLING and value != getattr(sampling, name):
        raise CallRefused(
            f"{name} is {brief(value)}, and this rollout samples with {getattr(sampling, name):g}, on "
            "which the learner's importance ratios rest: leave it out of the agent's calls, or set "
            "the learner's variable, such as LEARNER_TEMPERATURE or LEARNER_GENERATION_KWARGS"
        )
    stops = [value] if isinstance(value, str) else value
    if name == "stop" and stops != list(sampling.stop):
        raise CallRefused(f"stop is {brief(value)}, expected that of LEARNER_GENERATION_KWARGS: omit it")
    if name in _ONLY and value != _ONLY[name]:
        raise CallRefused(f"{name} is {brief(value)}, and only {_ONLY[name]!r} is served: leave it out")
    if name not in (*_SAMPLING, *_ONLY, *_READ, *_UNUSED):
        raise CallRefused(f"the parameter {brief(name)} is not served: leave it out of the call")


def _most(given: Mapping[str, Any]) -> int:
    """Return the lesser of max_tokens and max_completion_tokens in `given`, 0 if neither is there.

    Raise CallRefused if one of them is no whole number of at least 1.
    """
    found = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    for value in found:
        if type(value) is not int or value < 1:
            raise CallRefused(f"max_tokens or max_completion_tokens is {brief(value)}: send at least 1")
    return min(found, default=0)


def _tools(value: Any) -> list[Any]:
    """Return a call's tools unchanged, as a list; a single tool in the place of a list becomes [tool].

    Raise CallRefused unless each is a map with {"function": {"name": TEXT}}; other keys may be there.
    """
    tools = value if isinstance(value, list) else [value]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise CallRefused(
                f'a tool is {brief(tool)}, expected {{"type": "function", "function": {{"name": ...}}}}'
                ": correct the tools of the agent's call"
            )
    return tools


def read_messages(value: Any) -> list[Message]:
    """Return new messages for those in `value`, all in the one form that chat templates take.

    The role developer becomes system, content one text, a call's arguments a map. A tool's answer
    without a name gets that of the function with its `tool_call_id` in an earlier message. Raise
    CallRefused if `value` is no list, is empty, has over 10,000 messages, or one of another form.
    """
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_MESSAGES:
        raise CallRefused(f"messages is {brief(value)}, expected a list of 1 to {_MOST_MESSAGES}")
    names: dict[str, str] = {}
    messages = []
    for place, found in enumerate(value):
        try:
            message = _message(found, names)
        except ValueError as error:
            raise CallRefused(f"messages[{place}]: {error}") from error
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        messages.append(message)
    return messages


def _message(found: Any, names: Mapping[str, str]) -> Message:
    """Return `found` as `read_messages` does; `names`: functions by call id. Raise ValueError."""
    if not isinstance(found, dict) or found.get("role") not in tuple(_ROLES):
        raise ValueError(f"found {brief(found)}, expected an object with a role of {', '.join(_ROLES)}")
    if odd := [name for name, value in found.items() if value and name not in _KEYS]:
        raise ValueError(f"{brief(odd[0])} is not served: leave all out but {', '.join(sorted(_KEYS))}")
    role = _ROLES[found["role"]]
    message: Message = {"role": role, "content": _content(found.get("content"))}
    name = found.get("name")
    if role == "tool":
        call = found.get("tool_call_id")
        if not isinstance(call, str):
            raise ValueError(f"tool_call_id is {brief(call)}, expected a text: an earlier id")
        message["tool_call_id"] = call
        name = name or names.get(call)
    if name:
        message["name"] = _text("name", name)
    if role == "assistant" and found.get("tool_calls"):
        message["tool_calls"] = _calls(found["tool_calls"])
    return message


def _content(value: Any) -> str:
    """Return a message's content as one text: "" for None, a text unchanged, parts joined.

    A part is {"type": "text", "text": TEXT}; one part may be in the place of the list. Raise ValueError
    for any other value.
    """
    if value is None or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ValueError(f"content has {brief(part)}, expected a text or parts of the type text")
    return "".join(part["text"] for part in parts)


def _calls(value: Any) -> list[Message]:
    """Return a message's tool calls, in order, with their arguments as maps for the chat template.

    A call, or each in a list, is {"id": TEXT, "function": {"name": TEXT, "arguments": JSON TEXT}}. Raise
    ValueError for another form, and for arguments that are no JSON object or have over 16 levels.
    """
    calls: list[Message] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f'tool_calls has {brief(call)}, expected {{"function": ..., "id": ...}}')
        arguments = parse_json(_text("arguments", function.get("arguments")) or "{}")
        if not isinstance(arguments, dict) or find_fault(arguments, DEEPEST_CALL):
            raise ValueError(
                f"arguments are {brief(arguments)}, expected the JSON text of an object with at most "
                f"{DEEPEST_CALL} levels"
            )
        name = _text("a call's name", function.get("name"))
        calls.append(_call(_text("a call's id", call.get("id")), name, arguments))
    return calls


def _call(identifier: str, name: str, arguments: Mapping[str, Any]) -> Message:
    """Return {"id": `identifier`, "type": "function", "function": {"name", "arguments": a copy}}."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": identifier, "type": "function", "function": function}


def _text(what: str, value: Any) -> str:
    """Return `value` if it is a text, else raise ValueError, whose text calls the value `what`."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {brief(value)}: let the agent send a text")
    return value


def assistant_message(text: str, said: str, calls: Sequence[ToolCall], turn: int) -> Message:
    """Return a completion as an assistant's message, in the form of `read_messages`.

    `said` is the completion's `text` as the model's format reads it, without the tool `calls` in it. It
    is the content, and `tool_calls` has the calls. If one has an `error`, the content is `text`, and
    no call is in the message. Their ids have nine letters and digits, as some templates demand.
    Example: call00301 is the second call of `turn` 3, the rollout's fourth completion.
    """
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text if calls else said}
    named = enumerate(calls)
    made = [_call(f"call{turn:03d}{place:02d}", call.name, call.arguments) for place, call in named]
    return {"role": "assistant", "content": said, "tool_calls": made}


def key_of(value: Message | Sequence[Any]) -> str:
    """Return a message, or a list of tools, as JSON text, by which two of them are compared.

    1, 1.0 and true differ, and so do maps whose keys are in another order.
    """
    return json.dumps(value)


def answer(message: Message, finish: str, prompt_tokens: int, completion_tokens: int, name: str) -> Any:
    """Return the body of the HTTP answer with a `message`, an OpenAI chat.completion, as a new map.

    `finish` is why the completion ended; with tool calls "tool_calls" is sent in its place, arguments
    as JSON text, and a content of "" as None. The id is "chatcmpl-NAME", `created` the present time.
    """
    sent = dict(message)
    if calls := message.get("tool_calls"):
        finish = "tool_calls"
        sent["content"] = message["content"] or None
        sent["tool_calls"] = [call | {"function": _as_sent(call["function"])} for call in calls]
    return {
        "id": f"chatcmpl-{name}", "object": "chat.completion", "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": sent, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }  # fmt: skip


def _as_sent(function: Message) -> Message:
    """Return a copy of a call's `function` whose "arguments" are a JSON text, as OpenAI sends them."""
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
