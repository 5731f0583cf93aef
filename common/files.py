"""Files that survive a crash whole or not at all: write aside, sync, rename, sync the folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError
from common.failpoint import failpoint


def make_folder(folder: Path) -> None:
    """Make a folder of the run with its parents; raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"RUN_DIR: the folder {folder} cannot be made: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file aside and rename it into place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill aside; when the block ends well it is synced and renamed to `path`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    kind = path.parent.name
    for file in sorted(found for found in aside.rglob("*") if found.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        failpoint(f"{kind}.{file.name}")
    for folder in (aside, *(found for found in aside.rglob("*") if found.is_dir())):
        sync_folder(folder)
    shutil.rmtree(path, ignore_errors=True)
    failpoint(f"{kind}.synced")
    aside.rename(path)
    failpoint(f"{kind}.renamed")
    sync_folder(path.parent)


def remove_asides(parent: Path) -> None:
    """Remove what a process that was killed was writing aside in this folder."""
    for left in parent.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
