"""Fetching one file from the learner's file server, checked against what was announced."""

import errno
import fcntl
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import SplitResult, urlsplit

from penstock.common.deadline import Deadline, run_aside
from penstock.common.errors import PenstockError, ServerUnavailable
from penstock.common.files.hashing import hash_file, new_digest
from penstock.common.files.lock import NO_LOCKS
from penstock.common.log import shorten
from penstock.common.transfer.object_store import StoreFailed, is_plain_store, is_store, read_file
from penstock.common.wire.messages import Weights

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 10.0
_SILENCE_S = 600.0
"""Longest wait for the next bytes: the server sends two files at a time, and the others wait."""
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), 10)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL")  # TCP_KEEPALIVE: on macOS
        if hasattr(socket, name)
    ),
]
"""A host that is gone is noticed within 40 s, also while this process waits for its turn."""
_SLOWEST = 64 << 10
"""Bytes per second of the slowest server: a slower one is given up."""
_POLL_S, _LOOK_S = 0.1, 5.0
_CHUNK = 1 << 20
_PRINTABLE = re.compile(r"[!-~]*")
_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, *NO_LOCKS)
"""Errors of a cache's folder that only a person ends."""


class FetchFailed(ServerUnavailable):
    """A file could not be fetched, or is not the announced one. A later try may succeed."""


class CacheUnusable(FetchFailed):
    """The folder for fetched files cannot be written until a person mends it."""


class RangeIgnored(FetchFailed):
    """The server, or a proxy before it, sends whole files only."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the learner's files are, as it was announced: a base URL, and the token that is asked for.

    The URL is that of the learner's file server, or of a run's folder in an object store (no token). A
    file:// URL is followed only with `files`: whoever writes to the queue server chooses the URL.
    `moved` returns whether the learner has announced another address or token since.
    """

    url: str
    token: str = field(repr=False)
    files: bool = False
    moved: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    def address_of(self, path: str) -> str:
        """Return the URL of a file. Raise FetchFailed if the announced one is no plain URL."""
        usual = _PRINTABLE.fullmatch(f"{self.url}{self.token}") is not None
        try:
            parts = urlsplit(self.url)
            usual &= not ("@" in parts.netloc or parts.query or parts.fragment)
            usual &= is_plain_store(parts) if is_store(self.url) else _is_server(parts)
        except ValueError:
            usual = False
        is_folder = self.url.startswith("file://")
        if not usual or (is_folder and not self.files):
            raise FetchFailed(
                f"the announced file server {shorten(repr(self.url))} is no URL such as "
                "http://10.0.0.5:29700 or s3://bucket/runs, or its token no token: "
                + ("set RUN_ALLOW_FILE_STORE=true here to follow it, or " if usual else "")
                + "correct LEARNER_FILES_ADDRESS or LEARNER_FILES_URL"
            )
        return f"{self.url.rstrip('/')}/{path}"

    def offer(self, weights: Weights) -> Weights:
        """Return the announcement of weights that can be fetched here."""
        return replace(weights, url=self.url, token=self.token)


