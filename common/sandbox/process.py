"""What runs inside a sandbox process: its limits at the start, then one function call after another.

Every error of a call is returned as text. An exception would have to be pickled, and an exception that
cannot be unpickled ends the whole pool.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from penstock.common.sandbox.user import become
from penstock.common.text import encodable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

OUT_OF_MEMORY = 77
"""Exit code of a sandbox process that met its memory limit."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_LONGEST_MISTAKE = 500


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and user of a sandbox process. A `uid` of -1 keeps the user of the parent process.

    `names` is a folder in which each process creates an empty file named by its process id.
    """

    memory_bytes: int
    processes: int
    uid: int
    gid: int
    names: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """The reason why a call has no result."""

    reason: str


def prepare(limits: Limits) -> None:
    """Set up a sandbox process: signals, limits, user, end with parent. Raise OSError if that fails."""
    # A SIGTERM to the process group is for the role, which finishes the calls in progress.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(limits.names) / str(os.getpid())).touch()
    os.setpgid(0, 0)  # so that the pool can kill all processes that a call started, by this group
    _limit(resource.RLIMIT_AS, limits.memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    if limits.uid >= 0:
        become(limits.uid, limits.gid)
        _limit(resource.RLIMIT_NPROC, limits.processes)  # this limit does not hold for root
    if sys.platform == "linux":  # after setuid, which resets these two
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)


def _limit(resource_number: int, value: int) -> None:
    """Set a resource limit, soft and hard, to `value` or to the present hard limit if that is lower."""
    hard = resource.getrlimit(resource_number)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(resource_number, (bound, bound))


def ready(memory_bytes: int) -> bool:
    """Return whether the new process uses less than a quarter of its memory limit."""
    return not _came_near(memory_bytes)


def call(memory_bytes: int, work: Callable[[*Ts], T], arguments: tuple[*Ts]) -> T | Mistake:
    """Return what `work` returns, or a Mistake with its exception as text.

    All processes that the call started are killed when it returns. If the process met its memory limit,
    or a quarter of it, the process ends with exit code OUT_OF_MEMORY.
    """
    own_pid = os.getpid()
    try:
        outcome: T | Mistake = work(*arguments)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # the code is not ours and may raise anything, SystemExit too
        outcome = Mistake(encodable(f"{type(error).__name__}: {error}"[:_LONGEST_MISTAKE]))
    if os.getpid() != own_pid:
        os._exit(0)  # `work` forked: only the sandbox process itself may send the result
    _clear_timers()
    _end_children()
    if _came_near(memory_bytes):
        os._exit(OUT_OF_MEMORY)
    return outcome


def _clear_timers() -> None:
    """Stop all interval timers. A timer left by one call would raise its signal in the next call."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    for number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)


def _end_children() -> None:
    """Kill all processes that the call started, those of other process groups included (on Linux).

    This process leaves its process group, kills the group, and makes a new group. On Linux, orphans
    become children of this process (see `prepare`), so a daemon is found among the children.
    """
    own = os.getpid()
    os.setpgid(0, os.getpgid(os.getppid()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(own, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    os.setpgid(0, 0)


def _children() -> list[int]:
    """Return the process ids of this process's children; an empty list where /proc has no such file."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found


def _came_near(memory_bytes: int) -> bool:
    """Return whether this process ever used more than a quarter of its memory limit.

    math_verify catches MemoryError and returns "wrong", so the error itself is not enough. A number or
    list that grows until MemoryError used about a third of the limit just before. An ordinary call uses
    far less than a quarter. Example: with a limit of 4 GiB a peak of 1.3 GiB counts as out of memory.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory_bytes / 4
