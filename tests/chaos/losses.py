"""What a server forgets of what it had acknowledged, when it is killed."""

from __future__ import annotations

from pathlib import Path

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.local_server import started_server
from penstock.common.errors import PenstockError
from penstock.common.files.run_folder import RunFolder
from tests.e2e.aof import added, read_file
from tests.helpers import is_dead, wait_until

_ANSWER_S = 1.0


class LossMeter:
    """Compares what a live server shows with what its file holds once it is dead.

    All of the run's streams are looked at; an entry that a process was told of and that is not in the
    file is one lost.
    """

    def __init__(self, run_folder: Path, run: str) -> None:
        keys = Keys(run)
        self._streams = (*keys.work_streams, *keys.outcome_streams)
        self._run_folder = run_folder

    def shown(self) -> dict[str, int] | None:
        """How many entries were ever added to each stream, as clients see it now; None if away."""
        try:
            connection = Connection(started_server(RunFolder(self._run_folder)), _ANSWER_S, _ANSWER_S)
            try:
                return {stream: _entries_added(connection, stream) for stream in self._streams}
            finally:
                connection.close()
        except PenstockError:
            return None

    def lost(self, shown: dict[str, int], pid: int) -> int:
        """How many of the entries shown are not in the file of the server that was killed since."""
        wait_until(lambda: is_dead(pid), f"process {pid} to be dead")
        data = read_file(self._run_folder)
        return sum(max(0, count - len(added(data, stream))) for stream, count in shown.items())


def ticket_holders(run_folder: Path, run: str) -> set[int]:
    """The process ids of the actors that hold tickets now; empty if the server does not answer."""
    try:
        connection = Connection(started_server(RunFolder(run_folder)), _ANSWER_S, _ANSWER_S)
        try:
            found = connection.execute("XPENDING", Keys(run).tickets, GROUP)
            return {int(one["name"].decode().split("-")[-2]) for one in found["consumers"]}
        finally:
            connection.close()
    except PenstockError:
        return set()


def _entries_added(connection: Connection, stream: str) -> int:
    if not connection.execute("EXISTS", stream):
        return 0
    reply = connection.execute("XINFO", "STREAM", stream)
    pairs = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return int(pairs[b"entries-added"] if b"entries-added" in pairs else pairs["entries-added"])
