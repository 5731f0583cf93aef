"""OpenEnv servers as environments: `OpenEnv("ws://host:8000")` is a class for LEARNER_ENVIRONMENT.

Speaks the protocol of openenv-core 0.3 over the server's WebSocket, one session per rollout. Needs the
library websockets, and no package of OpenEnv.
"""

import inspect
import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Literal

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

_SECTION = re.compile(r"^[ \t]*(Args|Arguments|Returns|Raises|Example|Examples):", re.MULTILINE)
_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "null": type(None),
}  # fmt: skip
_DEEPEST = 8
_MOST_BYTES = 2**24
_NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")  # ends one, or there is none free


def OpenEnv(url: str, reward: Literal["sum", "last"] = "sum", timeout_s: float = 60.0) -> type:
    """Return an environment class for the OpenEnv server at `url`, such as ws://host:8000.

    Asks the server for its tools. A server without tools (of MCP) gets one tool, `step`, with the fields
    of its action. `reset` passes all columns of the row. The reward is the `sum` of the rewards of a
    rollout's steps, or the `last` one. `timeout_s` is the time for each answer. Raise ConnectionError if
    the server does not answer or has no free session, ValueError if a tool cannot be used from Python.
    """
    if reward not in ("sum", "last"):
        raise ValueError(f"OpenEnv: reward is {reward!r}, expected 'sum' or 'last'")
    server = _Server(_address_of(url), timeout_s)
    methods = {tool.name: _method_of(tool) for tool in _find_tools(server)}
    return type("OpenEnv", (_Environment,), {"_server": server, "_reward": reward, **methods})


class OpenEnvError(RuntimeError):
    """The server's answer that an action or a reset has failed. Its text is the tool's answer."""


