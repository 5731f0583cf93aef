"""A process that kills a role's children when the role was killed with kill -9.

vLLM's engine processes outlive a killed actor, with all their memory, and so do scoring processes. A
role therefore starts a guard, which notices the role's end (the role's end of a pipe closes), and kills
what the role left: processes with its variable, and those that the guard saw below the role.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "PENSTOCK_GUARD"
"""The variable that marks a role and its descendants. The mark misses a program that overwrites it."""

_NAME = "penstock.common.guard"
"""In the command line of every guard."""

_CHECK_EVERY_S = 1.0
_LAST_CHECKS = (0.0, 0.2)
"""Waits in seconds before each search for MARK: a just forked process shows its parent's environment."""


def guard_children() -> None:
    """Start a guard process, which kills all descendants of this process once this one has ended.

    The environment of this process gets PENSTOCK_GUARD, a random mark for all later descendants. Killed
    are those with the mark, and those that the guard saw below this process, once per second. The guard
    runs from its file with -P: a folder in the working directory or on PYTHONPATH that has the guard's
    name would be run instead, and the children would live on silently.
    """
    os.environ[MARK] = uuid.uuid4().hex
    command = [sys.executable, "-P", __file__, _NAME, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _watch(pid: int) -> None:
    """Wait without limit until the parent `pid` has ended (stdin closes), then kill what it left.

    Killed, but for guards, are descendants that were seen, once per second, and processes with this
    guard's mark PENSTOCK_GUARD, searched for at once and 0.2 s later. Exit with code 1 without the mark.
    SIGINT, SIGTERM and SIGHUP are ignored: who sends them to all processes sends them to the role too.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if MARK not in os.environ:
        sys.exit(f"guard: the variable {MARK} is not set; a guard is started by guard_children() alone")
    seen, gone = set[psutil.Process](), False
    while not gone:
        if pid == os.getppid():
            for child in below(pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen.add(psutil.Process(child))
            seen = {process for process in seen if process.is_running()}
        gone = bool(select.select([sys.stdin], [], [], _CHECK_EVERY_S)[0])
    _kill(seen)
    for wait_s in _LAST_CHECKS:
        time.sleep(wait_s)
        _kill(filter(_is_marked, psutil.process_iter()))


def below(pid: int) -> list[int]:
    """Return the ids of all descendants of the process `pid`: children, their children, and so on.

    The order is not fixed. A process without descendants, or that has ended, gives []. Where
    /proc/thread-self/children is missing, a process that has ended raises psutil.NoSuchProcess.
    """
    if not os.path.exists("/proc/thread-self/children"):  # these lists spare reading all of /proc
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found: list[int] = []
    waiting = [pid]
    while waiting:
        tasks = f"/proc/{waiting.pop()}/task"
        with contextlib.suppress(OSError):  # a process or thread that has just ended
            for task in os.listdir(tasks):
                children = [int(word) for word in Path(tasks, task, "children").read_text().split()]
                found += children
                waiting += children
    return found


def _is_marked(process: psutil.Process) -> bool:
    """Return whether `process` has this process's value of PENSTOCK_GUARD (MARK) in its environment.

    The result is False if the process has ended or its environment cannot be read. This process must
    have the variable.
    """
    try:
        return bool(process.environ().get(MARK) == os.environ[MARK])
    except psutil.Error:  # the process has ended, or belongs to another user
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to `processes`, except guards: each guard has to kill its own role's children.

    A process that has ended or belongs to another user is left out without an error.
    """
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if _NAME not in process.cmdline():
                process.kill()  # psutil refuses a process id that was given to another process since


if __name__ == "__main__":
    _watch(int(sys.argv[2]))
