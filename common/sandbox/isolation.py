"""Namespaces of a keeper: its own process ids, /dev/shm, /proc and System V memory."""

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

from penstock.common.sandbox.user import hide_memory

_SEPARATE = {"pid": 0x20000000, "ipc": 0x08000000, "mounts": 0x00020000}  # CLONE_NEW... of clone(2)
_NEW_USER = 0x10000000
_PRIVATE, _SAFE = 0x40000 | 0x4000, 0x2 | 0x4 | 0x8  # MS_PRIVATE, MS_REC; MS_NOSUID, NODEV, NOEXEC
_SHARED_MEMORY = "/dev/shm"


def isolate(memory_bytes: int) -> int:
    """Separate this process's later children from all other processes; return a descriptor of /dev/shm.

    Return -1 where the kernel does not allow that. Without the right to make namespaces this process
    first makes a user namespace, in which it keeps its user. The new /dev/shm holds at most a quarter of
    `memory_bytes`.
    """
    system = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    flags = sum(_SEPARATE.values())
    try:
        if system.unshare(flags) != 0:
            if system.unshare(flags | _NEW_USER) != 0:
                return -1
            hide_memory(False)  # else these files would belong to root
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        options = f"mode=1777,size={memory_bytes // 4}".encode()
        if system.mount(None, b"/", None, _PRIVATE, None) == 0:
            system.mount(b"tmpfs", _SHARED_MEMORY.encode(), b"tmpfs", _SAFE, options)
        return os.open(_SHARED_MEMORY, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, AttributeError):  # AttributeError: a system without these calls
        return -1


def hide_processes() -> None:
    """Mount a /proc that shows only the processes of this namespace; keep the old one if refused."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_SEPARATE["mounts"]) == 0:
        system.mount(b"proc", b"/proc", b"proc", _SAFE, None)


def empty_shared_memory(folder: int) -> bool:
    """Remove all in the isolated /dev/shm; return whether no System V memory or semaphore is left.

    `folder` is the descriptor that `isolate` returned. No process that could change the folder runs.
    """
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except (IsADirectoryError, PermissionError):
                shutil.rmtree(name, dir_fd=folder)
    kinds = (Path("/proc/sysvipc") / kind for kind in ("shm", "sem", "msg"))
    return all(len(kind.read_text().splitlines()) <= 1 for kind in kinds if kind.exists())
