from __future__ import annotations

import socket
import threading

import pytest
import redis
import structlog

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.replies import raise_unless_passing
from penstock.common.errors import ConfigError, RunNotReady, ServerUnavailable, WrongType
from tests.common.builders import Run
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


@pytest.mark.parametrize("version", ["7.0.0", "7.0.15", "7.2.4", "8.10.1"])
def test_a_server_of_version_7_0_or_newer_is_accepted(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": version, "run_id": ""})
    assert Connection(queue_server.url, 10, 10).execute("PING")


def test_a_server_that_is_too_old_is_refused(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": "6.2.7", "run_id": ""})
    with pytest.raises(
        ConfigError, match=r"version 6\.2\.7; penstock needs Redis or Valkey 7\.0 or newer"
    ):
        Connection(queue_server.url, 10, 10)


def test_a_killed_server_is_waited_for_and_its_restart_is_noticed(private_server: LocalServer) -> None:
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
    monkeypatch.setattr(redis.Redis, "info", lambda *_: {"redis_version": "6.2.7", "run_id": "other"})
    with pytest.raises(ConfigError, match=r"version 6\.2\.7"):
        connection.execute("PING")


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


def test_a_server_lost_for_longer_than_the_deadline_is_given_up(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, server_timeout_s=0.3)
    private_server.kill()
    with pytest.raises(ServerUnavailable, match=r"did not answer for 0\.3 s"):
        connection.execute("PING")


def test_a_call_without_the_functions_says_the_run_is_not_set_up(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 10)
    with pytest.raises(RunNotReady, match="not set the run up"):
        connection.call("renew", ["a", "b"], ["consumer"])


def test_a_blocked_read_ends_by_itself(connection: Connection) -> None:
    reply = wait_until(
        lambda: connection.execute("XREAD", "BLOCK", 50, "STREAMS", "nothing", "0") in (None, {}, []),
        "an empty read",
    )
    assert reply


def test_a_stream_that_is_deleted_while_it_is_waited_for_is_a_run_that_is_not_ready(run: Run) -> None:
    """Redis 7.0 has an answer of its own for this, and later servers say NOGROUP."""
    threading.Timer(0.3, run.connection.execute, ["DEL", run.keys.tickets]).start()
    with pytest.raises(RunNotReady, match="not set the run up"):
        run.actor().take(1, block_ms=1000)


@pytest.mark.parametrize("code", ["UNBLOCKED the stream key no longer exists", "NOGROUP No such key"])
def test_both_answers_mean_the_same(code: str) -> None:
    with pytest.raises(RunNotReady, match="not set the run up"):
        raise_unless_passing(redis.exceptions.ResponseError(code), "redis://x")


def test_a_read_that_ends_because_the_server_became_a_replica_is_sent_again(
    private_server: LocalServer, keys: Keys
) -> None:
    run = Run(Connection(private_server.url, 10, 10), keys)
    actor = run.actor(connection=Connection(private_server.url, 10, 30))

    def fail_over() -> None:
        wait_until(lambda: run.connection.execute("INFO")["blocked_clients"] == 1, "the read to wait")
        run.connection.execute("REPLICAOF", "127.0.0.1", 1)
        run.connection.execute("REPLICAOF", "NO", "ONE")
        run.issue(1)

    thread = threading.Thread(target=fail_over)
    thread.start()
    (entry,) = wait_until(lambda: actor.take(1, block_ms=1000), "the ticket")
    assert entry.ticket == "train:1"
    thread.join()


# Several calls in one round trip

FUNCTIONS = """#!lua name=tests
redis.register_function('penstock_4_echo', function(keys, args)
  return args[1] == 'fail' and redis.call('XLEN', keys[1]) or args[1]
end)
redis.register_function('penstock_4_fill', function(keys, args)
  if redis.call('HEXISTS', keys[2], args[2]) == 1 then return 0 end
  if tonumber(redis.call('GET', keys[1]) or 0) < 1 then return redis.error_reply(args[1]) end
  redis.call('DECR', keys[1])
  return redis.call('HSET', keys[2], args[2], '')
end)
"""
"""`echo` returns its argument or fails; `fill` is idempotent, and needs room, of which it takes one."""


def test_several_calls_have_their_own_replies_and_one_socket(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 10)
    connection.execute("FUNCTION", "LOAD", FUNCTIONS)
    for number in range(120):  # more than the pool has sockets
        replies = connection.call_each("echo", ["key"], [[number], ["b"], ["c"]])
        assert replies == [b"%d" % number, b"b", b"c"]
    assert connection.call_each("echo", ["key"], []) == []


@pytest.mark.parametrize(
    ("argument", "kind", "words"),
    [("fail", WrongType, "WRONGTYPE"), (None, redis.exceptions.DataError, "must be str")],
    ids=["where it runs", "where it is packed"],
)
def test_an_error_among_several_is_raised_and_the_next_command_has_its_own_reply(
    private_server: LocalServer, argument: str | None, kind: type[Exception], words: str
) -> None:
    connection = Connection(private_server.url, 10, 10)
    connection.execute("FUNCTION", "LOAD", FUNCTIONS)
    connection.execute("SET", "a string", "")
    with pytest.raises(kind, match=words):
        connection.call_each("echo", ["a string"], [["first"], [argument], ["third"]])
    assert connection.execute("ECHO", "next") == b"next"


def test_a_command_that_the_server_refuses_is_an_error_of_ours(connection: Connection) -> None:
    with pytest.raises(ServerUnavailable, match="refused a command: unknown command"):
        connection.execute("NO-SUCH-COMMAND")


def test_a_server_that_runs_a_long_script_is_waited_for(private_server: LocalServer) -> None:
    """Any user may make one: an actor that calls `renew` for a million entries."""
    caller, other = (Connection(private_server.url, 10, 30) for _ in range(2))
    caller.execute("CONFIG", "SET", "busy-reply-threshold", 1)
    other.execute("SET", "key", "value")
    script = "while redis.call('TIME')[1] * 1 < KEYS[1] * 1 do end"
    now_s = int(caller.execute("TIME")[0])
    thread = threading.Thread(target=caller.execute, args=("EVAL", script, 1, now_s + 2))
    thread.start()
    with structlog.testing.capture_logs() as logs:
        wait_until(lambda: other.execute("GET", "key") and logs, "the server to be busy")
    assert "BUSY" in logs[0]["event"]
    thread.join()


@pytest.mark.parametrize(
    "error", ["MISCONF full", "OOM command not allowed", "BUSY", "READONLY replica"]
)
def test_calls_that_a_full_server_refuses_are_sent_again_until_all_are_done(
    private_server: LocalServer, error: str
) -> None:
    patient = Connection(private_server.url, 10, server_timeout_s=30.0)
    other = Connection(private_server.url, 10, 10)
    other.execute("FUNCTION", "LOAD", FUNCTIONS)
    replies: list[int] = []
    calls = [[error, number] for number in range(4)]
    thread = threading.Thread(
        target=lambda: replies.extend(patient.call_each("fill", ["room", "done"], calls)), daemon=True
    )
    thread.start()
    for done in range(4):
        other.execute("INCR", "room")
        wait_until(
            lambda done=done: other.execute("HLEN", "done") == done + 1, "another call to be done"
        )
    thread.join(timeout=30)
    assert replies == [0, 0, 0, 1]  # the first three were done before the pipeline was sent again
