"""A lock on a file. The system releases the lock when its process ends, also after kill -9."""

import errno
import fcntl
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from penstock.common.errors import ConfigError, RunTaken
from penstock.common.files.atomic import make_folder
from penstock.common.log import get_logger

log = get_logger(__name__)

_NAMES_KEPT = 50
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks: NFS without lockd, Lustre without flock."""
_START = uuid.uuid4().hex[:6]
_ON_THIS_HOST = f" on {socket.gethostname()}"


@contextmanager
def hold_lock(path: Path, what: str, leased: bool = False) -> Iterator[list[str]]:
    """Hold the lock of the file `path` during the block. Yield who held it before, newest first.

    These are names of processes, up to 50; none of them holds the lock now. The file, and its folder, is
    created if missing, and keeps this process's name. Do not wait: raise RunTaken, naming the holder, if
    another process holds the lock. `what` names the process in this error, such as "learner". Where no
    lock works, log a warning and yield [] if `leased`: a lease decides who may work. Raise ConfigError
    there otherwise, and if the folder cannot be made, DiskFailed or OSError for a file or disk.
    """
    make_folder(path.parent)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8") as file:
        if not _lock(file, path, what, leased):
            yield []  # whoever the file names may live
            return
        before = file.read().splitlines()
        names = "\n".join([holder_name(), *before][:_NAMES_KEPT]).encode()
        os.pwrite(file.fileno(), names, 0)  # before the truncate: a kill in between must not lose names
        os.ftruncate(file.fileno(), len(names))
        yield before


def _lock(file: TextIO, path: Path, what: str, leased: bool) -> bool:
    """Lock the file; return False where none works, if `leased`. Raise RunTaken or ConfigError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError as error:
        holder = next(iter(file.read().splitlines()), "a process that is just starting")
        raise RunTaken(
            f"another {what} holds the run's folder {path.parent}: {holder}; stop that "
            "process, or choose another RUN_NAME"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        found = f"No lock works in {path.parent} ({error.strerror}): "
        if not leased:
            raise ConfigError(f"{found}choose another RUN_DIR, or mount it with locks") from error
        log.warning(f"{found}the lease alone keeps a second {what} away.")
        return False


def holder_name() -> str:
    """Return a name of this process that no other start of a process has, such as in another container.

    The name has the process's id, a random part and the host. It stays the same while the process lives.
    """
    return f"process {os.getpid()} ({_START}){_ON_THIS_HOST}"


def of_this_host(names: Iterable[str]) -> list[str]:
    """Return those of `names`, in order, that `holder_name` returned in processes on this host."""
    return [name for name in names if name.endswith(_ON_THIS_HOST)]
