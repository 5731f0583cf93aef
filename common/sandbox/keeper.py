"""A keeper: the trusted process above one process that runs foreign code.

The keeper starts that process and kills whatever is left below it after each call. The keeper adopts
orphans, so that a daemon cannot leave its reach. The keeper runs no foreign code and keeps its rights.

Waits for: commands of the pool. Ends when: the pool closes the connection; the keeper kills all first.
"""

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Set
from typing import NoReturn

from penstock.common.guard import below
from penstock.common.sandbox import frames
from penstock.common.sandbox.isolation import empty_shared_memory, isolate
from penstock.common.sandbox.user import hide_memory

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_LONGEST_CHASE_S = 5.0
"""Time for killing processes that keep starting others. The pool then ends the keeper."""


def keep(
    connection: socket.socket, memory_bytes: int, start: Callable[[bool], None], given: list[int]
) -> NoReturn:
    """Be a keeper: fork a process that calls `start(isolated)`, serve the pool's commands, exit with 0.

    `isolated` says whether the process has namespaces of its own; its /dev/shm holds a quarter of
    `memory_bytes`. `connection` brings the commands. `settled` spares what the process has started by
    now. `sweep` kills all other processes below, and answers whether nothing is left. `end`, or a closed
    connection, kills all; the answer is the process's exit status. The descriptors `given` are closed
    here: the process below has them. This process adopts orphans, and hides its memory.
    """
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    isolated, shared_memory = isolate(memory_bytes)
    hide_memory()
    pid = os.fork()
    if pid == 0:
        connection.close()
        if shared_memory >= 0:
            os.close(shared_memory)
        start(isolated)
        os._exit(0)
    for number in given:
        os.close(number)
    Keeper(connection, pid, shared_memory).serve()
    os._exit(0)


class Keeper:
    """Serves the pool's commands, which come on `connection`: kills what is below this process.

    The child `pid` is spared until the end, and after the command `settled` what it had started until
    then. `shared_memory` is the descriptor of the child's own /dev/shm, which is emptied after each
    kill; -1 without one.
    """

    def __init__(self, connection: socket.socket, pid: int, shared_memory: int) -> None:
        self._connection = connection
        self._pid = pid
        self._shared_memory = shared_memory
        self._kept = {pid}
        self._status: int | None = None

    def serve(self) -> None:
        """Serve commands until `end`, or until the pool is gone; then kill all and send the exit status.

        `settled` spares all processes below from later sweeps, and answers {"settled": True}. `sweep`
        kills the others, and answers {"clean": True} if nothing of them is left, else {"clean": False}.
        The last frame is {"status": exit status of process `pid`}, None if unknown.
        """
        with contextlib.suppress(EOFError, OSError):
            while (command := frames.receive(self._connection)) != "end":
                if command == "settled":
                    self._kept |= set(below(os.getpid()))
                    frames.send(self._connection, {"settled": True})
                else:
                    frames.send(self._connection, {"clean": self._sweep(self._kept)})
        with contextlib.suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self._pid, signal.SIGKILL)
        self._sweep(set())
        with contextlib.suppress(OSError):
            frames.send(self._connection, {"status": self._status})

    def _sweep(self, kept: Set[int]) -> bool:
        """Kill all processes below this one except the ids `kept`, and then empty their /dev/shm.

        Return True if no such process is left, False if some are after 5 s. With a /dev/shm of their own
        also return False if a System V object (shared memory, semaphore, queue) is left. A process
        whose parent ends while the list is made is missing from the list: so none is left only if
        two lists in a row are the same, and each has none but ended processes.
        """
        end = time.monotonic() + _LONGEST_CHASE_S
        before: set[int] | None = None
        while time.monotonic() < end:
            self._reap()
            found = set(below(os.getpid())) - kept
            living = [pid for pid in found if not _is_zombie(pid)]
            if not living and found == before:
                return self._shared_memory < 0 or empty_shared_memory(self._shared_memory)
            before = None if living else found
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if living:
                time.sleep(0.0005)
        return False

    def _reap(self) -> None:
        """Collect all ended children; if `_pid` is one of them, store its exit status in `_status`.

        The status is -9 for a process that signal 9 ended.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._status = os.waitstatus_to_exitcode(status)


def _is_zombie(pid: int) -> bool:
    """Return True if process `pid` is gone, or has ended with all threads and is not collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        return state in "ZX" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True
