"""A lock on a file, held for as long as the process lives: kill -9 frees it at once."""

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


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[list[str]]:
    """Hold the file; raises RunTaken naming the process that does. `what` holds it, for people.

    Yields the names of those that held it before, the last one first: they have let it go.
    """
    make_folder(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = next(iter(_read_names(handle)), "a process that is just starting")
        os.close(handle)
        raise RunTaken(
            f"another {what} holds the run's folder {path.parent}: {holder}; stop it, or choose another "
            "RUN_NAME"
        ) from error
    before = _read_names(handle)
    names = "\n".join([holder_name(), *before][:_NAMES_KEPT]).encode()
    os.pwrite(handle, names, 0)  # before it is cut: a kill in between must not lose the names
    os.ftruncate(handle, len(names))
    try:
        yield before
    finally:
        os.close(handle)


def _read_names(handle: int) -> list[str]:
    return os.pread(handle, 1 << 16, 0).decode().splitlines()


def holder_name() -> str:
    """This process, for people and for the lease: none in a container of that name is called so."""
    return f"process {os.getpid()} ({_START}){_on_this_host()}"


def of_this_host(names: Iterable[str]) -> list[str]:
    """Those of the names that `holder_name` gave on this host, where a lock decides at once."""
    return [name for name in names if name.endswith(_on_this_host())]


def _on_this_host() -> str:
    return f" on {socket.gethostname()}"
