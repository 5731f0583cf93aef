"""A lock on a file. The system releases the lock when its process ends, also after kill -9."""

import fcntl
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.common.errors import RunTaken
from penstock.common.files.atomic import make_folder

_NAMES_KEPT = 50
_START = uuid.uuid4().hex[:6]
_ON_THIS_HOST = f" on {socket.gethostname()}"


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[list[str]]:
    """Hold the lock in the block, named in its file. Raise RunTaken, naming the holder, if held.

    Yield the names of the processes that held the lock before, newest first; none holds it now. `what`
    names the process in the error, such as "learner". Raise ConfigError if the folder cannot be made.
    """
    make_folder(path.parent)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = next(iter(file.read().splitlines()), "a process that is just starting")
            raise RunTaken(
                f"another {what} holds the run's folder {path.parent}: {holder}; stop it, or choose "
                "another RUN_NAME"
            ) from error
        before = file.read().splitlines()
        names = "\n".join([holder_name(), *before][:_NAMES_KEPT]).encode()
        os.pwrite(file.fileno(), names, 0)  # before the truncate: a kill in between must not lose names
        os.ftruncate(file.fileno(), len(names))
        yield before


def holder_name() -> str:
    """Return a name of this process that no other start of a process has, not even in a container."""
    return f"process {os.getpid()} ({_START}){_ON_THIS_HOST}"


def of_this_host(names: Iterable[str]) -> list[str]:
    """Return the names that `holder_name` returned on this host."""
    return [name for name in names if name.endswith(_ON_THIS_HOST)]
