from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.common.broker import local_server as server_module
from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer, find_binary, prepare, started_server
from penstock.common.errors import ConfigError
from penstock.common.files.run_folder import RunFolder
from tests.helpers import wait_until_written


def test_a_started_server_is_found_through_the_run_folder(tmp_path: Path) -> None:
    with LocalServer(tmp_path) as server:
        assert started_server(RunFolder(tmp_path)) == server.url
        assert Connection(server.url, 5, 5).uptime()[1] >= 0


def test_address_and_password_stay_when_the_server_is_started_again(tmp_path: Path) -> None:
    first = prepare(RunFolder(tmp_path))
    assert prepare(RunFolder(tmp_path)) == first


def test_only_the_owner_may_read_the_password(tmp_path: Path) -> None:
    prepare(RunFolder(tmp_path))
    for name in ("queue/url", "queue/server.conf"):
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o600


def test_what_was_written_survives_kill_9(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 10)
    connection.execute("SET", "key", "value")
    wait_until_written(connection)
    private_server.kill()
    private_server.start()
    assert connection.execute("GET", "key") == b"value"


def test_a_torn_tail_of_the_append_only_file_loads(private_server: LocalServer, tmp_path: Path) -> None:
    connection = Connection(private_server.url, 10, 10)
    connection.execute("SET", "first", "1")
    connection.execute("SET", "second", "2")
    wait_until_written(connection)
    private_server.kill()
    (log,) = (tmp_path / "private/queue/appendonlydir").glob("*.incr.aof")
    log.write_bytes(log.read_bytes()[:-3])
    private_server.start()
    assert connection.execute("MGET", "first", "second") == [b"1", None]


def test_a_wrong_password_is_a_configuration_error(queue_server: LocalServer) -> None:
    url = queue_server.url.replace("redis://:", "redis://:wrong")
    with pytest.raises(ConfigError, match="REDIS_URL"):
        Connection(url, 5, 5)


def test_a_second_server_in_the_same_folder_is_refused(
    private_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LEAVE_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="already runs"):
        prepare(RunFolder(tmp_path / "private"))


@pytest.mark.parametrize("text", [b"", b"\xff", b"redis://:password@127.0.0.1:many/0", b"redis://x:1/0"])
def test_a_file_without_an_address_is_named(tmp_path: Path, text: bytes) -> None:
    prepare(RunFolder(tmp_path))
    (tmp_path / "queue/url").write_bytes(text)
    with pytest.raises(ConfigError, match=r"url holds no address of a queue server: delete"):
        prepare(RunFolder(tmp_path))


def test_a_port_that_a_stranger_took_is_given_up(tmp_path: Path) -> None:
    with LocalServer(tmp_path / "stranger") as stranger:
        address = stranger.url.rpartition("@")[2]
        prepare(RunFolder(tmp_path))
        (tmp_path / "queue/url").write_text(f"redis://:password@{address}\n")
        assert not prepare(RunFolder(tmp_path)).url.endswith(address)


def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(server_module, "_bundled_binary", lambda: None)
    with pytest.raises(ConfigError, match=r"penstock\[queue\]"):
        find_binary()


@pytest.mark.parametrize("version", ["5.0.14", "6.2.7"])
def test_a_server_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    put_server(tmp_path, monkeypatch, version)
    with pytest.raises(ConfigError, match=f"version {version[:3]}"):
        find_binary()


@pytest.mark.parametrize("version", ["7.0.15", "8.10.1"])
def test_a_server_of_version_7_0_or_newer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    put_server(tmp_path, monkeypatch, version)
    assert find_binary() == str(tmp_path / "redis-server")


def put_server(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Put the only server in PATH, which says that it has this version."""
    server = folder / "redis-server"
    server.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(server_module, "_bundled_binary", lambda: None)


@pytest.mark.parametrize("content", [b"", b"127.0.0.1:6379", b"\xff\xfe"])
def test_an_address_that_cannot_be_used_is_told_with_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "queue/url").parent.mkdir()
    (tmp_path / "queue/url").write_bytes(content)
    with pytest.raises(ConfigError, match=str(tmp_path / "queue/url")):
        started_server(RunFolder(tmp_path))
