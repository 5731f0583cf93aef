"""The wait while a disk is full: logged at once and every 30 s, with a timeout that ends the run."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.common.errors import DiskFull
from penstock.common.log import get_logger
from penstock.common.phases import Phases

log = get_logger(__name__)

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_S = 1.0
_REPORT_EVERY_S = 30.0


def is_full(error: BaseException) -> bool:
    """Whether an error means a full disk or quota. Safetensors states that in its text only."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(os.strerror(code) in str(error) for code in _FULL)


class Disk:
    """Retries writes while the disk is full, until `timeout_s` is over or `stopping` is set.

    The wait is a phase of `phases`, polled again and again: this process has not hung.
    """

    def __init__(
        self,
        timeout_s: float = 0.0,
        stopping: threading.Event | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._stopping = stopping or threading.Event()
        self._phases = phases or Phases()

    def write(self, what: str, path: Path, action: Callable[[], T], needed: int | None = None) -> T:
        """Return what `action` returns, retried while the disk is full. Raise DiskFull.

        When `action` raises, it must leave nothing half written. `needed` is about how many bytes it
        writes: a retry waits until as many are free. `what` and `path` are for log and error.
        """
        wait = None
        while True:
            began = time.monotonic()
            try:
                return action()
            except Exception as error:  # libraries raise types of their own when the disk is full
                if not is_full(error):
                    raise
                wait = wait or _Wait(what, path, needed, began)
                self._wait(wait, time.monotonic() - began, error)

    def _wait(self, wait: "_Wait", took_s: float, error: Exception) -> None:
        """Wait as long as the attempt took (1 s or more) and until there may be room. Raise DiskFull."""
        pause_s = max(_POLL_S, took_s)
        while True:
            over = wait.waited_s + pause_s > self._timeout_s
            if over or self._stopping.is_set():
                why = f"RUN_DISK_TIMEOUT_S={self._timeout_s:g}" if over else "told to stop"
                raise DiskFull(wait.explain(why)) from error
            wait.report(self._timeout_s)
            with self._phases.enter("waiting for room on the disk"):
                self._stopping.wait(pause_s)
            if wait.may_have_room():
                return


class _Wait:
    """A write that found no room: its name, path, size and the time of its first attempt."""

    def __init__(self, what: str, path: Path, needed: int | None, began: float) -> None:
        self._what, self._path, self._needed, self._began = what, path, needed, began
        self._folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        self._report_at = began

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def may_have_room(self) -> bool:
        """Whether as many bytes are free as the write needs; True if that number is unknown."""
        return self._needed is None or self._free() >= self._needed

    def report(self, limit_s: float) -> None:
        """Log the wait, at most every 30 s."""
        if time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + _REPORT_EVERY_S
        about = {"what": self._what, "path": str(self._path), "waited_s": round(self.waited_s)}
        log.error("No room on the disk: waiting.", **about, limit_s=limit_s, **self._room())

    def explain(self, why: str) -> str:
        """Return the text of a DiskFull. `why` names the reason to stop waiting."""
        room = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self._room().items())
        return (
            f"no room for {self._what} in {self._path} ({room}) after {self.waited_s:.0f} s ({why}). "
            "Everything written before is whole: make room, then start again to resume"
        )

    def _room(self) -> dict[str, int]:
        """Return the free bytes, and if known the needed and the missing ones, by name for the log."""
        free = self._free()
        if self._needed is None:
            return {"free_bytes": free}
        missing = max(0, self._needed - free)
        return {"free_bytes": free, "needed_bytes": self._needed, "missing_bytes": missing}

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free
