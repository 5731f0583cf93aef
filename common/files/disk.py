"""The wait while a disk is full: logged at once and every 30 s, with a timeout that ends the run."""

import errno
import math
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from penstock.common.deadline import Deadline
from penstock.common.errors import DiskFailed, DiskFull
from penstock.common.log import get_logger
from penstock.common.phases import WAITING_FOR_ROOM, Phases

log = get_logger(__name__)

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (
    errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EREMOTEIO,
    errno.EHOSTDOWN, errno.ESHUTDOWN, errno.EUCLEAN, errno.EBADMSG,
)  # fmt: skip
_POLL_S = 1.0


def is_full(error: BaseException) -> bool:
    """Return whether an error means a full disk or quota.

    An OSError is judged by its number. Of any other error the text counts: safetensors states a full
    disk there.
    """
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(os.strerror(code) in str(error) for code in _FULL)


def failure_of(error: BaseException, what: str = "", path: Path | None = None) -> DiskFailed | None:
    """Return the error to raise for a disk that broke, or whose mount is gone; None for another error.

    `what` names the thing that was written to `path`; by default the error's own file is named.
    """
    if isinstance(error, OSError):
        broken = error.errno in (*_BROKEN, errno.ETIMEDOUT if path or error.filename else 0)
    else:  # libraries raise types of their own
        broken = any(f"(os error {code})" in str(error) for code in _BROKEN)
    if not broken:
        return None
    file = path or getattr(error, "filename", None) or "a file"
    doing = f"{what} cannot be written to {file}" if what else f"{file} cannot be read or written"
    return DiskFailed(
        f"{doing}: {getattr(error, 'strerror', error)}. Everything that was acknowledged before is "
        "whole. See `dmesg`, mount the disk again, for reading and writing, then start again to resume"
    )


@dataclass(slots=True)
class Disk:
    """Retries writes while the disk is full, until `timeout_s` is over or `stopping` is set."""

    timeout_s: float = 0.0
    stopping: threading.Event = field(default_factory=threading.Event)
    phases: Phases = field(default_factory=Phases)  # polled by the wait: this process has not hung

    def write(self, what: str, path: Path, action: Callable[[], T], needed: int | None = None) -> T:
        """Return what `action` returns; call it again while it fails because the disk is full.

        Between two calls wait 1 s, or longer if the last call took longer. Log this as an error at once
        and every 30 s. Raise DiskFull if the disk stays full for `timeout_s` (0: at the first failure),
        or `stopping` is set, DiskFailed if it broke. Other errors of `action` are raised at once. When
        `action` raises, it must leave nothing half written. `needed` is about how many bytes it writes:
        a retry waits until so many are free; None: unknown. `what` names the thing written, and `path`
        is its file or folder, for log and error. During the wait `phases` is in "waiting for room on the
        disk".
        """
        deadline = Deadline(self.timeout_s, longest_gap_s=math.inf)  # attempts count, however long
        wait = _Wait(what, path, needed, deadline)
        while True:
            started_s = deadline.waited_s
            try:
                return action()
            except Exception as error:  # libraries raise types of their own when the disk is full
                if failed := failure_of(error, what, path):
                    raise failed from error
                if not is_full(error):
                    raise
                self._wait(wait, max(_POLL_S, deadline.waited_s - started_s), error)

    def _wait(self, wait: "_Wait", pause_s: float, error: Exception) -> None:
        """Wait `pause_s` seconds, and again until the bytes that `wait` needs are free on the disk.

        If `wait` does not know how many it needs, return after the first pause. Log at once and every 30
        s. `phases` is in "waiting for room on the disk" meanwhile. Raise DiskFull, caused by `error`,
        the error of the failed write, if less than `pause_s` is left of the timeout, or `stopping` is
        set.
        """
        while True:
            over = pause_s > wait.deadline.remaining_s
            if over or self.stopping.is_set():
                why = f"RUN_DISK_TIMEOUT_S={self.timeout_s:g}" if over else "stopped by a signal"
                raise DiskFull(wait.explain(why)) from error
            wait.report()
            with self.phases.enter(WAITING_FOR_ROOM):
                self.stopping.wait(pause_s)
            if wait.room().get("missing_bytes", 0) == 0:
                return


@dataclass(slots=True)
class _Wait:
    """A write that may find no room: its name, path and size, and how long it has waited."""

    what: str
    path: Path
    needed: int | None
    deadline: Deadline
    reported: bool = False

    def report(self) -> None:
        """Log an error at the first call, and then once per 30 s waited; do nothing at other calls.

        The log line has the file, the limit and the seconds waited, and `room`'s bytes.
        """
        if not self.reported or self.deadline.report_due():
            self.reported = True
            times = {"limit_s": self.deadline.limit_s, "waited_s": round(self.deadline.waited_s)}
            about = {"what": self.what, "path": str(self.path), **times, **self.room()}
            log.error("No room on the disk: waiting.", **about)

    def explain(self, why: str) -> str:
        """Return the text of the error that ends the wait, for `why`, such as "stopped by a signal".

        The text names the file, the free and the needed bytes, the seconds waited, and what to do.
        """
        room = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.room().items())
        return (
            f"no room for {self.what} in {self.path} ({room}) after {self.deadline.waited_s:.0f} s "
            f"({why}). Everything written before is whole: make room, then start again to resume"
        )

    def room(self) -> dict[str, int]:
        """Return the disk's "free_bytes"; if the need is known, also "needed_bytes" and "missing_bytes".

        The disk is that of the nearest existing folder above the file.
        """
        folder = next(parent for parent in self.path.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(folder).free
        if self.needed is None:
            return {"free_bytes": free}
        missing = max(0, self.needed - free)
        return {"free_bytes": free, "needed_bytes": self.needed, "missing_bytes": missing}
