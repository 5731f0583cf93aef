"""What sandbox processes print, as log lines: cut, escaped, and only so many per minute."""

import threading
import time

from penstock.common.log import get_logger
from penstock.common.text import printable

_LINES_PER_MINUTE = 60
_LONGEST_LINE = 300

log = get_logger(__name__)


class OutputLog:
    """Logs what the processes of one pool print, at most 60 lines a minute. Further lines are dropped.

    A warning tells of dropped lines once per minute. Lines are cut to 300 characters, and unprintable
    ones escaped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._lines = 0

    def add(self, data: bytes) -> None:
        """Log the lines of `data`, UTF-8 text, without outer spaces; empty lines are left out.

        Each line is cut to 300 characters. Of `data` at most 18,000 bytes are read. After 60 lines in a
        minute, a warning is logged, and further lines are dropped until the minute is over. A line that
        is in two pieces of data is logged as two. Safe in several threads.
        """
        with self._lock:
            if self._lines > _LINES_PER_MINUTE and time.monotonic() - self._since < 60.0:
                return
            lines = data[: _LONGEST_LINE * _LINES_PER_MINUTE].decode("utf-8", "replace").splitlines()
            for line in filter(None, map(str.strip, lines)):
                if not self._log(printable(line[:_LONGEST_LINE])):
                    return

    def _log(self, line: str) -> bool:
        """Log one line and return True; for the line after 60 in a minute log a warning, return False.

        A minute begins with the first line at least 60 s after the last begin. The caller holds the
        lock.
        """
        now = time.monotonic()
        if now - self._since >= 60.0:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines > _LINES_PER_MINUTE:
            log.warning("Sandbox processes print too much: further lines are not logged for a minute.")
            return False
        log.info(f"A sandbox process printed: {line}")
        return True
