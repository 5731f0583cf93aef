"""A run whose `penstock up` has a terminal: a pseudo-terminal, and pyte as the emulator behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pyte

from tests.e2e.forked import Forked, ForkedSite


class TerminalSite(ForkedSite):
    """A site whose `penstock up` writes to a terminal of `columns` x `lines`."""

    def __init__(self, folder: Path, procfile: str, columns: int, lines: int, **variables: str) -> None:
        super().__init__(folder, procfile, **variables)
        self._master, self._slave = os.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._lock = threading.Lock()
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, as a window that is dragged."""
        with self._lock:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            self.screen.resize(lines, columns)

    def launch(self, arguments: list[str]) -> Forked:
        """Start `penstock` in the terminal, in colour."""
        variables = {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""} | self.variables
        output = Connection(self._slave)
        return Forked("penstock.deploy", arguments, self.cwd, os.environ | variables, output)

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # the terminal's last writer has closed it
            while data := os.read(self._master, 65536):
                with self._lock:
                    self.written += data
                    self._stream.feed(data)

    def shown(self) -> list[str]:
        """The terminal's lines as a person sees them."""
        with self._lock:
            return [line.rstrip() for line in self.screen.display]
