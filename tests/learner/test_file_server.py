"""Files of a run over HTTP: what is sent, what is refused, and what a client makes of a wrong answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from blake3 import blake3

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.redis_url import parse_url
from penstock.common.errors import ConfigError
from penstock.common.transfer import download as module
from penstock.common.transfer.download import FetchFailed, Source, Wanted, download
from penstock.common.transfer.model_folder import shared_files
from penstock.learner.state.file_server import FileServer, _reachable, serving
from tests.helpers import wait_until
from tests.learner.builders import CONTRACT

CONTENT = bytes(range(256)) * 4096
HASH = blake3(CONTENT).hexdigest()
VERSION = "versions/000001-00000004/model.safetensors"
WANTED = Wanted(VERSION, len(CONTENT), HASH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's versions and a model folder, with files that nobody may fetch."""
    (tmp_path / VERSION).parent.mkdir(parents=True)
    (tmp_path / VERSION).write_bytes(CONTENT)
    (tmp_path / VERSION).with_name("config.json").write_text("{}")
    (tmp_path / "versions/secret").write_text("secret")
    model = tmp_path / "model"
    model.mkdir()
    for name in (
        "config.json", "tokenizer.json", "modeling.py", "model.safetensors", ".env.json", "secrets.json",
        "notes.txt",
    ):  # fmt: skip
        (model / name).write_text(name)
    (model / "model.safetensors.index.json").write_text("index")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[FileServer]:
    names = [one.name for one in shared_files(folder / "model")]
    with FileServer(folder / "versions", folder / "model", names, "127.0.0.1", 0) as server:
        yield server


@pytest.fixture
def source(server: FileServer) -> Source:
    return Source(f"http://127.0.0.1:{server.port}", server.token)


def get(source: Source, path: str, **headers: str | bytes) -> httpx.Response:
    with httpx.Client(trust_env=False) as client:
        given = {"Authorization": f"Bearer {source.token}"} | headers
        return client.get(f"{source.url}/{path}", headers=given)


def test_versions_and_files_of_the_model_come_whole(source: Source, tmp_path: Path) -> None:
    download(source, WANTED, tmp_path / "got/model.safetensors")
    assert (tmp_path / "got/model.safetensors").read_bytes() == CONTENT
    assert get(source, "model/config.json").text == "config.json"


def test_only_texts_and_vocabularies_of_the_model_are_shared(folder: Path) -> None:
    assert [one.name for one in shared_files(folder / "model")] == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    "path",
    [
        "versions/000001-00000004/config.json", "versions/secret", "versions/", "",
        "versions/../versions/secret", "versions/%2e%2e/versions/secret", "versions/000001-00000009/"
        "model.safetensors", "model/modeling.py", "model/model.safetensors", "model/.env.json",
        "model/model.safetensors.index.json", "model/../versions/secret", "model/..%2fversions%2fsecret",
        "versions/000001-00000004/model-1-of-3.safetensors", "versions/000001-00000004/other.index.json",
        "versions/000001-00000004/model-00001-of-00003.safetensors",  # not there
        "model/config.json/", "/etc/passwd", "model//etc/passwd", "model/config.json%00",
    ],
)  # fmt: skip
def test_nothing_else_is_sent(source: Source, path: str) -> None:
    host, port = source.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:  # a client would tidy the path up
        head = f"GET /{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {source.token}\r\n\r\n"
        raw.sendall(head.encode())
        assert raw.recv(1000).split()[1] == (b"400" if "\0" in path else b"404")


@pytest.mark.parametrize("given", [b"", b"Bearer", b"Bearer wrong", b"Bearer \xff", b"\xff" * 5000])
def test_a_wrong_token_is_refused(source: Source, given: bytes) -> None:
    assert get(source, VERSION, Authorization=given).status_code == 401


def test_an_old_token_is_named_as_the_cause(source: Source, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=r"status 401.*its token is another one"):
        download(replace(source, token="old"), WANTED, tmp_path / "got")


@pytest.mark.parametrize("token", ["\xff", "a\r\nX: y", "a b", "\ud800"])
def test_an_announced_token_that_is_none_is_refused(source: Source, token: str, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="or its token no token"):
        download(replace(source, token=token), WANTED, tmp_path / "got")


