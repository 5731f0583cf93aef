"""A pool of sandbox processes, so that no call can stop the process that makes it.

A call that hangs is killed at its time limit; a call that crashes or uses up the memory ends only its
own process. Model text does this to verifiers: math_verify never ends with `9^{9^{9^{9}}}`.

    pool -> nursery (trusted, fresh) -> keeper (trusted) -> process (no rights) -> one process per call
"""

import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from penstock.common.errors import ConfigError, PenstockError
from penstock.common.log import get_logger
from penstock.common.sandbox import frames
from penstock.common.sandbox.handle import Handle, Mistake, Outcome, ProcessGone, describe_status
from penstock.common.sandbox.limits import OUT_OF_MEMORY, Limits
from penstock.common.sandbox.nursery import Nursery
from penstock.common.sandbox.output import OutputLog
from penstock.common.sandbox.user import environment, user_of
from penstock.common.text import printable

START_TIMEOUT_S = 60.0
"""Time for a process to start, in addition to the time limit of the work."""

_BUILT_IN_CALLS, _OWN_CALLS = 1000, 100
"""A process that is not forked for each call is replaced after this many: its caches grow."""
_STARTS = 5
"""Attempts to start a process that is killed before it is ready."""
_CHILDREN = 64
"""Processes and threads that calls may start. Only a user of its own can be held to this limit."""
_MOST_CODES = 8
"""Codes of which a slot keeps a process. The one that was used longest ago is ended for another one."""

log = get_logger(__name__)


class SandboxFailed(PenstockError):
    """A sandbox process could not be started because something killed it at every attempt."""


