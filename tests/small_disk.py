"""A file system so small that it is soon full."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """`folder` lies on it; `fill` takes all room that is left, `clear` gives it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def clear(self) -> None:
        self._ballast.unlink()


@contextmanager
def mounted(folder: Path, kib: int) -> Iterator[SmallDisk]:
    """A disk in memory; skips the test where mounting is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "small", str(folder)]
    try:
        result = subprocess.run(mount, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command for a small file system")
    if result.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {result.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Meanwhile(threading.Event):
    """An event to wait on: something happens during each wait, and no time passes."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        self._happens()
        return self.is_set()
