"""A lock on a file, held for as long as the process lives: kill -9 frees it at once."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import RunTaken
from common.files import make_folder


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the file; raises RunTaken naming the process that does. `what` holds it, for people."""
    make_folder(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 200).decode()
        os.close(handle)
        raise RunTaken(
            f"another {what} holds the run's folder {path.parent}: {holder}; stop it, or choose another "
            "RUN_NAME"
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, holder_name().encode(), 0)
    try:
        yield
    finally:
        os.close(handle)


def holder_name() -> str:
    """This process, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"
