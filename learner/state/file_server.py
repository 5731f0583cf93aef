"""The learner's file server: versions and files of the model, for other hosts."""

import asyncio
import hmac
import math
import os
import re
import secrets
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.redis_url import ServerAddress
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.transfer.connections import LimitedConnection, busy
from penstock.common.transfer.download import KEEPALIVE, FetchFailed, Source
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Weights
from penstock.learner.state.versions import FOLDER_NAME

_UPLOADS, _TURN_S, _PATIENCE_S = 2, 4.0, 1.0
"""Files sent at a time, seconds of a turn, and seconds without a chunk that end it too.

With the most connections each client has a turn within its 600 s."""
_MOST_CONNECTIONS = 256
_CHUNK, _CHUNK_S = 1 << 20, 30.0
"""Bytes of a chunk, and seconds after its turn that a client has for one: a slower one is cut off."""
_NEXT_FILE_S = 60.0
"""Seconds that a client has to ask for the next one of a version's files."""
_ANYWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}
"""Of networks for documentation: the route to them is the one to the outside."""
_START_S = 30.0
_SHUTDOWN_S = 1.0
_RANGE = re.compile(r"bytes=(\d{1,15})-")
_VERSION = re.compile(
    rf"/versions/({FOLDER_NAME.pattern})/((?:adapter_)?model\.safetensors|model\.delta"
    r"|model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json)"
)
_MODEL = re.compile(r"/model/([A-Za-z0-9._-]{1,200})")

log = get_logger(__name__)


@contextmanager
def serving(
    settings: LearnerSettings, queue: ServerAddress, versions: Path, contract: Contract
) -> Iterator["FileServer | None"]:
    """Serve the run's files during the block, and yield the server; None if they are not served.

    LEARNER_FILES_ADDRESS is the address. With "auto" it is the one by which this host reaches the queue
    server, on a free port; nothing is served if that server has a unix socket, as all processes are on
    this host then. Raise ConfigError for an address that cannot be used.
    """
    asked = settings.files_address
    if asked == "off" or (asked == "auto" and not queue.host):
        yield None
        return
    host, port = (_address_towards(queue.host), 0) if asked == "auto" else _split(asked)
    names = [one.name for one in contract.model_files]
    with FileServer(versions, Path(contract.model), names, host, port) as server:
        server.url = settings.files_url or f"http://{_reachable(host, server.bound)}:{server.port}"
        _check_url(server)
        log.info(f"Actors and rewarders on other hosts get the run's files from {server.url}.")
        yield server


def _check_url(server: "FileServer") -> None:
    """Raise ConfigError if no actor would follow the URL of a server."""
    try:
        Source(server.url, server.token).address_of("")
    except FetchFailed as error:
        raise ConfigError(f"LEARNER_FILES_URL: {error}") from error


def _address_towards(host: str) -> str:
    """Return the address of this host on the way to another one. Raise ConfigError if unknown."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*found[:2]) as probe:
            probe.connect(found[4])  # of a datagram's socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this host's address towards {host} is not known ({error}): set LEARNER_FILES_ADDRESS to "
            "HOST:PORT, or to off"
        ) from error


def _reachable(host: str, bound: str) -> str:
    """Return the host of a URL for a server that listens at `host`; for all addresses the outer one.

    `bound` is the numeric address of `host`. Without a route to the outside return this host's name.
    """
    found = ip_address(bound)
    if found.is_unspecified:
        try:
            host = _address_towards(_ANYWHERE[found.version])
        except ConfigError:
            host = socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _split(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", such as "10.0.0.5:29700" or "[::]:29700"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(slots=True)
class _Fetch:
    """One of a version's files is sent. Until `until` its client may ask for the next one."""

    folder: str
    until: float = math.inf  # on the loop's clock