class Code(NamedTuple):
    """A user's code: where it is, and the digest that it must have."""

    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Size and limits of a pool.

    `environment` names variables that the processes inherit beside PATH and the like. `modules` are
    imported before any process starts. `built_in` names a function, "package.module:function", that is
    called before calls without a user's code are served, and imports all that they need. `load` names
    the function that imports a user's code, called with source and digest. `section` is the prefix of
    the settings in error messages: with "REWARDER", a call without enough memory names
    REWARDER_MEMORY_GIB.
    """

    workers: int
    timeout_s: float
    memory_gib: float
    user: str
    environment: tuple[str, ...]
    modules: tuple[str, ...]
    built_in: str
    load: str
    section: str


class SandboxPool:
    """`workers` sandbox processes, ready after __init__; `run` may be called from as many threads.

    Use the pool as a context, which kills the processes at its end. Raise ConfigError if the user does
    not exist or the memory limit is too low, SandboxFailed if the start failed otherwise.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self.finished = 0
        self._settings = settings
        self._lock = threading.Lock()
        self._output = OutputLog()
        self._told: set[str] = set()
        self._nurseries: dict[bool, Nursery] = {}
        uid, gid = user_of(settings.user, f"{settings.section}_USER")
        processes = settings.workers + _CHILDREN if uid >= 0 else 0
        self._limits = Limits(int(settings.memory_gib * 2**30), processes, uid, gid)
        self._idle: queue.LifoQueue[dict[Code | None, Handle]] = queue.LifoQueue()
        self._start_processes()

    def __enter__(self) -> Self:
        """Return this pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes as `close` does."""
        self.close()

    def run(self, work: str, *arguments: Any, code: Code | None = None) -> Any | Mistake:
        """Call the function `work`, "package.module:function", in a process; return its result.

        With a `code`, the process has imported only that, and ends after the call. Arguments and result
        are JSON; the caller has to check the result. A Mistake holds the exception of `work` as text, or
        says that the call took too long, needed too much memory, or ended its process. Raise
        SandboxFailed if no process without a user's code can be started.
        """
        try:
            request = frames.pack({"work": work, "arguments": arguments})
        except (TypeError, ValueError, RecursionError) as error:
            return Mistake(f"the arguments are no JSON: {error}")
        slot = self._idle.get()
        try:
            outcome = self._run_in(slot, request, code)
        finally:
            self._idle.put(slot)
            with self._lock:
                self.finished += 1
        return outcome if isinstance(outcome, Mistake) else self._result(outcome)

    def close(self) -> None:
        """Kill all idle processes. Closing twice does no harm; a later `run` waits for ever."""
        for slot in [self._idle.get() for _ in range(self._idle.qsize())]:
            for handle in slot.values():
                handle.end()
        with self._lock:
            for nursery in self._nurseries.values():
                nursery.close()
            self._nurseries.clear()

    def _start_processes(self) -> None:
        """Start all processes and wait for all. If one fails, kill all and raise its error."""
        count = self._settings.workers
        with ThreadPoolExecutor(count) as threads:
            starts = [threads.submit(self._start, None) for _ in range(count)]
        for start in starts:
            if start.exception() is None:
                handle = start.result()
                assert isinstance(handle, Handle), "only a user's code can fail to be imported"
                self._idle.put({None: handle})
        if self._idle.qsize() < count:
            self.close()
        for start in starts:
            start.result()

    def _result(self, outcome: Outcome) -> Any | Mistake:
        """Return the result in an outcome, or a Mistake."""
        if outcome is None:
            return Mistake(f"took more than {self._settings.timeout_s:g} s")
        if isinstance(outcome, str):
            return Mistake(outcome)
        if isinstance(outcome, int):
            return Mistake(describe_status(outcome, self._settings.section, self._settings.memory_gib))
        if isinstance(mistake := outcome.get("mistake"), str):
            return Mistake(frames.short(mistake))
        if outcome.keys() != {"value"}:
            return Mistake("sent an answer without a result")
        return outcome["value"]

    def _run_in(
        self, slot: dict[Code | None, Handle], request: bytes, code: Code | None
    ) -> Outcome | Mistake:
        """Make a call in the slot's process for this code, which is started first if there is none."""
        for _ in range(_STARTS):
            handle: Handle | Mistake | None = slot.pop(code, None)
            if handle is None:
                handle = self._start(code)
            if isinstance(handle, Mistake):
                return handle
            try:
                return handle.call(request, self._settings.timeout_s)
            except ProcessGone:
                handle.usable = False
            finally:
                if handle.usable and handle.calls_left > 0:
                    slot[code] = handle  # as the last one
                    self._forget_oldest(slot)
                else:
                    handle.end()
        return self._never_ready(code)

    def _forget_oldest(self, slot: dict[Code | None, Handle]) -> None:
        """End the process of the code that was used longest ago, if there are too many."""
        own = [code for code in slot if code is not None]
        if len(own) > _MOST_CODES:
            slot.pop(own[0]).end()

    def _start(self, code: Code | None) -> Handle | Mistake:
        """Return a process that is ready, after at most _STARTS attempts.

        A process that is killed before it is ready was killed from outside, so another one is started.
        Return a Mistake if the user's code cannot be imported. Raise ConfigError if the memory limit is
        too small or the settings are refused. Raise SandboxFailed if a process is not ready in time, or
        was killed at every attempt.
        """
        for _ in range(_STARTS):
            handle = self._new_handle(code)
            if handle is None:
                continue
            try:
                outcome = self._await_ready(handle, code)
            except BaseException:
                handle.end()
                raise
            if isinstance(outcome, Handle):
                return outcome
            status = handle.end()
            if isinstance(outcome, Mistake):
                return outcome
            if status == OUT_OF_MEMORY:
                return self._too_little_memory(code)
            if code is not None and outcome:
                return Mistake(f"{code.source}: the import of this code {_ended(status)}")
        return self._never_ready(code)

    def _never_ready(self, code: Code | None) -> Mistake:
        """Return a Mistake for a user's code whose process never lives; else raise SandboxFailed."""
        text = f"was killed {_STARTS} times before it was ready"
        if code is not None:
            return Mistake(f"{code.source}: the process with this code {text}")
        raise SandboxFailed(
            f"a sandbox process {text}: free memory, or lower {self._settings.section}_WORKERS"
        )

    def _too_little_memory(self, code: Code | None) -> Mistake:
        """Return a Mistake for a user's code that needs too much memory; else raise ConfigError."""
        setting = f"{self._settings.section}_MEMORY_GIB"
        if code is not None:
            return Mistake(
                describe_status(OUT_OF_MEMORY, self._settings.section, self._settings.memory_gib)
            )
        raise ConfigError(
            f"a sandbox process does not start with {self._settings.memory_gib:g} GiB of memory: "
            f"raise {setting}"
        )

    def _new_handle(self, code: Code | None) -> Handle | None:
        """Return a process that is starting; None if its nursery has just ended."""
        keeper, their_keeper = socket.socketpair()
        control, their_control = socket.socketpair()
        output, their_output = os.pipe()
        asked = {
            "limits": asdict(self._limits),
            "code": code,
            "load": self._settings.load,
            "user": self._settings.user if self._limits.uid >= 0 else "",
            "setting": f"{self._settings.section}_USER",
        }
        numbers = [their_keeper.fileno(), their_control.fileno(), their_output]
        try:
            with self._lock:
                self._nursery(is_built_in=code is None).start(asked, numbers)
        except OSError:
            for connection in (keeper, control):
                connection.close()
            os.close(output)
            return None
        finally:
            their_keeper.close()
            their_control.close()
            os.close(their_output)
        return Handle(keeper, control, output, self._output, _OWN_CALLS if code else _BUILT_IN_CALLS)

    def _nursery(self, is_built_in: bool) -> Nursery:
        """Return the nursery of built-in or of users' code, started first if it does not run."""
        nursery = self._nurseries.get(is_built_in)
        if nursery is None or not nursery.runs:
            if nursery is not None:
                nursery.close()
            warm = self._settings.built_in if is_built_in else ""
            variables = environment(self._settings.environment)
            nursery = self._nurseries[is_built_in] = Nursery(variables, self._settings.modules, warm)
        return nursery

    def _await_ready(self, handle: Handle, code: Code | None) -> Handle | Mistake | bool:
        """Return the handle when its process is ready, or a Mistake of the user's code.

        If the process ended before, return whether foreign code had run in it. Raise as `_start`.
        """
        began = False
        try:
            while frame := handle.next_frame(self._settings.timeout_s if began else START_TIMEOUT_S):
                if "refused" in frame and not began:
                    return self._refused(frames.short(frame["refused"]), code)
                if "prepared" in frame and not began:
                    began = True
                    self._tell_isolation(bool(frame.get("isolated")))
                if "failed" in frame and code is not None:
                    return Mistake(frames.short(frame["failed"]))
                if "ready" in frame:
                    handle.settled()
                    self._tell_mode(printable(frames.short(frame["ready"])), handle, code)
                    return handle
        except TimeoutError:
            if began and code is not None:
                limit = f"took more than {self._settings.timeout_s:g} s"
                return Mistake(f"the import of {code.source} {limit}")
            raise SandboxFailed(
                f"a sandbox process was not ready after {START_TIMEOUT_S:g} s: this machine is too "
                f"busy. Stop other programs, or lower {self._settings.section}_WORKERS."
            ) from None
        except (OSError, frames.BrokenFrame):  # the process has written nonsense, or ended
            pass
        return began

    def _refused(self, reason: str, code: Code | None) -> Mistake:
        """Return or raise the reason why a process could not take its limits or read its code."""
        if reason.startswith("MemoryError"):
            return self._too_little_memory(code)
        if code is not None:
            return Mistake(f"{code.source} cannot be read: {reason}")
        raise ConfigError(f"a sandbox process cannot give up its rights on this machine: {reason}")

    def _tell_isolation(self, isolated: bool) -> None:
        """Log once if processes are not separated by namespaces."""
        if not isolated:
            self._tell(
                "This machine allows no namespaces: sandbox processes see the other processes, and "
                "share /dev/shm."
            )

    def _tell_mode(self, reason: str, handle: Handle, code: Code | None) -> None:
        """Log once per code if its process is not forked for each call, and why."""
        if code is None:
            return
        if not reason:
            handle.calls_left = 2**62
            return
        self._tell(
            f"{code.source} has started {reason[:80]} on import: it gets a new process every "
            f"{_OWN_CALLS} calls, and not one for each call."
        )

    def _tell(self, line: str) -> None:
        """Log a line unless this pool has logged the same line before."""
        with self._lock:
            is_new = line not in self._told
            self._told.add(line)
        if is_new:
            log.info(line)


def _ended(status: int | None) -> str:
    """Return how a process ended, for an error."""
    return "ended its process" + ("" if status is None else f" (exit code {status})")
