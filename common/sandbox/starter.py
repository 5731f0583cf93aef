"""Starts sandbox processes: nurseries, and keepers with a process that is ready to serve calls."""

import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace

from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.sandbox import frames
from penstock.common.sandbox.handle import Handle, Mistake, describe_status
from penstock.common.sandbox.limits import OUT_OF_MEMORY, Limits
from penstock.common.sandbox.nursery import Nursery
from penstock.common.sandbox.output import OutputLog
from penstock.common.sandbox.settings import Code, SandboxFailed, SandboxSettings
from penstock.common.sandbox.user import environment, unused_id, user_of

START_TIMEOUT_S = 60.0
"""Time for a process to start, in addition to the time limit of the work."""
STARTS = 5
"""Attempts to start a process that is killed before it is ready."""
_BUILT_IN_CALLS, _OWN_CALLS = 1000, 100
"""A process that is not forked for each call is replaced after this many: its caches grow."""

log = get_logger(__name__)


class Starter:
    """Starts the processes of the pool with these `settings`. __init__ starts none.

    Raise ConfigError if this machine has no user of the settings' name, or root lacks the capability to
    become that user.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._output = OutputLog()
        self._told: set[str] = set()
        self._nurseries: dict[bool, Nursery] = {}
        self._closed = False
        uid, gid = user_of(settings.user, f"{settings.section}_USER")
        processes = settings.most_processes if uid >= 0 else 0
        self._limits = Limits(int(settings.memory_gib * 2**30), processes, uid, gid)
        self._built_in_limits = self._limits
        if uid >= 0:  # a user's code could end each built-in process, and so the role
            self._built_in_limits = replace(self._limits, uid=unused_id(uid), gid=unused_id(gid))

    def close(self) -> None:
        """Kill the nurseries and wait for their end. The keepers end when their handles are ended.

        No process can be started afterwards.
        """
        with self._lock:
            self._closed = True
            for nursery in self._nurseries.values():
                nursery.close()
            self._nurseries.clear()

    def start(self, code: Code | None) -> Handle | Mistake:
        """Start a process and return its handle once it is ready, or for a user's `code` a Mistake.

        None is built-in code. If a process ends before it has run a user's code, another one is started,
        five in all; a process that signal 9 or an unknown cause ends while it imports that code is
        replaced once. A process has 60 s to prepare, then 60 s, or the time limit of a call for a user's
        code, to import its code. A Mistake says that the user's code was refused, failed, ended its
        process, was too slow or needs too much memory. Raise SandboxFailed if five processes ended
        before they ran any of it. For built-in code raise ConfigError for a too small memory limit or
        refused rights, SandboxFailed if a process is not ready in time.
        """
        replaced = False
        for _ in range(STARTS):
            handle = self._new_handle(code)
            if handle is None:
                continue
            try:
                outcome = self._await_ready(handle, code)
            except BaseException:  # also KeyboardInterrupt must leave no process behind
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
                killed = status in (None, -signal.SIGKILL)
                if replaced or not killed:
                    known = "unknown" if status is None else status
                    ended = f"ended its process (exit code {known})"
                    return Mistake(f"{code.source}: the import of this code {ended}", killed)
                replaced = True
        raise self.killed(code)

    def killed(self, code: Code | None) -> SandboxFailed:
        """Return the error that five processes for this code (None: built-in) ended before they ran it.

        So the code is not what ended them.
        """
        which = f"the process for {code.source}" if code else "a sandbox process"
        return SandboxFailed(
            f"{which} was killed {STARTS} times before it was ready: see in the system's log what kills "
            f"it. Free memory, or lower {self._settings.section}_WORKERS"
        )

    def _too_little_memory(self, code: Code | None) -> Mistake:
        """Return a Mistake that a user's `code` needs more memory than the limit of the settings.

        Raise ConfigError with that reason if `code` is None: built-in code.
        """
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
        """Start a process for `code` (None: built-in); return its handle before the process is ready.

        A nursery that does not run is started first. Return None if the nursery has ended meanwhile, or
        this object is closed.
        """
        keeper, their_keeper = socket.socketpair()
        control, their_control = socket.socketpair()
        output, their_output = os.pipe()
        asked = {
            "limits": asdict(self._limits if code else self._built_in_limits),
            "code": code.all if code else [],
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
        is_own = code is not None
        calls = _OWN_CALLS if is_own else _BUILT_IN_CALLS
        return Handle(keeper, control, output, self._output, calls, sweeps=is_own)

    def _nursery(self, is_built_in: bool) -> Nursery:
        """Return the nursery of built-in code if `is_built_in`, else that of users' code.

        A nursery that was not started, or has ended, is started first. The caller holds the lock. Raise
        OSError once this object is closed.
        """
        if self._closed:
            raise OSError("the pool is closed")
        nursery = self._nurseries.get(is_built_in)
        if nursery is None or not nursery.runs:
            if nursery is not None:
                nursery.close()
            warm = self._settings.built_in if is_built_in else ""
            variables = environment(self._settings.environment)
            nursery = self._nurseries[is_built_in] = Nursery(variables, self._settings.modules, warm)
        return nursery

    def _await_ready(self, handle: Handle, code: Code | None) -> Handle | Mistake | bool:
        """Wait until the process of `handle` is ready; return `handle` then.

        Return a Mistake if a user's `code` failed, was not imported within a call's time limit, or could
        not get its limits and rights. The caller ends a process that is not ready. If the process ended
        before, or wrote nonsense, return whether foreign code may have run in it. The keeper of a ready
        process is told to spare what the process has started. That the machine has no namespaces, or
        that calls of `code` cannot be forked, is logged once. Without a user's code (None) raise
        SandboxFailed if the process is not ready within 60 s for its rights and 60 s for its imports,
        ConfigError if it cannot give up its rights or has too little memory.
        """
        began, end = False, time.monotonic() + START_TIMEOUT_S
        try:
            while frame := handle.next_frame(end):
                if "refused" in frame and not began:
                    return self._refused(frames.short(frame["refused"]), code)
                if "prepared" in frame and not began:
                    began = True
                    self._tell_isolation(bool(frame.get("isolated")))
                    end = time.monotonic() + (self._settings.timeout_s if code else START_TIMEOUT_S)
                elif "failed" in frame and code is not None:
                    return Mistake(frames.short(frame["failed"]))
                elif "ready" in frame:
                    handle.settled()
                    self._tell_mode(frames.short(frame["ready"]), handle, code)
                    return handle
                else:
                    break
        except TimeoutError:
            if code is not None:
                limit_s = self._settings.timeout_s if began else START_TIMEOUT_S
                what = "this code" if began else "the packages of this code"
                return Mistake(f"{code.source}: the import of {what} took more than {limit_s:g} s")
            raise SandboxFailed(
                f"a sandbox process was not ready after {START_TIMEOUT_S:g} s: this machine is too "
                f"busy. Stop other programs, or lower {self._settings.section}_WORKERS."
            ) from None
        except (OSError, frames.BrokenFrame):  # the process has written nonsense, or ended
            pass
        return began

    def _refused(self, reason: str, code: Code | None) -> Mistake:
        """Return a Mistake for a user's `code` whose process sent `refused` before it ran any code.

        `reason` is the text of the exception: a MemoryError is told as too little memory, any other as a
        code that cannot be read. Raise ConfigError that tells the same if `code` is None: built-in code.
        """
        if reason.startswith("MemoryError"):
            return self._too_little_memory(code)
        if code is not None:
            return Mistake(f"{code.source} cannot be read: {reason}")
        setting = f"correct {self._settings.section}_USER, or the limits that this machine sets"
        raise ConfigError(f"a sandbox process cannot set its limits or rights: {reason}; {setting}")

    def _tell_isolation(self, isolated: bool) -> None:
        """If `isolated` is False, log once per pool that sandbox processes have no namespaces."""
        if not isolated:
            self._tell(
                "namespaces",
                "This machine allows no namespaces: sandbox processes see the other processes, and "
                "share /dev/shm.",
            )

    def _tell_mode(self, reason: str, handle: Handle, code: Code | None) -> None:
        """Note on `handle` whether its process forks for each call. For built-in code (None) do nothing.

        `reason` says why a user's `code` cannot be forked. With "" the handle's `forks` becomes True,
        and `calls_left` 2^62, so that the process is never replaced. Else the reason is logged, once per
        code.
        """
        if code is None:
            return
        if not reason:
            handle.forks, handle.calls_left = True, 2**62
            return
        self._tell(
            code.source,
            f"{code.source} has started {reason[:80]} on import: it gets a new process every "
            f"{_OWN_CALLS} calls, and not one for each call.",
        )

    def _tell(self, subject: str, line: str) -> None:
        """Log `line` unless this pool has logged a line on the same `subject` before."""
        with self._lock:
            is_new = subject not in self._told
            self._told.add(subject)
        if is_new:
            log.info(line)