def test_other_methods_are_refused(source: Source) -> None:
    with httpx.Client(trust_env=False) as client:
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            headers = {"Authorization": f"Bearer {source.token}"}
            assert client.request(method, f"{source.url}/{VERSION}", headers=headers).status_code == 405


def test_a_download_that_was_cut_goes_on_where_it_ended(source: Source, tmp_path: Path) -> None:
    part = tmp_path / f".got.{HASH[:16]}.part"
    part.write_bytes(CONTENT[:1000])
    assert get(source, VERSION, Range="bytes=1000-").content == CONTENT[1000:]
    download(source, WANTED, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert not part.exists()


def test_a_part_of_other_bytes_is_thrown_away_and_the_next_try_succeeds(
    source: Source, tmp_path: Path
) -> None:
    (tmp_path / f".got.{HASH[:16]}.part").write_bytes(b"x" * 1000)
    with pytest.raises(FetchFailed, match="is not the announced file"):
        download(source, WANTED, tmp_path / "got")
    download(source, WANTED, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_file_that_is_there_is_not_fetched_again(source: Source, tmp_path: Path) -> None:
    (tmp_path / "got").write_bytes(CONTENT)
    download(replace(source, url="http://127.0.0.1:1"), WANTED, tmp_path / "got")
    (tmp_path / "got").write_bytes(CONTENT[::-1])
    download(source, WANTED, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_eight_clients_get_a_file_two_at_a_time_in_the_order_of_their_requests(
    folder: Path, server: FileServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.learner.state.file_server._PATIENCE_S", 600.0)
    monkeypatch.setattr("penstock.learner.state.file_server._TURN_S", 600.0)
    size = 64 << 20  # more than the sockets of a client that does not read take
    with (folder / VERSION).open("wb") as file:
        file.truncate(size)
    clients = []
    for _ in range(8):
        clients.append(ask(source, VERSION))
        time.sleep(0.05)
    for place, client in enumerate(clients):
        two = clients[place : place + 2]
        wait_until(lambda fed=two: all(map(has_body, fed)), f"the bodies of the clients from {place} on")
        assert not any(map(has_body, clients[place + 2 :]))
        read_all(client, size)
        client.close()


def ask(source: Source, path: str) -> socket.socket:
    """A connection on which a file was asked for, and nothing is read yet."""
    client = socket.create_connection((urlsplit(source.url).hostname, urlsplit(source.url).port))
    head = f"GET /{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {source.token}\r\n\r\n"
    client.sendall(head.encode())
    return client


def has_body(client: socket.socket) -> bool:
    """Whether more than the head of the response has come."""
    with contextlib.suppress(BlockingIOError):
        return len(client.recv(100_000, socket.MSG_PEEK | socket.MSG_DONTWAIT)) > 1000
    return False


def read_all(client: socket.socket, size: int) -> None:
    """Read a response with a body of `size` bytes."""
    got = 0
    while got < size:
        part = client.recv(1 << 20)
        assert part, f"the connection ended after {got} bytes"
        got += len(part)


def test_clients_that_do_not_read_are_cut_off(
    folder: Path, server: FileServer, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.learner.state.file_server._CHUNK_S", 0.3)
    with (folder / VERSION).open("wb") as file:
        file.truncate(64 << 20)
    stuck = [ask(source, VERSION) for _ in range(5)]
    try:
        (one,) = [one for one in shared_files(folder / "model") if one.name == "config.json"]
        download(source, Wanted("model/config.json", one.size, one.hash), tmp_path / "got")
        held = server._server.connections
        wait_until(lambda: not any(one.busy for one in held), "the end of what nobody reads")
    finally:
        for client in stuck:
            client.close()
    assert (tmp_path / "got").read_text() == "config.json"


def test_slow_clients_leave_their_turn_to_others_and_get_all_the_same(
    folder: Path, server: FileServer, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.learner.state.file_server._PATIENCE_S", 0.2)
    size = 64 << 20
    with (folder / VERSION).open("wb") as file:
        file.truncate(size)
    slow = [ask(source, VERSION) for _ in range(3)]
    try:
        (one,) = [one for one in shared_files(folder / "model") if one.name == "config.json"]
        download(source, Wanted("model/config.json", one.size, one.hash), tmp_path / "got")
        assert server.being_fetched() == frozenset(), "one file needs no folder"
        for client in slow:  # each has had a part alone, and is not cut off
            read_all(client, size)
    finally:
        for client in slow:
            client.close()


def test_a_client_that_leaves_at_any_time_is_no_error(
    folder: Path, server: FileServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.learner.state.file_server._PATIENCE_S", 0.05)
    faults: list[Any] = []
    server._loop.set_exception_handler(lambda _, fault: faults.append(fault))
    with (folder / VERSION).open("wb") as file:
        file.truncate(64 << 20)
    for moment in range(30):
        with ask(source, VERSION) as client:
            client.recv(1000)
            time.sleep(0.004 * moment)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: server._uploads._value == 2, "free places")
    assert get(source, "model/config.json").status_code == 200
    gc.collect()  # asyncio tells of an error that nobody looked at then
    assert faults == []


def test_a_version_of_several_files_is_in_use_until_a_minute_after_its_last_one(
    folder: Path, server: FileServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = "000001-00000004", f"{VERSION.removesuffix('.safetensors')}-00001-of-00003.safetensors"
    with (folder / path).open("wb") as file:
        file.truncate(64 << 20)
    monkeypatch.setattr("penstock.learner.state.file_server._NEXT_FILE_S", -1.0)
    with ask(source, path):
        wait_until(lambda: server.being_fetched() == {name}, "the use")
    wait_until(lambda: server.being_fetched() == frozenset(), "the end of the use")
    monkeypatch.setattr("penstock.learner.state.file_server._NEXT_FILE_S", 60.0)
    assert get(source, path).status_code == 200
    assert server.being_fetched() == {name}
    assert len(server._fetches) == 1, "what is over is forgotten"


def test_a_version_that_is_deleted_while_it_waits_is_sent_all_the_same(
    folder: Path, server: FileServer, source: Source, tmp_path: Path
) -> None:
    server._loop.call_soon_threadsafe(setattr, server, "_uploads", turn := asyncio.Semaphore(0))
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(download, source, WANTED, tmp_path / "got")
        wait_until(lambda: turn._waiters, "the request")
        shutil.rmtree(folder / "versions")
        server._loop.call_soon_threadsafe(turn.release)
        done.result(30)
    assert (tmp_path / "got").read_bytes() == CONTENT


@pytest.mark.parametrize("asked", ["bytes=9999999999-", "bytes=-5", "bytes=5-9", "bytes=a-", "lines=1-"])
def test_another_range_than_the_rest_of_the_file_is_refused(source: Source, asked: str) -> None:
    assert get(source, VERSION, Range=asked).status_code == 416


def test_silent_connections_keep_nobody_out(server: FileServer, source: Source, tmp_path: Path) -> None:
    silent = []
    try:
        for _ in range(300):
            silent.append(socket.create_connection(("127.0.0.1", server.port)))
        download(source, WANTED, tmp_path / "got")
    finally:
        for one in silent:
            one.close()
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_client_that_reads_no_answer_is_cut_off_for_others(
    server: FileServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.learner.state.file_server._MOST_CONNECTIONS", 1)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(0.5)
        many = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000_000
        with pytest.raises(TimeoutError):
            client.sendall(many)  # the server reads no further, with answers unsent
        client.settimeout(30.0)
        other = socket.create_connection(("127.0.0.1", server.port))
        with other, pytest.raises(ConnectionResetError):
            read_all(client, len(many))


# A server that is not the learner's

Reply = Callable[[http.server.BaseHTTPRequestHandler], None]


def reply(status: int, body: bytes, **headers: str) -> Reply:
    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return send


@pytest.fixture
def fake() -> Iterator[Callable[[Reply], Source]]:
    """Starts a server that gives one reply to everybody."""
    servers = []

    def start(send: Reply) -> Source:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                send(self)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return Source(f"http://127.0.0.1:{server.server_port}", "token")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


WRONG: dict[str, tuple[Reply, str]] = {
    "other bytes": (reply(200, CONTENT[::-1]), "is not the announced file"),
    "larger": (reply(200, CONTENT + b"x"), "expected 1048576: the file is not the announced one"),
    "smaller": (reply(200, CONTENT[1:]), "expected 1048576: the file is not the announced one"),
    "larger than it says": (reply(200, CONTENT + b"x" * 99, Content_Length="1048576"), ""),
    "cut short": (reply(200, CONTENT[:9], Content_Length="1048576"), "did not send"),
    "no length": (reply(200, b"", Content_Length="?"), "expected|did not send"),
    "redirect": (reply(302, b"", Location="http://127.0.0.1:1/x"), "a redirect is not followed"),
    "redirect to itself": (reply(307, b"", Location="/other"), "a redirect is not followed"),
    "not found": (reply(404, b""), "status 404"),
    "failed": (reply(500, b"x" * 100), "status 500"),
    "a part that nobody asked for": (reply(206, CONTENT), "status 206, expected 200"),
    "chunked": (
        reply(
            200,
            b"100000\r\n" + CONTENT + b"\r\n0\r\n\r\n",
            Content_Length="1048576",
            Transfer_Encoding="chunked",
        ),
        "an unnamed number of bytes",
    ),
    "no HTTP": (lambda handler: handler.wfile.write(b"\x00\xff" * 100), "did not send"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_stores_nothing_under_the_files_name(
    fake: Callable[[Reply], Source], what: str, tmp_path: Path
) -> None:
    send, message = WRONG[what]
    source = fake(send)
    if message:
        with pytest.raises(FetchFailed, match=message):
            download(source, WANTED, tmp_path / "got")
        assert not (tmp_path / "got").exists()
    else:  # a client reads no more than the length that was announced
        download(source, WANTED, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_server_that_sends_whole_files_only_is_asked_for_the_whole_the_next_time(
    fake: Callable[[Reply], Source], tmp_path: Path
) -> None:
    part = tmp_path / f".got.{HASH[:16]}.part"
    part.write_bytes(CONTENT[:1000])
    source = fake(reply(200, CONTENT))
    with pytest.raises(FetchFailed, match=r"answered with the whole of .*the next try begins anew"):
        download(source, WANTED, tmp_path / "got")
    download(source, WANTED, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_silent_server_is_given_up(
    fake: Callable[[Reply], Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENCE_S", 0.2)
    with pytest.raises(FetchFailed, match="ReadTimeout"):
        download(fake(lambda _: time.sleep(3)), WANTED, tmp_path / "got")


def test_a_head_that_never_ends_is_cut(
    fake: Callable[[Reply], Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line comes soon enough for the limit of silence."""
    monkeypatch.setattr(module, "_SILENCE_S", 0.5)
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    monkeypatch.setattr(module, "_SLOWEST", 1 << 40)
    ended = threading.Event()

    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        try:
            while not ended.wait(0.05):
                handler.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        except OSError:
            ended.set()

    try:
        with pytest.raises(FetchFailed, match="did not send"):
            download(fake(send), WANTED, tmp_path / "got")
        assert ended.wait(10)
    finally:
        ended.set()


def test_the_time_of_a_slow_server_counts_whole(
    fake: Callable[[Reply], Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes 100 s for each look stands for bytes that come one by one."""
    seconds = iter(range(0, 10**9, 100))
    monkeypatch.setattr("penstock.common.deadline.time.monotonic", lambda: next(seconds))
    monkeypatch.setattr(module, "_check_time", check := Counting(module._check_time))
    monkeypatch.setattr(module, "alone", lambda _: nullcontext())
    with pytest.raises(FetchFailed, match="within 616 s"):
        download(fake(reply(200, CONTENT)), WANTED, tmp_path / "got")
    assert 1 < check.calls <= 7


class Counting:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        return self.function(*arguments)


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b", f"http://{'a' * 64}.com", "http://.:80",
        "", "10.0.0.5:29700", "ftp://10.0.0.5", "file:///etc/passwd", "http://", "http://user@host",
        "http://:pw@host", "http://host?x", "http://host#x", "http://host:99999",
        "http://ho st", "http://h\xe9", "http://a\r\nb", "http://[::1", "unix:///x",
    ],
)  # fmt: skip
def test_an_announced_url_of_another_kind_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="is no URL such as"):
        download(Source(url, "token"), WANTED, tmp_path / "got")


def test_a_hosts_name_that_cannot_be_looked_up_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed):
        download(Source("http://xn--a:1", "token"), WANTED, tmp_path / "got")


def test_a_client_that_left_keeps_no_file_open(server: FileServer, source: Source) -> None:
    host, port = source.url.removeprefix("http://").split(":")
    head = f"GET /{VERSION} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {source.token}\r\n\r\n"

    def ask() -> socket.socket:
        client = socket.create_connection((host, int(port)))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.sendall(head.encode())
        return client

    async def take() -> None:
        await server._uploads.acquire()

    for _ in range(2):  # no upload ends
        asyncio.run_coroutine_threadsafe(take(), server._loop).result(10)
    for _ in range(20):
        with ask() as client:
            assert client.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: not server._server.connections, "the end of all requests")


# Where it listens


@pytest.mark.parametrize(("address", "queue"), [("off", "redis://127.0.0.1:1"), ("auto", "unix:///q")])
def test_it_may_be_off(address: str, queue: str, tmp_path: Path) -> None:
    settings = LearnerSettings(files_address=address)
    with serving(settings, parse_url(queue), tmp_path, CONTRACT) as source:
        assert source is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_by_itself_it_listens_at_the_address_towards_the_queue_server(host: str, tmp_path: Path) -> None:
    queue = parse_url(f"redis://{host}:1")
    with serving(LearnerSettings(), queue, tmp_path, CONTRACT) as source:
        assert source is not None
        assert source.url.startswith(("http://127.0.0.1:", "http://[::1]:"))
        assert get(source, VERSION).status_code == 404


def test_another_url_may_be_announced(tmp_path: Path) -> None:
    settings = LearnerSettings(files_address="127.0.0.1:0", files_url="https://learner.example/files")
    with serving(settings, parse_url("unix:///q"), tmp_path, CONTRACT) as source:
        assert source is not None
        assert source.url == "https://learner.example/files"


def test_an_address_in_use_is_an_error_that_names_the_setting(
    server: FileServer, tmp_path: Path
) -> None:
    for address in (f"127.0.0.1:{server.port}", "192.0.2.7:0", "127.0.0.1:99999", "..:80"):
        settings = LearnerSettings(files_address=address)
        with (
            pytest.raises(ConfigError, match=r"LEARNER_FILES_ADDRESS: .* cannot be listened at"),
            serving(settings, parse_url("unix:///q"), tmp_path, CONTRACT),
        ):
            pass


@pytest.mark.parametrize("url", ["http://h\xe9:1", "http://h:99999", "http://[::1", "http://a..b"])
def test_an_url_that_no_actor_follows_is_refused_before_it_is_announced(
    url: str, tmp_path: Path
) -> None:
    settings = LearnerSettings(files_address="127.0.0.1:0", files_url=url)
    with (
        pytest.raises(ConfigError, match=r"LEARNER_FILES_URL: .* is no URL such as"),
        serving(settings, parse_url("unix:///q"), tmp_path, CONTRACT),
    ):
        pass


def test_every_way_to_write_all_addresses_announces_another_one() -> None:
    for host, bound in (("0", "0.0.0.0"), ("::0", "::"), ("", "0.0.0.0")):
        assert _reachable(host, bound).strip("[]") not in ("0", "::0", "::", "0.0.0.0", "")
    assert _reachable("localhost", "127.0.0.1") == "localhost"


@pytest.mark.parametrize("url", ["nonsense", "10.0.0.5:29700", "ftp://x", "http://a@b", "http://a?b"])
def test_an_url_that_no_actor_takes_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="files_url"):
        LearnerSettings(files_url=url)


def test_without_a_route_to_the_outside_the_hosts_name_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.learner.state.file_server._ANYWHERE", {4: "no.such.host.invalid"})
    settings = LearnerSettings(files_address="0.0.0.0:0")
    with serving(settings, parse_url("unix:///q"), tmp_path, CONTRACT) as source:
        assert source is not None
        assert source.url.startswith(f"http://{socket.gethostname()}:")