@dataclass(frozen=True, slots=True)
class _Server:
    """The WebSocket address of a server, and the time in seconds that it may take for an answer."""

    address: str
    timeout_s: float

    def connect(self) -> ClientConnection:
        """Return a new connection, which is a session. Raise ConnectionError if there is none."""
        try:
            return connect(
                f"{self.address}/ws", open_timeout=self.timeout_s, close_timeout=1, max_size=_MOST_BYTES
            )
        except (OSError, WebSocketException) as error:
            raise ConnectionError(
                f"the OpenEnv server {self.address} does not answer ({error}): "
                "start the server, or correct the address"
            ) from error

    def ask(self, connection: ClientConnection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raise OpenEnvError for an error, ConnectionError if none comes in time or no session is left.
        """
        try:
            with suppress(WebSocketException):  # a server without a free session says so, then closes
                connection.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(connection.recv(self.timeout_s))
        except (OSError, WebSocketException, ValueError) as error:
            raise ConnectionError(
                f"the OpenEnv server {self.address} did not answer {kind} ({error or 'too late'}): "
                "its log may say why"
            ) from error
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            message = str(found.get("message", "error"))
            if found.get("code") in _NO_SESSION:  # the policy is not at fault
                raise ConnectionError(f"{self.address}: {message}: serve more sessions, or see its log")
            raise OpenEnvError(message)
        return dict(found)


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool of a server. `is_action`: the arguments are the action itself, not those of a call."""

    name: str
    description: str
    schema: Mapping[str, Any]
    is_action: bool = False


class _Environment:
    """A session of an OpenEnv server. The tools are methods of its subclasses."""

    _server: _Server
    _reward: str

    def __init__(self) -> None:
        self._open = ExitStack()
        self._connection: ClientConnection | None = None
        self._rewards: list[float] = []
        self._done = False

    def reset(self, **row: Any) -> str | None:
        """Begin a session with the row's columns; return the observation as text, None without one.

        Raise ConnectionError or OpenEnvError if that fails.
        """
        if self._connection is None:
            self._connection = self._open.enter_context(self._server.connect())
        self._rewards, self._done = [], False
        text = self._taken(self._server.ask(self._connection, "reset", row))
        return text or None

    def get_reward(self) -> float | None:
        """Return the rollout's reward; None if no step had one."""
        if not self._rewards:
            return None
        return sum(self._rewards) if self._reward == "sum" else self._rewards[-1]

    def _step(self, action: Mapping[str, Any]) -> str:
        """Send an action and return the observation as text. Raise OpenEnvError if the action fails.

        Raise SystemExit if the server is lost: no exception, because that would answer the policy.
        """
        if self._done or self._connection is None:
            raise OpenEnvError("The episode is over.")
        try:
            return self._taken(self._server.ask(self._connection, "step", action))
        except ConnectionError as error:
            raise SystemExit(str(error)) from error

    def _taken(self, answer: Mapping[str, Any]) -> str:
        """Note reward and end that an answer has; return its observation as text."""
        if (reward := answer.get("reward")) is not None:
            self._rewards.append(float(reward))
        self._done = bool(answer.get("done"))
        return text_of(answer.get("observation") or {})


def text_of(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: the result of a tool, the only text in it, else JSON.

    Raise OpenEnvError if it is the error of a tool.

    Example:
        >>> text_of({"prompt": "Guess!"}), text_of({"x": 1, "y": 2}), text_of({})
        ('Guess!', '{"x": 1, "y": 2}', '')
    """
    if "tool_name" in observation and {"result", "error"} & observation.keys():
        if error := observation.get("error"):
            raise OpenEnvError(error.get("message", error) if isinstance(error, Mapping) else str(error))
        return _text_of_result(observation.get("result"))
    values = [*observation.values()]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False) if observation else ""


def _text_of_result(result: object) -> str:
    """Return the result of an MCP tool as text. Raise OpenEnvError if the result is an error."""
    if isinstance(result, Mapping) and "content" in result:
        parts = [part.get("text", "") for part in result["content"] or ()]
        if result.get("is_error") or result.get("isError"):
            raise OpenEnvError("\n".join(parts))
        data = result.get("data")
        result = "\n".join(parts) if data is None else data
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _address_of(url: str) -> str:
    """Return the WebSocket address of a server, from any form of its URL."""
    scheme, _, rest = url.rstrip("/").rpartition("://")
    secure = scheme in ("https", "wss")
    return f"{'wss' if secure else 'ws'}://{rest.removesuffix('/ws')}"


def _find_tools(server: _Server) -> list[_Tool]:
    """Return the tools of a server. Raise ConnectionError without an answer or a free session."""
    with server.connect() as connection:
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        try:
            answer = server.ask(connection, "mcp", request)
        except OpenEnvError:  # a server from before this message
            answer = {}
    found = (answer.get("result") or {}).get("tools") or []
    if not found:
        action = _action_schema(server)
        return [_Tool("step", action.get("description") or "Take an action.", action, is_action=True)]
    return [
        _Tool(tool["name"], tool.get("description") or "", _schema_of(tool))
        for tool in found
    ]  # fmt: skip


def _schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which OpenEnv and MCP give different names."""
    return tool.get("inputSchema") or tool.get("input_schema") or {}


def _action_schema(server: _Server) -> dict[str, Any]:
    """Return the JSON schema of a server's actions. Raise ConnectionError if there is none."""
    page = f"http{server.address.removeprefix('ws')}/schema"
    try:
        with urllib.request.urlopen(page, timeout=server.timeout_s) as answer:
            return dict(json.load(answer)["action"])
    except (OSError, ValueError, KeyError) as error:
        raise ConnectionError(
            f"{page} has no schema of actions ({error}): is an OpenEnv server there?"
        ) from error


def _method_of(tool: _Tool) -> Callable[..., str]:
    """Return a tool as a method with type hints and a docstring. Raise ValueError for a wrong name."""
    fields = {
        name: field
        for name, field in tool.schema.get("properties", {}).items()
        if "const" not in field and not (tool.is_action and name == "metadata")
    }
    if bad := [name for name in (tool.name, *fields) if not name.isidentifier() or name == "self"]:
        raise ValueError(f"OpenEnv: {bad[0]!r} of the tool {tool.name} is no name that Python can use")
    if tool.name.startswith("_") or tool.name in ("reset", "get_reward"):
        raise ValueError(f"OpenEnv: a tool cannot be called {tool.name}; rename the server's tool")

    def method(self: _Environment, **arguments: Any) -> str:
        """Take a step of the session with these arguments."""
        signature.bind(self, **arguments)
        action = {"type": "call_tool", "tool_name": tool.name, "arguments": arguments}
        return self._step(arguments if tool.is_action else action)

    signature = _signature_of(tool.schema, fields)
    hints = {name: one.annotation for name, one in signature.parameters.items() if name != "self"}
    method.__name__ = method.__qualname__ = tool.name
    method.__annotations__ = hints
    method.__doc__ = _docstring(tool, fields)
    vars(method)["__signature__"] = signature
    return method


def _signature_of(schema: Mapping[str, Any], fields: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of a method with these fields. Those not required default to None."""
    required = schema.get("required", ())
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    for name in sorted(fields, key=lambda name: name not in required):
        default = inspect.Parameter.empty if name in required else None
        hint = _type_of(fields[name], schema.get("$defs", {}))
        parameters.append(inspect.Parameter(name, kind, annotation=hint, default=default))
    return inspect.Signature(parameters)


def _docstring(tool: _Tool, fields: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a docstring in Google's style, from which the tool's schema is read."""
    lines = [_SECTION.split(tool.description)[0].strip() or tool.name]
    if fields:
        lines += ["", "Args:"]
    for name, field in fields.items():
        said = re.search(rf"^\s*{name}(?: \(.*?\))?:\s*(.+)$", tool.description, re.MULTILINE)
        text = field.get("description") or (said[1] if said else "") or field.get("title") or name
        lines.append(f"    {name}: {' '.join(text.split())}")
    return "\n".join(lines)


def _type_of(field: Mapping[str, Any], definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """Return the type hint for a JSON schema; Any for what has none."""
    if depth > _DEEPEST:
        return Any
    if "$ref" in field:
        field = definitions.get(field["$ref"].rpartition("/")[2], {})
    if "enum" in field:
        return Literal[tuple(field["enum"])]
    kinds = field.get("type")
    if options := field.get("anyOf") or [{**field, "type": kind} for kind in _listed(kinds)]:
        return reduce(or_, (_type_of(option, definitions, depth + 1) for option in options))
    if kinds == "array":
        return list[_type_of(field.get("items", {}), definitions, depth + 1)]  # type: ignore[misc]
    return _TYPES.get(str(kinds), Any)


def _listed(kinds: object) -> list[Any]:
    """Return a list unchanged, an empty one for anything else."""
    return kinds if isinstance(kinds, list) else []
