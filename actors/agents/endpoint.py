"""OpenAI's /v1/chat/completions on the loopback address of the actor, with a key per live rollout.

A key leads to one rollout, so that no rollout sees or writes what another one has. A key is valid while
its rollout lives. Every error has OpenAI's form, and nothing that is sent here ends the actor.
"""

import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from aiohttp import web

from penstock.actors.agents.form import CallRefused

_LOOPBACK = "127.0.0.1"
_LONGEST_BODY = 4 * 2**20
_SHUTDOWN_S = 1.0

_SILENT = logging.Logger("endpoint", logging.CRITICAL + 1)
"""In place of aiohttp's log, which whoever reaches the address could fill."""


class Answering(Protocol):
    """What a key leads to: a rollout."""

    async def call(self, body: bytes) -> Any:
        """Return the answer to a call's bytes as plain data. Raise CallRefused."""


class Endpoint:
    """The HTTP server of an actor. `url` is its address for clients once `start` has returned."""

    def __init__(self) -> None:
        self.url = ""
        self._live: dict[str, Answering] = {}
        app = web.Application(client_max_size=_LONGEST_BODY, middlewares=[_errors_as_json])
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=_SILENT,
            shutdown_timeout=_SHUTDOWN_S,
        )  # fmt: skip

    async def start(self) -> None:
        """Listen on a free port of the loopback address. Raise OSError if there is none."""
        await self._runner.setup()
        await web.TCPSite(self._runner, _LOOPBACK, 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Stop listening, and end open connections within a second."""
        await self._runner.cleanup()

    @contextmanager
    def key_for(self, rollout: Answering) -> Iterator[str]:
        """Give the key of a rollout, which is valid during the block."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._live[key] = rollout
        try:
            yield key
        finally:
            del self._live[key]

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a call. Raise CallRefused, also for a key that no live rollout has."""
        rollout = self._rollout_of(request.headers.get("Authorization", ""))
        if rollout is None:
            raise CallRefused(
                "the key is that of no live rollout: use the api_key that the agent was called with",
                401, "invalid_api_key",
            )  # fmt: skip
        return web.json_response(await rollout.call(await request.read()))

    def _rollout_of(self, header: str) -> Answering | None:
        """Return the rollout whose key a header has, None for none. Each key is compared in full."""
        given, found = header.removeprefix("Bearer ").encode(errors="replace"), None
        for key, rollout in self._live.items():
            if hmac.compare_digest(key.encode(), given):
                found = rollout
        return found


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a request; errors get OpenAI's form."""
    try:
        return await handler(request)
    except CallRefused as error:
        refused = error
    except web.HTTPException as error:
        hint = f"expected POST /v1/chat/completions with at most {_LONGEST_BODY} bytes"
        refused = CallRefused(f"{error.status} {error.reason}: {hint}", error.status, "invalid_request")
    return web.json_response(refused.body, status=refused.status)
