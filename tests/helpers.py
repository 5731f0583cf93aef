"""What many tests need: waiting for a condition, and a network that loses replies."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP
from penstock.common.config.redis_url import parse_url

NIGHTLY = os.environ.get("NIGHTLY") == "1"
nightly = pytest.mark.skipif(not NIGHTLY, reason="takes minutes: NIGHTLY=1")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
"""Importing vLLM would take five seconds in each of pytest's workers."""

ALONE = 1_000_000
"""In a delivery count: the ticket runs alone. Twice this is a renewal (common/broker/functions.lua)."""


def wait_until(predicate: Callable[[], Any], what: str, timeout_s: float = 300.0) -> Any:
    """The first true value of `predicate`; fails naming `what` when none came in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port of loopback where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_written(connection: Connection) -> None:
    """Return when all that was acknowledged is in the server's file, where kill -9 leaves it.

    While the disk is busy with an earlier sync the server acknowledges first and writes later.
    """
    wait_until(
        lambda: connection.execute("INFO")["aof_buffer_length"] == 0, "the server to have written"
    )


def is_alone(deliveries: int) -> bool:
    """Whether a delivery count says that the ticket runs alone."""
    return (deliveries - 1) % (2 * ALONE) >= ALONE


def runs_alone(connection: Connection, stream: str) -> bool:
    """Whether a worker said of an entry that it works on nothing else."""
    look = f"return redis.call('XPENDING', KEYS[1], '{GROUP}', '-', '+', 10)"
    pending = connection.execute("EVAL", look, 1, stream)
    return any(is_alone(deliveries) for _, _, _, deliveries in pending)


def is_dead(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True, slots=True)
class AclUsers:
    """Connections to one server: of the operator, and of each role's user."""

    operator: Connection
    learner: Connection
    actor: Connection
    rewarder: Connection
    reader: Connection


class LossyProxy:
    """A network that loses replies: the server does what it was asked, nobody hears.

    `lose_reply_to(pattern)` arms it: the next request that contains the pattern reaches the server,
    whose reply is thrown away together with the connection. With `every` each reply of that number is
    lost so, whoever asked. A client that sends several commands at once loses the replies that
    come in one piece with it.

    `answer(pattern, reply, times)` gives the next requests that contain the pattern this reply, in the
    place of the server, which does not get them.
    """

    def __init__(self, url: str, every: int = 0) -> None:
        self._server = parse_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = f"redis://:{self._server.password}@127.0.0.1:{port}/0"
        self.replies = 0
        self.lost = 0
        self._every = every
        self._counting = threading.Lock()
        self._pattern: bytes | None = None
        self._answers: list[tuple[tuple[bytes, ...], bytes]] = []

    def __enter__(self) -> LossyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def lose_reply_to(self, pattern: bytes) -> None:
        """Lose the reply to the next request that contains these bytes."""
        self._pattern = pattern

    def answer(self, *patterns: bytes, reply: bytes, times: int = 1) -> None:
        """Give the next requests that contain all these bytes this reply."""
        with self._counting:
            self._answers += [(patterns, reply)] * times

    @property
    def unanswered(self) -> list[tuple[bytes, ...]]:
        """The patterns of which no request has come yet."""
        return [patterns for patterns, _ in self._answers]

    def _answer_to(self, request: bytes) -> bytes | None:
        with self._counting:
            for place, (patterns, reply) in enumerate(self._answers):
                if all(pattern in request for pattern in patterns):
                    del self._answers[place]
                    return reply
        return None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        lose = threading.Event()
        with client, contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
            server.connect(self._server.path)
            threading.Thread(target=self._forward, args=(client, server, lose), daemon=True).start()
            while (reply := _receive(server)) and not self._loses(lose.is_set()):
                client.sendall(reply)
            for end in (client, server):
                _shut(end)

    def _loses(self, armed: bool) -> bool:
        with self._counting:
            self.replies += 1
            due = self._every and self.replies % self._every == 0
            self.lost += bool(armed or due)
        return bool(armed or due)

    def _forward(self, client: socket.socket, server: socket.socket, lose: threading.Event) -> None:
        while request := _receive(client):
            if self._pattern is not None and self._pattern in request:
                self._pattern = None
                lose.set()
            answer = self._answer_to(request)
            try:
                if answer is None:
                    server.sendall(request)
                else:
                    client.sendall(answer)
            except OSError:
                break
        _shut(server)


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 20)
    except OSError:
        return b""


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Clock:
    """In place of the module `time`: a clock that the test moves, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The time, as `time.monotonic` gives it."""
        return self.now
