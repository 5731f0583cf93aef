"""A small server that speaks OpenEnv's protocol, as openenv-core 0.3.0 does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

Answer = tuple[str, dict[str, Any]]
"""The type and the data of a message."""

ACTION = {
    "description": "Guess a number.",
    "properties": {
        "metadata": {"type": "object"},
        "mood": {"anyOf": [{"$ref": "#/$defs/Mood"}, {"type": "null"}], "default": None},
        "number": {"type": "integer", "title": "Number"},
        "parts": {"type": "array", "items": {"type": ["number", "string"]}},
    },
    "required": ["number"],
    "$defs": {"Mood": {"enum": ["calm", "bold"]}},
}
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.\n\nArgs:\n    a: The first.\n    b: The second.\n",
        "inputSchema": {
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]


def observation(reward: float | None = None, done: bool = False, **fields: Any) -> Answer:
    return "observation", {"observation": fields, "reward": reward, "done": done}


class Guessing:
    """A server's environment with actions: the row's answer is to be guessed."""

    def tools(self) -> dict[str, Any]:
        return {"error": {"code": -32603, "message": "Environment does not support MCP"}}

    def reset(self, data: dict[str, Any]) -> Answer:
        self.answer = int(data["answer"])
        return observation(hint=f"Guess: {data['question']}")

    def step(self, action: dict[str, Any]) -> Answer:
        if action["number"] < 0:
            return "error", {"message": "no negative numbers", "code": "EXECUTION_ERROR"}
        right = action["number"] == self.answer
        hint = "right" if right else "too low" if action["number"] < self.answer else "too high"
        return observation(reward=1.0 if right else -0.25, done=right, hint=hint, action=action)


class Adding:
    """A server's environment with tools of MCP."""

    def tools(self) -> dict[str, Any]:
        return {"result": {"tools": TOOLS}}

    def reset(self, data: dict[str, Any]) -> Answer:
        return observation()

    def step(self, action: dict[str, Any]) -> Answer:
        assert (action["type"], action["tool_name"]) == ("call_tool", "add")
        total = action["arguments"]["a"] + action["arguments"]["b"]
        if total > 100:
            return observation(tool_name="add", error={"message": "too large"}, result=None)
        content = [{"type": "text", "text": str(total)}]
        result = {"content": content, "data": total, "is_error": False}
        return observation(tool_name="add", result=result, error=None)


def _serve_session(connection: ServerConnection, make: Callable[[], Any]) -> None:
    """Answer one session's messages."""
    environment = make()
    for text in connection:
        message = json.loads(text)
        kind, data = message["type"], message.get("data", {})
        if kind == "mcp":
            answer = ("mcp", {"jsonrpc": "2.0", "id": data["id"], **environment.tools()})
        else:
            answer = getattr(environment, kind)(data)
        connection.send(json.dumps({"type": answer[0], "data": answer[1]}))


def _page(connection: ServerConnection, request: Request) -> Response | None:
    """Answer GET /schema; anything else is a session."""
    if request.path != "/schema":
        return None
    body = json.dumps({"action": ACTION, "observation": {}, "state": {}}).encode()
    headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
    return Response(HTTPStatus.OK, "OK", headers, body)


@contextmanager
def openenv_server(make: Callable[[], Any], sessions: int = 8) -> Iterator[str]:
    """The address of a server, each of whose sessions has an environment of its own."""
    free = threading.Semaphore(sessions)

    def handle(connection: ServerConnection) -> None:
        if not free.acquire(blocking=False):
            data = {"message": "Server at capacity", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": data}))
            return
        try:
            _serve_session(connection, make)
        finally:
            free.release()

    server: Server = serve(handle, "127.0.0.1", 0, process_request=_page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
    finally:
        server.shutdown()
        thread.join()
