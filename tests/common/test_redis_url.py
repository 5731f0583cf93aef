"""REDIS_URL and the other places where a password may show."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.server_binary import find_binary
from penstock.common.config.command import build, execute_command
from penstock.common.config.redis_url import ServerAddress, parse_host, parse_url, unix_url, with_login
from penstock.common.config.role_command import RewarderCommand, RunCommand
from penstock.common.config.settings import RunSettings
from penstock.common.errors import ConfigError
from penstock.common.log import configure_logs, get_logger
from penstock.common.queues import Queues
from penstock.common.role import connect
from penstock.common.text import hide_passwords
from tests.helpers import wait_until

SECRET = "s3cr3t"

GOOD = {
    "redis://host": ServerAddress("redis", "host", 6379),
    "redis://host/": ServerAddress("redis", "host", 6379),
    "redis://host:7000/15": ServerAddress("redis", "host", 7000, database=15),
    "redis://:secret@host": ServerAddress("redis", "host", 6379, password="secret"),
    "redis://me:a%40b%3A%2F%3F%25%23@host/2": ServerAddress(
        "redis", "host", 6379, database=2, username="me", password="a@b:/?%#"
    ),
    "redis://:%C3%A9@host": ServerAddress("redis", "host", 6379, password="é"),
    "redis://:a+b@host": ServerAddress("redis", "host", 6379, password="a+b"),
    "redis://[::1]": ServerAddress("redis", "::1", 6379),
    "redis://:p@[2001:db8::1]:7000/1": ServerAddress(
        "redis", "2001:db8::1", 7000, database=1, password="p"
    ),
    "redis://queue_1.example.org:1": ServerAddress("redis", "queue_1.example.org", 1),
    "rediss://host:6380/0?ssl_ca_certs=%2Fca.pem&ssl_check_hostname=false": ServerAddress(
        "rediss", "host", 6380, tls={"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": "false"}
    ),
    "rediss://host?ssl_ca_certs=/a+b.pem": ServerAddress(
        "rediss", "host", 6379, tls={"ssl_ca_certs": "/a+b.pem"}
    ),
    "unix:///run/a@b?owner=4294967294": ServerAddress("unix", path="/run/a@b", owner=4_294_967_294),
    "unix:///run/queue.sock": ServerAddress("unix", path="/run/queue.sock"),
    "unix://me:p@/a%20b?db=3&owner=1000": ServerAddress(
        "unix", path="/a b", database=3, username="me", password="p", owner=1000
    ),
}

BAD = [
    SECRET, f":{SECRET}@host", f"{SECRET}@host:6379/0", f"http://:{SECRET}@host", f"REDIS://:{SECRET}@host",
    f" redis://:{SECRET}@host", f"redis://:{SECRET}@host\n", f"redis:/{SECRET}", f"redis:{SECRET}@host",
    f"redis+unix://:{SECRET}@/a", "redis://", f"redis://:{SECRET}@", f"redis://:{SECRET}@:6379",
    f"redis://:{SECRET}@host:", f"redis://:{SECRET}@host:0", f"redis://:{SECRET}@host:65536",
    f"redis://:{SECRET}@host:+1", f"redis://:{SECRET}@host:-1", f"redis://:{SECRET}@host:1_0",
    f"redis://:{SECRET}@host:\u0666", f"redis://:{SECRET}@host:6379:1", f"redis://:{SECRET}@host:port",
    f"redis://:{SECRET}@host/zero", f"redis://:{SECRET}@host/-1", f"redis://:{SECRET}@host/+1",
    f"redis://:{SECRET}@host/01", f"redis://:{SECRET}@host/0/", f"redis://:{SECRET}@host//0",
    f"redis://:{SECRET}@host/0.0", f"redis://:{SECRET}@host/{'9' * 30}", f"redis://:{SECRET}@host/\u0660",
    f"redis://host?foo={SECRET}", f"redis://host?password={SECRET}", f"redis://host/0?{SECRET}",
    f"redis://host/0?protocol=3&password={SECRET}", f"redis://host/0?db=1&password={SECRET}",
    f"redis://:{SECRET}@host/0?ssl_ca_certs=/ca", f"redis://:{SECRET}@host/0?protocol=3",
    f"redis://:{SECRET}@host/0#fragment", f"redis://host/#{SECRET}", f"redis://:{SECRET}@ho st",
    f"redis://:{SECRET}@a..b", f"redis://:{SECRET}@.host:1", f"redis://:{SECRET}@{'x' * 64}",
    f"redis://:{SECRET}@[::1", f"redis://:{SECRET}@::1", f"redis://:{SECRET}@[::1]x", "redis://[]",
    f"redis://:{SECRET}@[1.2.3]", f"redis://:{SECRET}@[::g]", f"redis://:{SECRET}@[:::]:1",
    f"redis://{SECRET}@host", "redis://:@host", f"redis://{SECRET}:@host", f"redis://:{SECRET}@x@host",
    f"redis://a:b:{SECRET}@host", f"redis://:{SECRET}/x@host", f"redis://:12/{SECRET}@host",
    f"redis://:12?{SECRET}@host", f"redis://:{SECRET}%@host", f"redis://:{SECRET}%zz@host",
    f"redis://:{SECRET}%ff@host", f"redis://:{SECRET}é@host", f"redis://:{SECRET}@hö",
    f"rediss://:{SECRET}@host?ssl_cert_reqs=none", f"rediss://:{SECRET}@host?ssl_keyfile=a",
    f"rediss://:{SECRET}@host?ssl_check_hostname=maybe", f"rediss://:{SECRET}@host?ssl_ca_certs=",
    f"rediss://:{SECRET}@host?ssl_ca_certs=a&ssl_ca_certs=b", f"rediss://:{SECRET}@host?ssl_certfile",
    f"unix://:{SECRET}@relative/path", f"unix://:{SECRET}@", f"unix://:{SECRET}@/", "unix://",
    f"unix://:{SECRET}@/{'x' * 107}", f"unix://:{SECRET}@/a?db=zero", f"unix://:{SECRET}@/a?owner=root",
    f"unix://:{SECRET}@/a?db=0&db=1", f"unix://:{SECRET}@/a?password=b", f"unix://:{SECRET}@/a%00b",
]  # fmt: skip


@pytest.mark.parametrize("url", GOOD)
def test_a_url_has_the_parts_that_it_names(url: str) -> None:
    assert parse_url(url) == GOOD[url]


@pytest.mark.parametrize("url", BAD)
def test_a_malformed_url_is_refused_and_no_part_of_it_is_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"REDIS_URL: .*(expected|found)") as caught:
        parse_url(url)
    with pytest.raises(ConfigError, match="REDIS_URL: "):
        Connection(url, 1, 1)
    with pytest.raises(ConfigError, match="REDIS_URL: ") as built:
        build(RunCommand, {"redis_url": url})
    for error in (caught, built):
        assert SECRET not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        (f"redis://:{SECRET}/x@host", "`/` as %2F"),
        (f"redis://:{SECRET}[x@host", "`[` is %5B"),
        (f"redis://:{SECRET}@x@host", "`@` as %40"),
    ],
)
def test_a_letter_that_a_password_must_not_have_is_told(url: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert remedy in str(caught.value)


def test_what_is_no_url_is_not_told_the_form_of_a_url() -> None:
    with pytest.raises(ConfigError, match="--listen: expected HOST:PORT") as caught:
        parse_host("nowhere:", "--listen")
    assert "redis://" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://host:1/2", "rediss://me:p@[::1]/0?ssl_ca_certs=/a@b", "unix://:p@/a@b?owner=7"]
)
def test_a_login_is_replaced(url: str) -> None:
    found = parse_url(with_login(url, "you", "n@w"))
    assert found == replace(parse_url(url), username="you", password="n@w")


@pytest.mark.parametrize("password", ["a@b:c/d?e#f%g", "é€", "+ +", "%40", "[]"])
def test_a_password_survives_the_url_of_a_socket(password: str) -> None:
    found = parse_url(unix_url("/run/a b", password, 7))
    assert (found.password, found.path, found.owner) == (password, "/run/a b", 7)


def test_neither_text_nor_repr_of_an_address_has_its_login() -> None:
    address = parse_url(f"redis://me:{SECRET}@[::1]:7/2")
    assert str(address) == "redis://***@[::1]:7/2"
    assert SECRET not in repr(address)


# On a real server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a server on TCP with more arguments, and returns its host and port."""
    started = []

    def begin(host: str, *arguments: str) -> str:
        with socket.create_server((host, 0)) as probe:
            port = probe.getsockname()[1]
        command = [find_binary(), "--bind", host, "--port", str(port), "--save", "", *arguments]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL))
        wait_until(lambda: listens(host, port), "the server to listen", 30)
        return f"{host}:{port}"

    yield begin
    for server in started:
        server.kill()
        server.wait()


def listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def own_address() -> str:
    """This machine's address in its network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        address = probe.getsockname()[0]
        if not address.startswith("127."):
            return str(address)
    pytest.skip("this machine has no address but loopback")


def test_a_percent_encoded_password_logs_in(start: Callable[..., str]) -> None:
    place = start("127.0.0.1", "--requirepass", "a@b:c/d?e#f%é")
    url = f"redis://:a%40b%3Ac%2Fd%3Fe%23f%25%C3%A9@{place}/0"
    assert Connection(url, 10, 10).execute("PING")


def test_an_open_server_on_loopback_is_accepted(start: Callable[..., str]) -> None:
    assert Connection(f"redis://{start('127.0.0.1')}", 10, 10).execute("PING")


def test_an_open_server_in_the_network_is_refused(start: Callable[..., str]) -> None:
    place = start(own_address(), "--protected-mode", "no")
    with pytest.raises(ConfigError, match=r"without a password.*RUN_ALLOW_OPEN_SERVER=true"):
        Connection(f"redis://{place}", 10, 10)
    allowed = Connection(f"redis://{place}", 10, 10, allow_open=True)
    allowed.execute("ACL", "SETUSER", "me", "on", f">{SECRET}", "~*", "+@all")
    with pytest.raises(ConfigError, match=r"redis://\*\*\*@.* lets in everybody"):
        Connection(f"redis://me:{SECRET}@{place}", 10, 10)  # a login, but others need none


def test_a_server_in_the_network_with_a_password_is_accepted(start: Callable[..., str]) -> None:
    place = start(own_address(), "--requirepass", SECRET)
    assert Connection(f"redis://:{SECRET}@{place}", 10, 10).execute("PING")


def test_a_role_accepts_an_open_server_if_the_setting_says_so(
    start: Callable[..., str], tmp_path: Path
) -> None:
    url = f"redis://{start(own_address(), '--protected-mode', 'no')}"
    with pytest.raises(ConfigError, match="lets in everybody"):
        connect(url, RunSettings(dir=tmp_path), threading.Event())
    assert connect(url, RunSettings(dir=tmp_path, allow_open_server=True), threading.Event())


# Files, flags and outputs


@pytest.fixture
def url_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "url"
    path.write_text(f"redis://me:{SECRET}@127.0.0.1:1/3\n")
    path.chmod(0o600)
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("REDIS_URL_FILE", str(path))
    monkeypatch.setenv("RUN_CONNECT_TIMEOUT_S", "0.1")
    return path


def test_the_url_is_read_from_a_file(url_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert execute_command(Queues, "queues", ["status"]) == 69
    said = capfd.readouterr().err
    assert "redis://***@127.0.0.1:1/3 did not answer" in said
    assert SECRET not in said
    assert "chmod" not in said


def test_a_url_file_that_others_may_read_is_warned_of(
    url_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url_file.chmod(0o644)
    execute_command(Queues, "queues", ["status"])
    assert f"`chmod 600 {url_file}`" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff", b"redis://a\nredis://b", b"x" * 5000])
def test_a_url_file_without_one_line_is_refused(
    url_file: Path, capfd: pytest.CaptureFixture[str], content: bytes
) -> None:
    url_file.write_bytes(content)
    assert execute_command(Queues, "queues", ["status"]) == 78
    said = capfd.readouterr().err
    assert "REDIS_URL_FILE: " in said
    assert str(url_file) in said


def test_a_url_and_a_file_with_one_are_refused(
    url_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    assert execute_command(Queues, "queues", ["status"]) == 78
    assert "both set" in capfd.readouterr().err


def test_dry_run_and_repr_hide_the_login(url_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert execute_command(RewarderCommand, "rewarder", ["--dry-run"]) == 0
    said = capfd.readouterr()
    assert "REDIS_URL=redis://***@127.0.0.1:1/3\n" in said.out
    assert SECRET not in said.out + said.err
    assert SECRET not in repr(build(RunCommand, {"redis_url": url_file.read_text().strip()}))


def test_the_flag_is_warned_of_and_the_variable_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"redis://:{SECRET}@127.0.0.1:1"
    for flag in (["--redis-url", url], [f"--redis-url={url}"]):
        execute_command(RewarderCommand, "rewarder", [*flag, "--dry-run"])
        said = capfd.readouterr()
        assert "every local user sees --redis-url" in said.err
        assert SECRET not in said.out + said.err
    monkeypatch.setenv("REDIS_URL", url)
    execute_command(RewarderCommand, "rewarder", ["--dry-run"])
    assert "--redis-url" not in capfd.readouterr().err


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_hide_passwords(
    form: Literal["text", "json"], capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs("test", form)
    log = get_logger("test")
    try:
        raise ValueError(f"http://host/?password={SECRET}&a=1")
    except ValueError:
        log.exception(f"Lost redis://me:{SECRET}@host.", url=f"rediss://:{SECRET}@[::1]:1/0")
    said = capfd.readouterr().err
    assert SECRET not in said
    assert "redis://***@host" in said


def test_a_refused_option_of_another_command_does_not_show_the_url(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert execute_command(Queues, "queues", ["status", "--run.nmae", f"redis://:{SECRET}@h"]) == 78
    assert SECRET not in capfd.readouterr().err


def test_long_texts_are_searched_for_passwords_in_proportion_to_their_length():
    """In a process of its own: minutes, if each letter were looked at from each other letter."""
    program = (
        "from penstock.common.text import hide_passwords as hide\n"
        "assert all(hide(part * 300_000) == part * 300_000 for part in ('a', '://', 'a://', 'a@'))\n"
        "assert hide('://a@' * 300_000) == '://***@'\n"
        "assert hide('a://b@c ' * 300_000) == 'a://***@c ' * 300_000\n"
        "assert hide('password=' * 300_000) == 'password=***'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_the_form_of_a_url_stays_readable():
    with pytest.raises(ConfigError) as found:
        parse_url("queue")
    assert "redis://USER:PASSWORD@HOST:PORT/DATABASE" in hide_passwords(str(found.value))
    assert hide_passwords("redis://USER:secret@HOST") == "redis://***@HOST"


@pytest.mark.parametrize(
    "url", ["redis://:MA'RK@h", 'redis://u:MA"RK@h', "redis:/:MARK@h", "redis://M@RK:x@h"]
)
def test_no_form_of_a_login_stays_readable(url):
    for text in (url, f"found '{url}'", repr({"url": url}), f"password='{url}'"):
        assert "RK" not in hide_passwords(text)