def _is_server(parts: SplitResult) -> bool:
    """Return whether a URL names a server by http or https. Raise ValueError for a wrong one."""
    (parts.hostname or "").encode("idna")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to fetch: its path on the server, and its announced size in bytes and hash."""

    path: str
    size: int
    hash: str


def download(source: Source, wanted: Wanted, target: Path) -> None:
    """Put the wanted file at `target`, unless a file of its size and hash is there. Block meanwhile.

    Processes of this host that fetch into the same folder wait for each other. What came of a file stays
    beside `target` if the download is cut: the next one goes on from there. Raise FetchFailed if the
    server does not answer or refuses, redirects, or sends another file than the announced one,
    CacheUnusable if the file cannot be written here.
    """
    import httpx

    try:
        if _is_wanted(target, wanted):
            return
        source.address_of(wanted.path)  # before the errors below name the URL
        with alone(target.parent):
            if not _is_wanted(target, wanted):
                part = target.with_name(f".{target.name}.{wanted.hash[:16]}.part")
                try:
                    _complete(source, wanted, part)
                except RangeIgnored:
                    part.unlink()
                    raise
                part.replace(target)
    except StoreFailed as error:
        raise FetchFailed(str(error)) from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last for a host's name
        raise FetchFailed(
            f"{source.url} did not send {wanted.path} ({error!r}): see whether this host reaches the "
            "learner's, and which address LEARNER_FILES_ADDRESS names"
        ) from error
    except OSError as error:
        raise not_stored(f"{wanted.path} ({wanted.size} bytes)", target, error) from error


def not_stored(what: str, target: Path, error: OSError) -> FetchFailed:
    """Return the error to raise if something cannot be put at `target`."""
    return (CacheUnusable if error.errno in _LASTING else FetchFailed)(
        f"{what} cannot be stored as {target}: {error}; set RUN_CACHE_DIR to a folder that can be "
        "written and locked, with room for nine versions"
    )


def store(wanted: Wanted, chunks: Iterable[bytes], target: Path) -> bool:
    """Put the wanted file at `target`, if it consists of these chunks; return whether it is there.

    Processes of this host that fetch into the same folder wait for each other. Raise FetchFailed if
    another one does not end, OSError if the file cannot be written, and what `chunks` raises.
    """
    with alone(target.parent):
        if _is_wanted(target, wanted):
            return True
        aside = target.with_name(f".{target.name}.new")
        with aside.open("wb") as file:
            file.writelines(chunks)
        if is_right := _is_wanted(aside, wanted):
            aside.replace(target)
        else:
            aside.unlink()
        return is_right


@contextmanager
def alone(folder: Path, wait_s: float = _SILENCE_S) -> Iterator[None]:
    """Hold the lock of a folder of fetched files, among this host's processes, during the block.

    The folder is created if need be. Raise FetchFailed if another process has the lock for `wait_s`,
    OSError if there can be no such folder.
    """
    deadline = Deadline(wait_s)
    while (file := _locked(folder)) is None:
        if deadline.expired():
            raise FetchFailed(
                f"another process fetches the files of {folder} since {wait_s:g} s ago: see what it does"
            )
        time.sleep(_POLL_S)
    with file:
        yield


def _locked(folder: Path) -> TextIO | None:
    """Return the open file that is the lock of a folder, which is created if need be; None if not free.

    None too if the folder is deleted meanwhile: whoever locks a deleted file is not alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = (folder / ".lock").open("w")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def _is_wanted(path: Path, wanted: Wanted) -> bool:
    """Return whether the file at `path` has the wanted size and hash. Raise OSError if not readable."""
    if not path.is_file() or path.stat().st_size != wanted.size:
        return False
    return hash_file(path) == wanted.hash


def _complete(source: Source, wanted: Wanted, part: Path) -> None:
    """Fetch what is missing of the file `part`, and check the whole. Raise FetchFailed, or OSError.

    A part that is no beginning of the wanted file is deleted once its hash is known.
    """
    digest = new_digest()
    with part.open("a+b") as file:
        file.seek(0)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        size = file.tell()
        if size < wanted.size:
            rest = _stored if is_store(source.url) else _rest
            for chunk in rest(source, wanted, size):
                size += len(chunk)
                if size > wanted.size:
                    break
                file.write(chunk)
                digest.update(chunk)
    if size != wanted.size or digest.hexdigest() != wanted.hash:
        part.unlink()
        raise FetchFailed(
            f"{wanted.path} from {source.url} is not the announced file: {size} bytes with the hash "
            f"{digest.hexdigest()[:12]}, expected {wanted.size} with {wanted.hash[:12]}; it is fetched "
            "again at the next try"
        )


def _stored(source: Source, wanted: Wanted, begin: int) -> Iterator[bytes]:
    """Yield the bytes of the wanted file in an object store from byte `begin` on. Raise FetchFailed."""
    deadline = Deadline(limit_s(wanted.size - begin), math.inf)
    for chunk in read_file(source.address_of(wanted.path), begin, wanted.size):
        _check_time(deadline, source, wanted)
        yield chunk


def limit_s(size: int) -> float:
    """Return the seconds in which `size` bytes, a file or its rest, have to be here."""
    return _SILENCE_S + size / _SLOWEST


