"""Connections to a role's HTTP server, which outlives clients that do nothing, or too much."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

_IDLE_S = 60.0

_SILENT = logging.Logger("http", logging.CRITICAL + 1)
"""In place of aiohttp's log, which whoever reaches the address could fill."""


class LimitedConnection(web.RequestHandler):
    """A connection to `server`, which has at most `most` of them. Nothing is logged.

    One without a request, or with half a head, is closed after 60 s.
    """

    def __init__(self, server: web.Server, most: int) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), access_log=_SILENT, logger=_SILENT,
            auto_decompress=False, keepalive_timeout=_IDLE_S,
        )  # fmt: skip
        self._server, self._most, self.busy = server, most, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve the client behind `transport`.

        If there are enough connections, close the oldest one without an open call; if all have one,
        close the new one.
        """
        others = [one for one in self._server.connections if one.transport is not None]
        if len(others) >= self._most:
            if not (idle := [one for one in others if not getattr(one, "busy", True)]):
                transport.close()
                return
            idle[0].force_close()
        super().connection_made(transport)

    def force_close(self) -> None:
        """Close the connection at once. What is unsent is dropped: its client may never read it."""
        if self.transport is not None:
            self.transport.abort()
        super().force_close()


@contextmanager
def busy(connection: Any) -> Iterator[None]:
    """Mark a LimitedConnection as one with an open call for the time of the block."""
    connection.busy = True
    try:
        yield
    finally:
        connection.busy = False
