from __future__ import annotations

import socket
import threading
import time

import pytest
import redis

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.errors import ConfigError, RunNotReady, ServerUnavailable
from tests.helpers import wait_until, wait_until_written


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_unreachable_server_is_named_and_the_password_is_not() -> None:
    url = f"redis://:secret@127.0.0.1:{closed_port()}/0"
    with pytest.raises(ServerUnavailable, match="set REDIS_URL") as caught:
        Connection(url, connect_timeout_s=0.3, server_timeout_s=60)
    assert "secret" not in str(caught.value)


def test_a_url_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="REDIS_URL"):
        Connection("localhost", 0.3, 0.3)


def test_a_server_that_may_evict_is_refused(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 10)
    connection.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="maxmemory-policy allkeys-lru"):
        Connection(private_server.url, 10, 10)


@pytest.mark.parametrize(
    ("version", "transacts"), [("7.0.15", False), ("7.2.4", True), ("8.10.1", True)]
)
def test_the_version_says_what_the_server_can(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch, version: str, transacts: bool
) -> None:
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": version, "run_id": ""})
    connection = Connection(queue_server.url, 10, 10)
    connection.execute("PING")
    assert connection.transacts == transacts


def test_a_server_that_is_too_old_is_refused(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": "6.2.7", "run_id": ""})
    with pytest.raises(
        ConfigError, match=r"version 6\.2\.7; penstock needs Redis or Valkey 7\.0 or newer"
    ):
        Connection(queue_server.url, 10, 10)


def test_a_killed_server_is_waited_for_and_its_restart_is_noticed(
    private_server: LocalServer,
) -> None:
    connection = Connection(private_server.url, 10, server_timeout_s=20)
    connection.execute("SET", "key", "value")
    wait_until_written(connection)
    private_server.kill()
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(connection.execute("GET", "key")))
    waiting.start()
    private_server.start()
    waiting.join(timeout=20)
    assert found == [b"value"]
    assert connection.restarts == 1


def test_a_server_that_comes_back_is_asked_its_version_again(
    private_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection(private_server.url, 10, 20)
    private_server.kill()
    private_server.start()
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": "7.0.15", "run_id": "other"})
    connection.execute("PING")
    assert not connection.transacts


def test_a_lost_connection_to_the_same_server_is_no_restart(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 10)
    other = Connection(private_server.url, 10, 10)
    other.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert connection.execute("PING") in (b"PONG", True)
    assert connection.restarts == 0


def test_each_restart_is_counted(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 20)
    for count in (1, 2):
        private_server.kill()
        private_server.start()
        connection.execute("SET", "key", count)
        assert connection.restarts == count


def test_a_server_lost_for_longer_than_the_deadline_is_given_up(
    private_server: LocalServer,
) -> None:
    connection = Connection(private_server.url, 10, server_timeout_s=0.3)
    private_server.kill()
    with pytest.raises(ServerUnavailable, match=r"did not answer for 0\.3 s"):
        connection.execute("PING")


def test_a_call_without_the_functions_says_the_run_is_not_set_up(
    private_server: LocalServer,
) -> None:
    connection = Connection(private_server.url, 10, 10)
    with pytest.raises(RunNotReady, match="not set the run up"):
        connection.call("renew", ["a", "b"], ["consumer"])


def test_a_blocked_read_ends_by_itself(connection: Connection) -> None:
    reply = wait_until(
        lambda: connection.execute("XREAD", "BLOCK", 50, "STREAMS", "nothing", "0") in (None, {}, []),
        "an empty read",
    )
    assert reply


# Several transactions in one round trip


def test_several_transactions_have_their_own_replies_and_one_socket(queue_server: LocalServer) -> None:
    connection = Connection(queue_server.url, 10, 10)
    for number in range(120):  # more than the pool has sockets
        replies = connection.transact_all([[("ECHO", number), ("ECHO", "b")], [("ECHO", "c")]])
        assert replies == [[b"%d" % number, b"b"], [b"c"]]
    assert connection.transact_all([]) == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("XLEN", "a string"), "WRONGTYPE"),
        (("XLEN", "one", "too many"), "wrong number of arguments"),
        (("ECHO", None), "must be str"),
    ],
    ids=["where it runs", "where it is queued", "where it is packed"],
)
def test_an_error_among_several_is_raised_and_the_next_command_has_its_own_reply(
    queue_server: LocalServer, command: tuple, error: str
) -> None:
    connection = Connection(queue_server.url, 10, 10)
    connection.execute("SET", "a string", "")
    with pytest.raises(Exception, match=error):
        connection.transact_all(
            [[("ECHO", "first")], [("ECHO", "second"), command], [("ECHO", "third")]]
        )
    assert connection.execute("ECHO", "next") == b"next"


def test_a_command_that_is_not_queued_leaves_its_whole_transaction_undone(
    queue_server: LocalServer,
) -> None:
    connection = Connection(queue_server.url, 10, 10)
    connection.execute("DEL", "list")
    with pytest.raises(Exception, match="wrong number of arguments"):
        connection.transact_all([[("RPUSH", "list", "a"), ("RPUSH", "list")]])
    assert connection.execute("LLEN", "list") == 0


FULL = """
if tonumber(redis.call('GET', KEYS[1]) or 0) < 1 then return redis.error_reply(ARGV[1]) end
redis.call('DECR', KEYS[1])
return redis.call('RPUSH', KEYS[2], ARGV[2])
"""
"""Done if there is room, of which it takes one; else the error of a server that cannot write."""


@pytest.mark.parametrize(
    "error", ["MISCONF full", "EXECABORT Transaction discarded because of: OOM command not allowed"]
)
def test_what_was_done_is_not_sent_again_and_gives_the_others_their_whole_time(
    private_server: LocalServer, error: str
) -> None:
    patient = Connection(private_server.url, 10, server_timeout_s=3.0)
    other = Connection(private_server.url, 10, 10)
    transactions = [[("EVAL", FULL, 2, "room", "done", error, number)] for number in range(4)]
    replies: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: replies.extend(patient.transact_all(transactions)), daemon=True
    )
    thread.start()
    for _ in transactions:  # together this takes longer than the patience of any
        time.sleep(0.9)
        other.execute("INCR", "room")
    thread.join(timeout=30)
    assert replies == [[1], [2], [3], [4]]
    assert other.execute("LRANGE", "done", 0, -1) == [b"0", b"1", b"2", b"3"]


PASS_TIME = """
local began = redis.call('TIME')
for i = 1, 2000000 do end
return began
"""


def test_no_time_passes_within_a_transaction(queue_server: LocalServer) -> None:
    """What handoff_added relies on: entries that are added in one transaction follow each other."""
    connection = Connection(queue_server.url, 10, 10)
    assert connection.transacts
    connection.execute("DEL", "stream")
    add, wait = ("XADD", "stream", "*", "t", ""), ("EVAL", PASS_TIME, 0)
    ((first, before, second, after, third),) = connection.transact_all([[add, wait, add, wait, add]])
    assert before == after
    milliseconds, number = first.split(b"-")
    assert [second, third] == [b"%b-%d" % (milliseconds, int(number) + more) for more in (1, 2)]
