"""The limits of a sandbox process, and the signals that it handles."""

import ctypes
import os
import resource
import signal
import sys
from dataclasses import dataclass

from penstock.common.errors import ConfigError

OUT_OF_MEMORY = 77
"""Exit code of a sandbox process that met its memory limit."""
LONGEST_FILE = 2**30
"""Most bytes of a file that a sandbox process writes."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SYSTEM = ctypes.CDLL(None)  # opened here once, and not in every forked process


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and user of a sandbox process. A `uid` of -1 keeps the user of the parent process.

    A `processes` of 0 sets no limit: the limit counts all processes of a user.
    """

    memory_bytes: int
    processes: int
    uid: int
    gid: int


def set_limits(limits: Limits) -> None:
    """Set `limits` for this process and all that it starts. Raise OSError if the kernel refuses.

    Limited are address space (`memory_bytes`), files (1 GiB each), and, unless `processes` is 0, the
    processes of the user. Core dumps and, on Linux, message queues are forbidden. SIGXFSZ is ignored: a
    write over the limit fails with an error. A lower hard limit of this process holds instead. The user
    stays as it is.
    """
    _limit(resource.RLIMIT_AS, limits.memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, LONGEST_FILE)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_MSGQUEUE, 0)
    if limits.processes:
        _limit(resource.RLIMIT_NPROC, limits.processes)  # this limit does not hold for root
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit is an error, not the end


def leave_room(limits: Limits) -> None:
    """Let this process fill three quarters of its user's processes: the rest is for other calls.

    Raise OSError if the kernel refuses.
    """
    if limits.processes:
        _limit(resource.RLIMIT_NPROC, limits.processes * 3 // 4)


def _limit(resource_number: int, value: int) -> None:
    """Set the soft and hard limit of `resource_number`, such as RLIMIT_AS, to `value`.

    If the present hard limit is lower than `value`, both become that limit.
    """
    hard = resource.getrlimit(resource_number)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(resource_number, (bound, bound))


def allow_open_files(needed: int, setting: str) -> None:
    """Raise this process's soft limit of open files to `needed`, unless it is higher.

    Raise ConfigError, which says to lower `setting`, if the hard limit is under `needed`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if needed > hard != resource.RLIM_INFINITY:
        raise ConfigError(
            f"{setting} needs {needed} open files, and this machine's hard limit is {hard}: raise the "
            f"limit (ulimit -Hn), or lower {setting}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; without effect unless on Linux.

    A later change of user undoes this.
    """
    if sys.platform == "linux":
        _SYSTEM.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def ignore_polite_signals() -> None:
    """Let SIGTERM, SIGINT and SIGHUP do nothing in this process: the role ends it after its call.

    A handler does this and not SIG_IGN, which programs that a reward starts would inherit.
    """
    for number in _POLITE:
        signal.signal(number, _ignore)


def let_children_obey() -> None:
    """From now on let SIGTERM, SIGINT and SIGHUP, ignored here, end the processes that this one forks.

    A signal for which the code has set a handler keeps it.
    Otherwise a reward would wait until its time limit for a child that it has ended with
    `multiprocessing.Process.terminate`. During a fork the signals are blocked, until the child has its
    handlers: a signal that comes earlier would be lost.
    """

    def block() -> None:
        """Block SIGTERM, SIGINT and SIGHUP."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)

    def unblock() -> None:
        """Unblock SIGTERM, SIGINT and SIGHUP."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _POLITE)

    def obey() -> None:
        """Give SIGTERM, SIGINT and SIGHUP the default effect unless code set a handler; unblock all."""
        for number in _POLITE:
            if signal.getsignal(number) is _ignore:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=obey)


def _ignore(*_: object) -> None:
    """Do nothing: the handler of an ignored signal."""


def clear_timers() -> None:
    """Stop this process's interval timers of real, virtual and profiling time (setitimer).

    SIGALRM, SIGVTALRM and SIGPROF get their default effect. A timer left would signal in the next call.
    """
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    for number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)


def came_near(memory_bytes: int) -> bool:
    """Return True if this process's peak resident memory is over a quarter of its limit, `memory_bytes`.

    math_verify catches MemoryError and returns "wrong", so the error itself is not enough. A number or
    list that grows until MemoryError used about a third of the limit just before, an ordinary call far
    less than a quarter. Example: with a limit of 4 GiB a peak of 1.3 GiB counts as out of memory.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > memory_bytes / 4