class FileServer:
    """Serves the folder `versions` of a run, and the files of the folder `model` with these `names`.

    A request needs the `token`. Two files are sent at a time, in the order in which they were asked for,
    a large one in turns of 4 s; a part of a file may be asked for. `host` is an address of this host,
    `port` 0 stands for a free one. As a context it listens, in a thread of its own, from begin to end.
    Raise ConfigError if it cannot.
    """

    def __init__(
        self, versions: Path, model: Path, names: Collection[str], host: str, port: int
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.port, self.url = port, ""  # the URL is what is announced
        self.bound = ""  # the numeric address
        self.is_used = False  # True: a version was asked for
        self._versions, self._model, self._names = versions, model, frozenset(names)
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._uploads = asyncio.Semaphore(_UPLOADS)
        self._fetches: list[_Fetch] = []  # replaced by new ones: another thread reads it
        self._thread = threading.Thread(target=self._loop.run_forever, name="files", daemon=True)

    def offer(self, weights: Weights) -> Weights:
        """Return the announcement of weights in `versions`."""
        return Source(self.url, self.token).offer(weights)

    def being_fetched(self) -> frozenset[str]:
        """Return the names of the folders of versions of several files that are being fetched.

        A file of each is sent now, or was sent in the last minute.
        """
        now = self._loop.time()
        return frozenset(one.folder for one in self._fetches if one.until >= now)

    def __enter__(self) -> "FileServer":
        """Begin to listen, and return self. Raise ConfigError if the address cannot be used."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_START_S)
        except (OSError, OverflowError, UnicodeError) as error:
            self._stop()
            raise ConfigError(
                f"LEARNER_FILES_ADDRESS: {self._host}:{self.port} cannot be listened at ({error}): name "
                "an address of this host and a free port, or off"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening, and end what is being sent."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_START_S)
        self._stop()

    def _stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    async def _listen(self) -> None:
        """Listen, and set `port`. Raise OSError if the address cannot be used."""
        # A request whose client has left ends: it would keep its file open until its turn.
        server = self._server = web.Server(self._answer, handler_cancellation=True)

        def connection() -> asyncio.Protocol:
            """Return the protocol of a new connection."""
            return LimitedConnection(server, _MOST_CONNECTIONS)

        self._listening = await self._loop.create_server(connection, self._host, self.port)
        for listening in self._listening.sockets:  # what it accepts has the same options
            for option in KEEPALIVE:
                listening.setsockopt(*option)
        self.bound, self.port = self._listening.sockets[0].getsockname()[:2]

    async def _close(self) -> None:
        """Stop listening, and close all connections."""
        self._listening.close()
        await self._server.shutdown(_SHUTDOWN_S)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response to a request, after the file that it asks for was sent."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return web.Response(status=401)
        if request.method != "GET":
            return web.Response(status=405)
        self.is_used |= _VERSION.fullmatch(request.path) is not None
        if not (path := self._file(request.path)):
            return web.Response(status=404)
        try:
            file = path.open("rb")
        except OSError:
            return web.Response(status=404)
        # A file that is deleted from now on is sent all the same.
        with file, busy(request.protocol), self._fetching(path):
            return await self._send(request, file)

    @contextmanager
    def _fetching(self, path: Path) -> Iterator[None]:
        """Count the folder of one of several files as `being_fetched` during the block and after it."""
        if not path.name.startswith("model-"):
            yield
            return
        fetch = _Fetch(path.parent.name)
        self._fetches = [*(one for one in self._fetches if one.until >= self._loop.time()), fetch]
        try:
            yield
        finally:
            fetch.until = self._loop.time() + _NEXT_FILE_S

    async def _send(self, request: web.BaseRequest, file: BinaryIO) -> web.StreamResponse:
        """Send the asked part of a file, and return the response.

        The head comes at once. A client that does not read is cut off.
        """
        size = os.fstat(file.fileno()).st_size
        part = _RANGE.fullmatch(request.headers.get("Range", "bytes=0-"))
        begin = int(part[1]) if part else size + 1
        if begin > size:
            return web.Response(status=416)
        head = {"Content-Length": str(size - begin)}
        if begin:
            head["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
        response = web.StreamResponse(status=206 if begin else 200, headers=head)
        await response.prepare(request)
        file.seek(begin)
        while await self._send_turn(response, file):
            pass
        return response

    async def _send_turn(self, response: web.StreamResponse, file: BinaryIO) -> bool:
        """Send what a client reads of a file in its turn, once it comes; return whether there is more.

        The turn ends after 4 s, and for a client that does not take a chunk within 1 s: it may do that
        while others have their turn.
        """
        sending: asyncio.Future[None] = self._loop.create_future()
        sending.set_result(None)
        try:
            async with self._uploads:
                ends = self._loop.time() + _TURN_S
                while sending.done() and (left := ends - self._loop.time()) > 0:
                    sending.result()  # raises if the client has left
                    if not (chunk := await self._loop.run_in_executor(None, file.read, _CHUNK)):
                        return False
                    sending = asyncio.ensure_future(response.write(chunk))
                    await asyncio.wait([sending], timeout=min(left, _PATIENCE_S))
            async with asyncio.timeout(_CHUNK_S):
                await sending
            return True
        finally:
            sending.cancel()

    def _file(self, asked: str) -> Path | None:
        """Return the file that a URL's path asks for, None if it is none that is served."""
        if match := _VERSION.fullmatch(asked):
            return self._versions / match[1] / match[2]
        if (match := _MODEL.fullmatch(asked)) and match[1] in self._names:
            return self._model / match[1]
        return None
