"""What a server may answer in place of a reply: it is waited for, or an error of ours says what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.replies import PASSING
from penstock.common.errors import (
    CommandRefused,
    ConfigError,
    NotPermitted,
    PenstockError,
    RunNotReady,
    ServerUnavailable,
    WrongType,
)
from tests.helpers import LossyProxy

PASSES = [
    "-OOM command not allowed when used memory > 'maxmemory'.",
    "-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "-BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.",
    "-READONLY You can't write against a read only replica.",
    "-NOREPLICAS Not enough good replicas to write.",
    "-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "-CLUSTERDOWN The cluster is down",
    "-TRYAGAIN Multiple keys request during rehashing of slot",
    "-LOADING Redis is loading the dataset in memory",
    "-ERR max number of clients reached",
    "-ERR max number of clients + cluster connections reached",
    "-ERR Error running function: Script killed by user with FUNCTION KILL. script: penstock_4_places",
    "-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    "-EXECABORT Transaction discarded because of: READONLY You can't write against a read only replica.",
    ":no number",
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/html",
    "$x",
    "",
]
"""All that may pass by itself: codes of the server, and what is no reply of any server."""

REFUSED: list[tuple[str, type[PenstockError], str]] = [
    ("-ERR unknown command 'FCALL'", CommandRefused, "is no cluster"),
    ("-MOVED 7 10.0.0.1:6379", CommandRefused, r"10.0.0.1.* no cluster"),
    ("-ERR user_script:7: attempt to index a nil value", CommandRefused, "nil value.* server's log"),
    ("-CROSSSLOT Keys in request don't hash to the same slot", CommandRefused, "same slot"),
    ("-NEVERHEARD of it", CommandRefused, "NEVERHEARD of it"),
    ("-EXECABORT Transaction discarded because of previous errors.", CommandRefused, "previous errors"),
    ("-NOSCRIPT No matching script", CommandRefused, "No matching script"),
    ("-", CommandRefused, "refused a command"),
    ("-NOPERM this user has no permissions", NotPermitted, "no permissions"),
    ("-WRONGPASS invalid username-password pair", ConfigError, "Correct the user and password"),
    ("-NOAUTH Authentication required.", ConfigError, "Correct the user and password"),
    ("-WRONGTYPE Operation against a key holding the wrong kind of value", WrongType, "another client"),
    ("-NOGROUP No such key", RunNotReady, "not set the run up"),
]


@pytest.fixture
def proxy(queue_server: LocalServer) -> Iterator[LossyProxy]:
    with LossyProxy(queue_server.url) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: LossyProxy) -> Iterator[Connection]:
    connection = Connection(proxy.url, 10, 20)
    yield connection
    connection.close()


def test_each_passing_code_is_in_the_table() -> None:
    codes = {line[1:].split()[0] for line in PASSES if line.startswith("-")}
    assert set(PASSING) <= codes


@pytest.mark.parametrize("line", PASSES)
def test_what_may_pass_is_waited_for(behind: Connection, proxy: LossyProxy, line: str) -> None:
    proxy.answer(b"ECHO", reply=f"{line}\r\n".encode(), times=2)
    assert behind.execute("ECHO", "hello") == b"hello"
    assert proxy.unanswered == []
    assert behind.interruptions >= 2


@pytest.mark.parametrize("line", PASSES)
def test_the_next_try_is_on_another_connection(behind: Connection, proxy: LossyProxy, line: str) -> None:
    """After a failover another server has the address."""
    before = behind.execute("CLIENT ID")
    proxy.answer(b"ECHO", reply=f"{line}\r\n".encode())
    assert behind.execute("ECHO", "hello") == b"hello"
    assert behind.execute("CLIENT ID") != before


@pytest.mark.parametrize("line", PASSES)
def test_what_does_not_pass_in_time_is_named(queue_server: LocalServer, line: str) -> None:
    with LossyProxy(queue_server.url) as proxy:
        impatient = Connection(proxy.url, 10, 0.3)
        proxy.answer(b"ECHO", reply=f"{line}\r\n".encode(), times=1000)
        with pytest.raises(ServerUnavailable, match=r"for 0\.3 s"):
            impatient.execute("ECHO", "hello")
        impatient.close()


def test_a_wait_says_what_the_refusal_means(behind: Connection, proxy: LossyProxy) -> None:
    with structlog.testing.capture_logs() as logs:
        for line, meaning in (("-READONLY You can't write", "replica"), ("-OOM no", "memory is full")):
            proxy.answer(b"ECHO", reply=f"{line}\r\n".encode())
            behind.execute("ECHO", "hello")
            assert meaning in logs[-2]["event"]
            assert line[1:].split()[0] in logs[-2]["event"]


@pytest.mark.parametrize(("line", "kind", "told"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_any_other_refusal_is_an_error_of_ours(
    behind: Connection, proxy: LossyProxy, line: str, kind: type[PenstockError], told: str
) -> None:
    proxy.answer(b"ECHO", reply=f"{line}\r\n".encode())
    with pytest.raises(kind, match=told) as caught:
        behind.execute("ECHO", "hello")
    assert caught.value.exit_code > 1
    assert behind.execute("ECHO", "next") == b"next"
