"""A queue server whose disk was full takes writes again when there is room."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor import sync_watch
from penstock.common.monitor.sync_watch import SyncWatch
from tests.faults.host import FaultyHost, build_faulty_host
from tests.faults.world import Server
from tests.helpers import wait_until, wait_until_written


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyHost:
    library = build_faulty_host(tmp_path)
    if library is None:
        pytest.skip("no C compiler")
    return FaultyHost(library, "server", RunFolder(tmp_path / "run").server)


def status(connection: Connection) -> str:
    return str(connection.execute("INFO")["aof_last_write_status"])


def is_rewritten(connection: Connection) -> bool:
    """Whether the file that is written anew is whole. Until then a killed server reads the old one."""
    info = connection.execute("INFO")
    return not (info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])


def test_a_server_whose_sync_failed_takes_writes_again(
    tmp_path: Path, faulty: FaultyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_watch, "_EVERY_S", 0.2)
    folder = tmp_path / "run"
    folder.mkdir()
    with Server(folder, faulty.variables) as server:
        connection = Connection(server.url, 10, 60)

        def sync_fails() -> bool:
            """Whether a sync failed of what is written to the file, but not synced yet."""
            faulty.mend()
            for number in range(3):  # the first write is synced at once, the next ones a second later
                connection.execute("SET", "key", number)
            faulty.fail("ENOSPC")
            time.sleep(1.5)
            return status(connection) != "ok"

        wait_until(sync_fails, "a sync that fails")
        faulty.mend()
        with SyncWatch(RunFolder(folder)):
            assert connection.execute("SET", "key", "after")
            wait_until(lambda: status(connection) == "ok", "a file that is written")
        assert connection.execute("INFO")["aof_enabled"] == 1
        wait_until(lambda: is_rewritten(connection), "the new file, in which all is")
        wait_until_written(connection)
        server.kill()
        server.start()
        assert connection.execute("GET", "key") == b"after"


def test_a_server_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    watch = SyncWatch(RunFolder(tmp_path))
    watch.look()
    assert watch._connection is None
