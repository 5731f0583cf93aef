"""OpenAI's /v1/chat/completions on the loopback address of the actor, with a key per live rollout.

A key leads to one rollout, so that no rollout sees or writes what another one has. A key is valid while
its rollout lives. Every error has OpenAI's form, and nothing that is sent here ends the actor.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from penstock.actors.agents.form import CallRefused, ended
from penstock.common.text import short
from penstock.common.transfer.connections import LimitedConnection, busy
from penstock.common.wire.plain import brief

_LOOPBACK = "127.0.0.1"
_LONGEST_BODY = 4 * 2**20
_SHUTDOWN_S = 1.0
_BODY_S = 30.0
_PARSERS = 2
"""Threads that parse calls; further calls wait. A parsed body of 4 MiB may take 100 times as much."""


class CallHandler(Protocol):
    """A rollout that answers the calls made with its key. At most `most_calls` are served at a time."""

    most_calls: int

    async def call(self, body: bytes) -> Any:
        """Return the answer to `body`, the bytes of a request, as plain data. Raise CallRefused."""


@dataclass(slots=True, eq=False)
class _Live:
    """A live rollout, how many of its calls are open, and the timeouts of those that are being read."""

    rollout: CallHandler
    calls: int = 0
    reading: set[asyncio.Timeout] = field(default_factory=set)
    over: bool = False

    async def body_of(self, request: web.Request) -> bytes:
        """Return the body of `request`. Raise CallRefused after 30 s, and once the rollout has ended."""
        limit = asyncio.timeout(_BODY_S)
        self.reading.add(limit)
        try:
            async with limit:
                return await request.read()
        except TimeoutError:
            if self.over:
                raise ended() from None
            raise CallRefused(
                f"the body took over {_BODY_S:g} s: let the agent send it at once", 408, "timeout"
            ) from None
        finally:
            self.reading.discard(limit)

    def end(self) -> None:
        """End the reading of all bodies now."""
        self.over = True
        for limit in self.reading:
            if not limit.expired():
                limit.reschedule(0.0)

    @contextmanager
    def one_more_call(self) -> Iterator[None]:
        """Count a call for the time of the block. Raise CallRefused, status 429, if there are enough."""
        most = self.rollout.most_calls
        if self.calls >= most:
            raise CallRefused(
                f"this rollout has {most} open calls, expected fewer: let the agent wait for answers, "
                "or raise LEARNER_AGENT_SEQUENCES: twice that many calls may be open",
                429, "rate_limit_exceeded",
            )  # fmt: skip
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1


class Endpoint:
    """The HTTP server of an actor, which serves POST /v1/chat/completions. Creating it opens no port.

    `url` is "" until `start` has returned, then the base URL for clients, http://127.0.0.1:PORT/v1. A
    body over 4 MiB gets the status 413. A call is cancelled when its client closes the connection. One
    call more than a rollout may have at a time gets 429 before its body is read. A body that takes over
    30 s to come gets 408. A connection without a request, or with half a head, is closed after 60 s. For
    a connection beyond `most_connections` the oldest one without an open call is closed.
    """

    def __init__(self, most_connections: int = 512) -> None:
        self.url = ""
        self._live: dict[str, _Live] = {}
        self._parsers = ThreadPoolExecutor(_PARSERS, "call")
        self._most_connections = most_connections
        self._listening: asyncio.Server | None = None
        app = web.Application(client_max_size=_LONGEST_BODY, middlewares=[_errors_as_json])
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1 and set `url`. Raise OSError if none can be opened."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connection, _LOOPBACK, 0)
        host, port = self._listening.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Stop listening. Open calls have 1 s to end; then they are cancelled, without an answer."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()
        self._parsers.shutdown(wait=False, cancel_futures=True)

    def parse(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Call `function(*arguments)` in one of the endpoint's 2 threads; return a future of it."""
        return asyncio.get_running_loop().run_in_executor(self._parsers, function, *arguments)

    @contextmanager
    def key_for(self, rollout: CallHandler) -> Iterator[str]:
        """Give a new key, "sk-...", whose calls `rollout` answers; refuse it after the block.

        Calls whose body is being read then are refused too.
        """
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._live[key] = _Live(rollout)
        try:
            yield key
        finally:
            self._live.pop(key).end()

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, whose calls `_complete` answers."""
        assert self._runner.server is not None, "the endpoint has started"
        return _Connection(self._runner.server, self._most_connections)

    async def _complete(self, request: web.Request) -> web.Response:
        """Return as JSON the answer of the rollout whose key the request has.

        Raise CallRefused, with the status 401 if its header Authorization has no live rollout's key, 429
        if as many calls as may be are open, and 400 for a body that is compressed.
        """
        live = self._live_of(request.headers.get("Authorization", ""))
        if live is None:
            raise CallRefused(
                "the key is that of no live rollout: let the agent send the api_key that it was given",
                401, "invalid_api_key",
            )  # fmt: skip
        if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise CallRefused(f"the body's Content-Encoding is {brief(coding)}: send it as plain JSON")
        with live.one_more_call(), busy(request.protocol):
            return web.json_response(await live.rollout.call(await live.body_of(request)))

    def _live_of(self, header: str) -> _Live | None:
        """Return the live rollout whose key `header` has, "Bearer KEY" or KEY; None if none has it."""
        given, found = header.removeprefix("Bearer ").encode(errors="replace"), None
        for key, live in self._live.items():
            if hmac.compare_digest(key.encode(), given):
                found = live
        return found


class _Connection(LimitedConnection):
    """A connection to the endpoint.

    What cannot be read as HTTP, and any fault, gets an error of OpenAI's form too.
    """

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        """Return an error with `status` and the cause, `message` or else `exc`; end the connection.

        The status is 400 if no `request` could be read, which is a stand-in then, and 500 for a fault.
        """
        cause = short(message or repr(exc), 300)
        refused = CallRefused(f"the endpoint cannot serve this request: {cause}", status)
        response = web.json_response(refused.body, status=status)
        response.force_close()
        return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return the response of `handler` to `request`; for two errors a response in OpenAI's JSON form.

    The errors are CallRefused, and aiohttp's HTTPException, such as 404 for another path, whose text
    also says which request was expected. Both keep their status. `handle_error` answers any other one.
    """
    try:
        return await handler(request)
    except CallRefused as error:
        refused = error
    except web.HTTPException as error:
        hint = f"let the agent send POST /v1/chat/completions with at most {_LONGEST_BODY} bytes"
        refused = CallRefused(f"{error.status} {error.reason}: {hint}", error.status, "invalid_request")
    return web.json_response(refused.body, status=refused.status)
