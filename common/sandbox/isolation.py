"""Namespaces of a keeper: its own process ids, /dev/shm, /proc and System V memory."""

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

_MOST_SHARED_FILES = 10_000
_SEPARATE = {"pid": 0x20000000, "ipc": 0x08000000, "mounts": 0x00020000}  # CLONE_NEW... of clone(2)
_PRIVATE, _SAFE = 0x40000 | 0x4000, 0x2 | 0x4 | 0x8  # MS_PRIVATE, MS_REC; MS_NOSUID, NODEV, NOEXEC
_SHARED_MEMORY = "/dev/shm"


def isolate(memory_bytes: int) -> tuple[bool, int]:
    """Separate this process's later children from all others: new namespaces of pids, IPC and mounts.

    Return whether the kernel allows that, and a descriptor of a new, empty /dev/shm, which holds at most
    a quarter of `memory_bytes`; -1 if it could not be mounted. Namespaces need CAP_SYS_ADMIN, which root
    in a container lacks.
    """
    system = ctypes.CDLL(None, use_errno=True)
    if not hasattr(system, "unshare") or system.unshare(sum(_SEPARATE.values())) != 0:
        return False, -1
    options = f"mode=1777,nr_inodes={_MOST_SHARED_FILES},size={memory_bytes // 4}".encode()
    if system.mount(None, b"/", None, _PRIVATE, None) != 0:
        return True, -1
    if system.mount(b"tmpfs", _SHARED_MEMORY.encode(), b"tmpfs", _SAFE, options) != 0:
        return True, -1
    return True, os.open(_SHARED_MEMORY, os.O_RDONLY | os.O_DIRECTORY)


def hide_processes() -> None:
    """Mount, for this process and its children alone, a /proc with the processes of their pid namespace.

    The old /proc stays, without an error, if the kernel refuses.
    """
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_SEPARATE["mounts"]) == 0:
        system.mount(b"proc", b"/proc", b"proc", _SAFE, None)


def empty_shared_memory(folder: int) -> bool:
    """Remove all in /dev/shm, whose descriptor is `folder`; what cannot be removed stays, with no error.

    Return True if this namespace has no System V shared memory, semaphore or message queue. The caller
    has ended every process that could change the folder.
    """
    for name in os.listdir(folder):
        with contextlib.suppress(OSError, RecursionError):
            try:
                os.unlink(name, dir_fd=folder)
            except (IsADirectoryError, PermissionError):
                shutil.rmtree(name, dir_fd=folder)
    kinds = (Path("/proc/sysvipc") / kind for kind in ("shm", "sem", "msg"))
    return all(len(kind.read_text().splitlines()) <= 1 for kind in kinds if kind.exists())
