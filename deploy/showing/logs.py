"""A log file for each process of a run: RUN/logs/learner.1.log, and .1 to .5 for earlier attempts."""

import logging
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path

from penstock.deploy.child import Report

_MOST_BYTES, _KEPT = 64 * 2**20, 5


class _File(RotatingFileHandler):
    """A log file of at most 64 MiB with five older ones beside it. It opens at the first line."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, maxBytes=_MOST_BYTES, backupCount=_KEPT, delay=True,
            encoding="utf-8", errors="backslashreplace",
        )  # fmt: skip

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a full disk loses lines of the log, and not the run."""


class LogFiles:
    """Writes each report of a run's processes to the process's file in `folder`. Safe in any thread.

    A process that starts again begins a new file. `folder` must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def path(self, child: str) -> Path:
        """Return the file of the process `child`, such as "learner.1"."""
        return self._folder / f"{child}.log"

    def __call__(self, report: Report) -> None:
        """Write `report` as a line, with `-- ` before the text of all but output."""
        path = self.path(report.child)
        mark = "" if report.kind == "output" else "-- "
        with self._lock:
            if report.child not in self._files:
                self._files[report.child] = _File(path)
            file = self._files[report.child]
            try:
                if report.kind == "started" and path.is_file() and path.stat().st_size:
                    file.doRollover()
            except OSError:
                pass  # the new lines follow the old ones then
            line = logging.makeLogRecord({"msg": f"{mark}{report.line}"})
            file.handle(line)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                file.close()