def _check_time(deadline: Deadline, source: Source, wanted: Wanted) -> None:
    """Raise FetchFailed if the deadline of a download is over."""
    if deadline.expired():
        raise FetchFailed(
            f"{source.url} did not send {wanted.path} within {deadline.limit_s:.0f} s: the rest is "
            "fetched at the next try"
        )


def _rest(source: Source, wanted: Wanted, begin: int) -> Iterator[bytes]:
    """Yield the bytes of the wanted file from byte `begin` on. Raise FetchFailed for a refusal.

    Variables such as HTTP_PROXY do not count: nobody else gets the token.
    """
    import httpx

    headers = {"Authorization": f"Bearer {source.token}", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    timeout = httpx.Timeout(_CONNECT_S, read=_SILENCE_S)
    certificates = _certificates(os.environ.get("SSL_CERT_FILE", ""))
    transport = httpx.HTTPTransport(socket_options=KEEPALIVE, verify=certificates)
    deadline = Deadline(limit_s(wanted.size - begin), math.inf)
    with (
        httpx.Client(transport=transport, timeout=timeout, trust_env=False) as client,
        _cutting(lambda: deadline.expired() or source.moved()) as trace,
        client.stream(
            "GET", source.address_of(wanted.path), headers=headers, extensions={"trace": trace}
        ) as response,
    ):
        _check(response, source, wanted, begin)
        for chunk in response.iter_raw():  # as the bytes come: a cut loses none of them
            _check_time(deadline, source, wanted)
            yield chunk


@cache
def _certificates(_file: str) -> ssl.SSLContext:
    """Return the context with the system's certificates, or those of the `_file` in SSL_CERT_FILE.

    To read them takes 30 ms, which each download of a small version would need again.
    """
    return ssl.create_default_context()


@contextmanager
def _cutting(is_over: Callable[[], bool]) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Yield a function for httpx's extension `trace`; the connection that it saw is cut once `is_over`.

    A server that sends a head without an end, or hangs, would otherwise not be given up.
    """
    connected, ended = list[socket.socket](), threading.Event()

    def watch() -> None:
        """Look every 5 s until the block has ended."""
        while not ended.wait(_LOOK_S):
            with suppress(PenstockError):  # the queue server may be away: the next look follows
                if is_over():
                    _cut(connected)

    run_aside(watch)
    try:
        yield partial(_keep, connected)
    finally:
        ended.set()


def _keep(connected: list[socket.socket], event: str, info: dict[str, Any]) -> None:
    """Keep the socket of a new connection in `connected`; with TLS the one that replaces it."""
    if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
        connected[:] = [info["return_value"].get_extra_info("socket")]


def _cut(connected: list[socket.socket]) -> None:
    """End the connections: whoever reads from them gets no more."""
    for one in connected:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _check(response: "httpx.Response", source: Source, wanted: Wanted, begin: int) -> None:
    """Raise FetchFailed unless a response begins that has the wanted file from byte `begin` on.

    Raise RangeIgnored for a whole file where the rest was asked for. The response has no more bytes than
    it says: whoever reads it gets at most the announced size.
    """
    expected = 206 if begin else 200
    length = response.headers.get("Content-Length", "")
    if begin and response.status_code == 200:
        raise RangeIgnored(
            f"{source.url} answered with the whole of {wanted.path}, expected what is missing: the next "
            "try begins anew; see whether a proxy on the way changes requests"
        )
    if response.status_code != expected:
        raise FetchFailed(
            f"{source.url} answered {wanted.path} with the status {response.status_code}, expected "
            f"{expected}: {_HINTS.get(response.status_code, 'see what listens there')}"
        )
    chunked = "Transfer-Encoding" in response.headers  # it would win over the length
    if chunked or length != str(wanted.size - begin):
        found = "an unnamed number of" if chunked or not length else shorten(repr(length))
        raise FetchFailed(
            f"{source.url} has {found} bytes of {wanted.path} from byte {begin} on, "
            f"expected {wanted.size - begin}: the file is not the announced one"
        )


_HINTS = {
    401: "its token is another one; the learner has started again, and announces the new one",
    404: "the file is deleted there; the newest version is fetched next",
    **dict.fromkeys(
        (301, 302, 303, 307, 308),
        "a redirect is not followed; name the server itself in LEARNER_FILES_URL",
    ),
}
