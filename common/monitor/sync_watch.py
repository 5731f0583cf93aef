"""A look at the file of a run's own queue server, which Redis leaves unwritten after a failed sync."""

import shutil

from penstock.common.broker.connection import Connection
from penstock.common.broker.lease_keeper import KeeperThread
from penstock.common.broker.local_server import started_server
from penstock.common.errors import ConfigError, ServerUnavailable
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import get_logger

_EVERY_S, _ANSWER_S = 2.0, 2.0
_ROOM = 64 << 20

log = get_logger(__name__)


class SyncWatch:
    """Lets the queue server in the run's `folder` write its file anew after a sync of it failed.

    Redis never repeats a sync that failed, as on a full disk, and refuses all writes from then on, also
    when there is room again. A context: a thread looks every 2 s and, if the last two looks found a
    failure and 64 MiB are free, turns the file off and on. That loses nothing but what a kill of the
    server meanwhile loses.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._connection: Connection | None = None
        self._failed = False
        self._thread = KeeperThread("sync", _EVERY_S, self.look, "The queue server's file was not seen")

    def __enter__(self) -> "SyncWatch":
        """Start the thread and return self."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, in up to 5 s. An error of the block passes."""
        self._thread.stop()
        if self._connection is not None:
            self._connection.close()

    def look(self) -> None:
        """Look at the file once. Do nothing while the server starts, has ended or does not answer.

        Raise CommandRefused if the server cannot write its file anew; the next look tries again.
        """
        try:
            if self._connection is None:
                self._connection = Connection(started_server(self._folder), _ANSWER_S, _ANSWER_S)
            found = self._connection.execute("INFO", "persistence")
        except (ConfigError, ServerUnavailable):
            return
        before, self._failed = self._failed, found["aof_last_write_status"] != "ok"
        if shutil.disk_usage(self._folder.server).free < _ROOM:
            return
        if before and self._failed:
            log.error("A sync of the queue server's file failed: it is written anew.")
            self._connection.execute("CONFIG", "SET", "appendonly", "no")
        if (before and self._failed) or not found["aof_enabled"]:
            self._connection.execute("CONFIG", "SET", "appendonly", "yes")
