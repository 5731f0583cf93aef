"""A device that the learner and the actors of a host use by turns (LEARNER_SHARE_DEVICE).

Who uses the device holds a lock on a file in the run's folder: the learner alone, actors together. The
system releases the lock of a process that is killed. Whoever waits holds the lock of a second file, the
door, so that no later one gets in before, and so that the users of the device see that somebody waits.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from penstock.common.errors import ConfigError
from penstock.common.files.atomic import make_folder

_POLL_S = 0.02


class SharedDevice:
    """A host's device as one process sees it, which does not use it at first.

    The files are in the folder `locks`; `alone` is True for the learner, which shares its turn with
    nobody. Creating one makes the files. Raise ConfigError if the folder or a file cannot be made.
    """

    def __init__(self, locks: Path, alone: bool) -> None:
        make_folder(locks)
        host = socket.gethostname()
        self._door, self._device = (_open(locks / f"{host}.{name}") for name in ("door", "device"))
        self._kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self.in_use = False

    def take(self, give_up: Callable[[], bool]) -> bool:
        """Wait until the device is free, and use it: return True, with `in_use` True.

        `give_up` is called every 0.02 s while others use the device; once it returns True, return False.
        What it raises ends the wait too.
        """
        if self.in_use:
            return True
        try:
            if _lock(self._door, fcntl.LOCK_EX, give_up):
                self.in_use = _lock(self._device, self._kind, give_up)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        return self.in_use

    def release(self) -> None:
        """Stop using the device. What this process has on the device must be gone by then."""
        self.in_use = False
        fcntl.flock(self._device, fcntl.LOCK_UN)

    def is_wanted(self) -> bool:
        """Return whether another process waits for the device."""
        try:
            fcntl.flock(self._door, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._door, fcntl.LOCK_UN)
        return False


def _open(path: Path) -> int:
    """Return a descriptor of the file, created if missing. Raise ConfigError if it cannot be opened."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened ({error}): start the learner and the actors that share its device "
            "(LEARNER_SHARE_DEVICE) as one user"
        ) from error


def _lock(file: int, kind: int, give_up: Callable[[], bool]) -> bool:
    """Wait for a lock of `kind` on the file, and return True; False once `give_up` returns True."""
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if give_up():
                return False
            time.sleep(_POLL_S)
