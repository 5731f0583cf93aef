from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import prepare, started_server
from penstock.common.broker.private_socket import answers
from penstock.common.files.run_folder import RunFolder
from tests.chaos.losses import LossMeter
from tests.e2e.aof import added, read_file
from tests.e2e.slow_disk import build_slow_disk
from tests.helpers import wait_until, wait_until_written

KEYS = Keys("losses")

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the folder's server, with variables if need be."""
    started = []

    def start(*variables: str) -> subprocess.Popen[bytes]:
        plan = prepare(RunFolder(tmp_path))
        started.append(subprocess.Popen(["/usr/bin/env", *variables, *plan.command]))
        wait_until(lambda: answers(plan.url), "the server to answer", 30)
        return started[-1]

    yield start
    for server in started:
        server.kill()
        server.wait()


@pytest.fixture
def meter(tmp_path: Path) -> LossMeter:
    return LossMeter(tmp_path, "losses")


def connect(folder: Path) -> Connection:
    return Connection(started_server(RunFolder(folder)), 10, 10)


def add(connection: Connection, *numbers: int) -> None:
    for number in numbers:
        connection.execute("XADD", KEYS.scored, "*", "t", f"train:{number}", "d", b"\r\n$4\r\nXADD\r\n")


def tickets_in_file(folder: Path) -> list[str]:
    return [ticket for _, ticket in added(read_file(folder), KEYS.scored)]


def test_what_is_in_the_file_of_a_killed_server_is_not_lost(tmp_path, start, meter):
    server = start()
    connection = connect(tmp_path)
    add(connection, 1, 2, 3)
    connection.execute("XTRIM", KEYS.scored, "MAXLEN", 0)
    wait_until_written(connection)
    shown = meter.shown()
    assert shown[KEYS.scored] == 3
    server.kill()
    assert meter.lost(shown, server.pid) == 0
    assert tickets_in_file(tmp_path) == ["train:1", "train:2", "train:3"]


@pytest.mark.e2e
def test_what_a_server_on_a_slow_disk_acknowledged_and_lost_is_counted(tmp_path, start, meter):
    server = start(f"LD_PRELOAD={build_slow_disk(tmp_path, delay_s=1.5)}")
    connection = connect(tmp_path)

    def a_write_waits() -> bool:
        add(connection, 0)
        return connection.execute("INFO")["aof_buffer_length"] > 0

    wait_until(a_write_waits, "a write that waits for the disk", 30)
    shown = meter.shown()
    server.kill()
    lost = meter.lost(shown, server.pid)
    assert lost > 0
    assert lost == shown[KEYS.scored] - len(tickets_in_file(tmp_path))


def test_a_torn_last_command_is_left_out(tmp_path, start):
    start()
    connection = connect(tmp_path)
    add(connection, 1, 2)
    wait_until_written(connection)
    whole = read_file(tmp_path)
    assert len(added(whole, KEYS.scored)) == 2
    assert [ticket for _, ticket in added(whole[:-3], KEYS.scored)] == ["train:1"]


def test_a_server_that_does_not_answer_shows_nothing(tmp_path, meter):
    prepare(RunFolder(tmp_path))
    assert meter.shown() is None
