"""kill -9 leaves children behind; this makes them follow.

vLLM's engine processes outlive an actor that is killed, with all their memory, and so do scoring
workers. A role therefore starts a guard: a small process that watches the role's children and, when
the role is gone for whatever reason (its end of the pipe closes), kills what is left of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

import psutil

_LOOK_EVERY_S = 1.0


def guard_children() -> None:
    """Have every descendant of this process killed once this process is gone."""
    subprocess.Popen(
        [sys.executable, "-m", "common.guard", str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _watch(pid: int) -> None:
    if pid != os.getppid():
        sys.exit(f"guard: process {pid} is not my parent; it is started by guard_children()")
    seen: set[psutil.Process] = set()
    gone = False
    while not gone:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= set(psutil.Process(pid).children(recursive=True))
        gone = bool(select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0])
    for process in seen - {psutil.Process()}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil refuses a process id that was given to another process since


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
