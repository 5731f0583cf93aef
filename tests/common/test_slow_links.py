"""A large value over a slow network arrives: the timeout of a socket is for missing progress."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.common.broker import connection as connection_module
from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.redis_url import parse_url
from penstock.common.errors import ServerUnavailable

BYTES_PER_S = 500_000


@contextmanager
def slow_link(server: LocalServer) -> Iterator[str]:
    """The URL of a network that holds little and lets few bytes pass in a second."""
    address = parse_url(server.url)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 14):
                    time.sleep(len(data) / BYTES_PER_S)
                    target.sendall(data)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    behind = socket.socket(socket.AF_UNIX)
                    behind.connect(address.path)
                    for ends in ((client, behind), (behind, client)):
                        threading.Thread(target=carry, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://:{address.password}@127.0.0.1:{listener.getsockname()[1]}/0"


def test_a_value_that_takes_longer_than_the_timeout_passes(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch, run_name: str
) -> None:
    monkeypatch.setattr(connection_module, "_SOCKET_TIMEOUT_S", 2.5)
    value = b"x" * 4_000_000
    with slow_link(queue_server) as url:
        connection = Connection(url, 10, 20)
        connection.execute("SET", run_name, value)
        assert connection.execute("GET", run_name) == value
        assert connection.interruptions == 0
        connection.execute("DEL", run_name)
        connection.close()


def test_an_error_names_the_size_of_what_did_not_pass(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch, run_name: str
) -> None:
    monkeypatch.setattr(connection_module, "_SOCKET_TIMEOUT_S", 0.3)
    with slow_link(queue_server) as url:
        connection = Connection(url, 10, 0.5)
        monkeypatch.setattr(connection_module, "_PIECE", 1 << 24)
        with pytest.raises(ServerUnavailable, match=r"to a command of 4\.0 MB"):
            connection.execute("SET", run_name, b"x" * 4_000_000)
        connection.close()
