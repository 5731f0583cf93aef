"""How many processes a `penstock up` is to have: `queues scale`, its requests and statuses."""

from __future__ import annotations

import json
import time

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.process_status import server_time_ms
from penstock.common.broker.scale import Scale, SupervisorStatus
from penstock.common.config.command import execute_command
from penstock.common.errors import ConfigError, MalformedMessage
from penstock.common.queues import Queues
from penstock.common.wire.codec import encode
from tests.helpers import AclUsers


@pytest.fixture
def scale(connection: Connection, keys: Keys) -> Scale:
    found = Scale(connection, keys)
    found.write_status("one-1", "one", {"actor": 2, "rewarder": 1})
    return found


def queues(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and output of `queues scale`."""
    code = execute_command(Queues, "queues", ["scale", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.fixture
def here(queue_server: LocalServer, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    monkeypatch.setenv("RUN_NAME", run_name)


@pytest.mark.usefixtures("here")
def test_queues_scale_asks_the_only_one_or_the_one_that_is_named(
    scale: Scale, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queues(capsys) == (0, "one-1: actor 2, rewarder 1\n")
    assert queues(capsys, "actor=4") == (0, "one-1: actor 2 (4 asked for), rewarder 1\n")
    scale.write_status("two-2", "two", {"actor": 1})
    code, said = queues(capsys, "actor=3")
    assert code == 78
    assert "found 2 `penstock up` with the role actor to scale, expected one" in said
    assert "one-1 with actor, rewarder; two-2 with actor. Name one with --host" in said
    assert queues(capsys, "actor=3", "rewarder=0", "--host", "one", "--json")[0] == 0
    assert queues(capsys, "actor=0", "--host", "two-2")[0] == 0
    assert scale.requests("one-1") == {"actor": 3, "rewarder": 0}
    assert scale.requests("two-2") == {"actor": 0}
    _, said = queues(capsys, "--json")
    assert [json.loads(line)["asked"] for line in said.splitlines()] == [
        {"actor": 3, "rewarder": 0},
        {"actor": 0},
    ]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["learner=2"], "found 0 `penstock up` with the role learner to scale"),
        (["actor=3", "learner=2"], "with the role learner"),
        (["actor=1", "--host", "three"], "on three to scale, expected one. There are: one-1"),
        (["actor=many"], "expected ROLE=COUNT, such as actor=3, found actor=many"),
        (["actor=9999"], "expected at most 4096 processes of a role, found actor=9999"),
        (["actor=1", "-5"], "expected"),
    ],
)
def test_what_cannot_be_scaled_is_refused(
    scale: Scale, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    code, said = queues(capsys, *words)
    assert code == 78
    assert error in said
    assert scale.requests("one-1") == {}


@pytest.mark.usefixtures("here")
def test_without_a_penstock_up_there_is_none_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No `penstock up` of run" in queues(capsys)[1]
    assert "There are: none" in queues(capsys, "actor=2")[1]


def test_one_that_ended_is_not_asked_and_its_wishes_are_forgotten(
    scale: Scale, connection: Connection, keys: Keys
) -> None:
    scale.request("one-1", "actor", 4)
    scale.leave("one-1")
    old = SupervisorStatus("old", server_time_ms(connection) - 20_000, {"actor": 1})
    connection.execute("HSET", keys.supervisors, "old-7", encode(old))
    assert scale.running() == {}
    scale.write_status("two-2", "two", {"actor": 1})
    scale.request(scale.choose("", "actor"), "actor", 2)
    assert connection.execute("HGETALL", keys.scale) == {b"two-2/actor": b"2"}
    assert list(connection.execute("HGETALL", keys.supervisors)) == [b"two-2"]


def test_what_strangers_write_is_left_out(scale: Scale, connection: Connection, keys: Keys) -> None:
    for value in ("x", "-1", "1e3", "99999", "9999"):
        connection.execute("HSET", keys.scale, "one-1/actor", value)
        assert scale.requests("one-1") == ({"actor": 4096} if value == "9999" else {})
    connection.execute("HSET", keys.supervisors, "strange", "x")
    assert list(scale.running()) == ["one-1"]
    with pytest.raises(MalformedMessage):
        SupervisorStatus("host", int(time.time()), {"actor": -1})


def test_a_rewarders_user_tells_what_runs_and_reads_what_is_asked_but_asks_for_nothing(
    acl_users: AclUsers, keys: Keys
) -> None:
    Scale(acl_users.rewarder, keys).write_status("one-1", "one", {"rewarder": 1})
    Scale(acl_users.learner, keys).request("one-1", "rewarder", 2)
    assert Scale(acl_users.rewarder, keys).requests("one-1") == {"rewarder": 2}
    with pytest.raises(ConfigError):
        Scale(acl_users.rewarder, keys).request("one-1", "rewarder", 3)
    Scale(acl_users.rewarder, keys).leave("one-1")
    assert Scale(acl_users.reader, keys).running() == {}
