"""kill -9 leaves children behind; this makes them follow.

vLLM's engine processes outlive an actor that is killed, with all their memory, and so do scoring
workers. A role therefore starts a guard: a small process that knows when the role is gone for whatever
reason (its end of the pipe closes), and kills what is left of it. It knows programs by a variable in the
environment that they inherited, and what has another environment or was merely forked by having seen it.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable

import psutil

MARK = "PENSTOCK_GUARD"
"""The variable by which a guard knows whom to kill; a program that writes over its environment hides."""

_LOOK_EVERY_S = 1.0
_LAST_LOOKS = (0.0, 0.2)
"""Seconds before each look for marked processes: one that was just forked has its parent's mark yet."""


def guard_children() -> None:
    """Have every descendant that begins from now on killed once this process is gone."""
    os.environ[MARK] = uuid.uuid4().hex
    subprocess.Popen(
        [sys.executable, "-m", "penstock.common.guard", str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _watch(pid: int) -> None:
    if MARK not in os.environ:
        sys.exit("guard: there is nothing to guard; it is started by guard_children()")
    seen: set[psutil.Process] = set()
    gone = False
    while not gone:
        if pid == os.getppid():
            with contextlib.suppress(psutil.NoSuchProcess):
                seen |= set(psutil.Process(pid).children(recursive=True))
        gone = bool(select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0])
    _kill(seen)
    for wait_s in _LAST_LOOKS:
        time.sleep(wait_s)
        _kill(filter(_is_marked, psutil.process_iter()))


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:  # gone, or another user's
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kill all but guards, which end with their role: a role's children have their own."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if "penstock.common.guard" not in process.cmdline():
                process.kill()  # psutil refuses a process id that was given to another process since


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
