"""A pool of sandbox processes, so that no call can stop the process that makes it.

A call that hangs is killed at its time limit; a call that crashes or uses up the memory ends only its
own process. Model text does this to verifiers: math_verify never ends with `9^{9^{9^{9}}}`.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar, TypeVarTuple

import pebble

from penstock.common.errors import ConfigError, PenstockError
from penstock.common.sandbox.process import OUT_OF_MEMORY, Limits, Mistake, call, prepare, ready
from penstock.common.sandbox.user import start_fork_server, user_of

START_TIMEOUT_S = 60.0
"""Time for a process to start and to receive its work, in addition to the time limit of the work."""

_CALLS_PER_PROCESS = 1000
"""A process is replaced after this many calls: caches grow (sympy's), and use up its memory limit."""
_STARTS = 5
"""Attempts to start a process that is killed before it is ready."""
_CHILDREN = 64
"""Processes and threads that calls may start. Only a user of its own can be held to this limit."""

# A fork server has imported the modules already, so the replacement of a killed process starts at once.
_CONTEXT = multiprocessing.get_context("forkserver")

# Sandbox processes ignore SIGTERM; by default pebble would wait 3 s before it sends SIGKILL.
pebble.CONSTS.term_timeout = 0.1

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SandboxFailed(PenstockError):
    """A sandbox process could not be started because something killed it at every attempt."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Size and limits of a pool.

    `environment` names variables that the processes inherit beside PATH and the like. `preload` names
    modules that are imported before a process starts. `section` is the prefix of the settings in error
    messages: with "REWARDER", a call without enough memory names REWARDER_MEMORY_GIB.
    """

    workers: int
    timeout_s: float
    memory_gib: float
    user: str
    environment: tuple[str, ...]
    preload: tuple[str, ...]
    section: str


class SandboxPool:
    """`workers` sandbox processes, ready after __init__; `run` may be called from as many threads.

    Use the pool as a context, which kills the processes at its end. Each process is a pebble pool of its
    own: a pebble pool that loses an idle worker is broken as a whole. Raise ConfigError if the user does
    not exist or the memory limit is too low, SandboxFailed if the start failed otherwise.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self.finished = 0
        self._settings = settings
        self._memory_bytes = int(settings.memory_gib * 2**30)
        self._idle: queue.LifoQueue[pebble.ProcessPool] = queue.LifoQueue()
        self._count = threading.Lock()
        self._names = tempfile.TemporaryDirectory(prefix="penstock-sandbox-")
        uid, gid = user_of(settings.user, f"{settings.section}_USER")
        processes = settings.workers + _CHILDREN
        self._limits = Limits(self._memory_bytes, processes, uid, gid, self._names.name)
        self._start_processes()

    def __enter__(self) -> Self:
        """Return this pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes as `close` does."""
        self.close()

    def run(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T | Mistake:
        """Call `work` in the first process that is free; return its result, or a Mistake.

        A Mistake holds the exception of `work` as text, or says that the call took too long, needed too
        much memory, or ended its process. `work`, `arguments` and the result are pickled: raise what
        pickle raises if that is impossible.
        """
        process = self._idle.get()
        try:
            if not process.active:
                _kill(process)
                process = self._new_process()
            return self._run_in(process, work, arguments)
        finally:
            self._idle.put(process)
            with self._count:
                self.finished += 1

    def close(self) -> None:
        """Kill all idle processes. Closing twice does no harm; a later `run` waits for ever."""
        processes = [self._idle.get() for _ in range(self._idle.qsize())]
        for process in processes:
            _stop(process)
        for process in processes:
            process.join()
        self._end_strays()

    def _start_processes(self) -> None:
        """Start all processes and wait for all. If one fails, kill all and raise its error."""
        start_fork_server(_CONTEXT, self._settings.environment, self._settings.preload)
        count = self._settings.workers
        with ThreadPoolExecutor(count) as threads:
            starts = [threads.submit(self._start_process) for _ in range(count)]
        for start in starts:
            if start.exception() is None:
                self._idle.put(start.result())
        if self._idle.qsize() < count:
            self.close()
        for start in starts:
            start.result()

    def _start_process(self) -> pebble.ProcessPool:
        """Return a process that is ready, after at most _STARTS attempts.

        A process that is killed before it is ready was killed from outside, so another one is started.
        Raise ConfigError if the memory limit is too small. Raise SandboxFailed if a process is not ready
        in time, or was killed at every attempt.
        """
        for _ in range(_STARTS):
            process = self._new_process()
            try:
                fits = process.schedule(ready, args=(self._memory_bytes,)).result(START_TIMEOUT_S)
            except TimeoutError:
                _kill(process)
                raise SandboxFailed(
                    f"a sandbox process was not ready after {START_TIMEOUT_S:g} s: this machine is too "
                    f"busy. Stop other programs, or lower {self._settings.section}_WORKERS."
                ) from None
            except (pebble.ProcessExpired, RuntimeError):
                _kill(process)
                continue
            if fits:
                return process
            _kill(process)
            raise ConfigError(
                f"a sandbox process does not start with {self._settings.memory_gib:g} GiB of memory: "
                f"raise {self._settings.section}_MEMORY_GIB"
            )
        raise SandboxFailed(
            f"a sandbox process was killed {_STARTS} times before it was ready: free memory, or lower "
            f"{self._settings.section}_WORKERS"
        )

    def _run_in(
        self, process: pebble.ProcessPool, work: Callable[[*Ts], T], arguments: tuple[*Ts]
    ) -> T | Mistake:
        """Return the result of `work`, or a Mistake if it or the process failed. Raise as `run`."""
        timeout_s, call_arguments = self._settings.timeout_s, (self._memory_bytes, work, arguments)
        try:
            future = process.schedule(call, args=call_arguments, timeout=timeout_s)
            outcome: T | Mistake = future.result(timeout_s + START_TIMEOUT_S)
            return outcome
        except TimeoutError:
            if not future.done():  # the task was lost on its way: this pool is not to be used again
                _stop(process)
            self._end_strays()
            return Mistake(f"took more than {timeout_s:g} s")
        except (pebble.ProcessExpired, RuntimeError) as error:  # pebble's errors for a dead process
            self._end_strays()
            return Mistake(self._cause_of_death(getattr(error, "exitcode", None)))

    def _cause_of_death(self, exit_code: int | None) -> str:
        """Return the text of a Mistake about a process that ended with this exit code."""
        if exit_code == OUT_OF_MEMORY:
            setting = f"{self._settings.section}_MEMORY_GIB={self._settings.memory_gib:g}"
            return f"needs more memory than {setting} allows"
        return f"killed its process (exit code {exit_code})"

    def _new_process(self) -> pebble.ProcessPool:
        """Return a process that is starting. Start the fork server again if that has ended."""
        start_fork_server(_CONTEXT, self._settings.environment, self._settings.preload)  # if it died
        return pebble.ProcessPool(1, _CALLS_PER_PROCESS, prepare, (self._limits,), _CONTEXT)

    def _end_strays(self) -> None:
        """Kill the processes that ended sandbox processes left behind in their process groups."""
        for path in Path(self._names.name).iterdir():
            pid = int(path.name)
            if not _is_alive(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    """Return whether a process of this id runs that this process may signal."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the id may meanwhile be of another user's process
        return False
    return True


def _kill(process: pebble.ProcessPool) -> None:
    """Kill a process and wait until it has ended."""
    _stop(process)
    process.join()


def _stop(process: pebble.ProcessPool) -> None:
    """Begin to kill a process; its call in progress ends as an error."""
    process.stop()  # type: ignore[no-untyped-call]
