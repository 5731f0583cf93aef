"""Starts sandbox processes: nurseries, and keepers with a process that is ready to serve calls."""

import os
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
    """Starts the processes of one pool. Raise ConfigError if the settings name a wrong user."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._output = OutputLog()
        self._told: set[str] = set()
        self._nurseries: dict[bool, Nursery] = {}
        uid, gid = user_of(settings.user, f"{settings.section}_USER")
        processes = settings.most_processes if uid >= 0 else 0
        self._limits = Limits(int(settings.memory_gib * 2**30), processes, uid, gid)
        self._built_in_limits = self._limits
        if uid >= 0:  # a user's code could end each built-in process, and so the role
            self._built_in_limits = replace(self._limits, uid=unused_id(uid), gid=unused_id(gid))

    def close(self) -> None:
        """End the nurseries. The keepers end when their handles are ended."""
        with self._lock:
            for nursery in self._nurseries.values():
                nursery.close()
            self._nurseries.clear()

    def start(self, code: Code | None) -> Handle | Mistake:
        """Return a process that is ready, after at most STARTS attempts.

        A process that is killed before it is ready was killed from outside, so another one is started.
        Raise ConfigError for a too small memory limit or refused settings, SandboxFailed if a process is
        not ready in time or always killed. With a `code` these and a failed import are Mistakes.
        """
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
                return Mistake(f"{code.source}: the import of this code {_ended(status)}")
        return self.never_ready(code)

    def never_ready(self, code: Code | None) -> Mistake:
        """Return a Mistake for a user's code whose process never lives; else raise SandboxFailed."""
        text = f"was killed {STARTS} times before it was ready"
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
        """Return the nursery of built-in code, or of users' code unless `is_built_in`.

        If it does not run, a new one is started first. The caller holds the lock.
        """
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

        If the process ended before, return whether foreign code had run in it. Raise SandboxFailed if
        it is not ready in time, ConfigError if it cannot give up its rights, both only without a code.
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
        """Return a Mistake with the `reason` why a process with this `code` could not prepare.

        The reason is a lack of memory, or that limits, source or rights failed. Raise ConfigError
        without a code.
        """
        if reason.startswith("MemoryError"):
            return self._too_little_memory(code)
        if code is not None:
            return Mistake(f"{code.source} cannot be read: {reason}")
        raise ConfigError(f"a sandbox process cannot give up its rights on this machine: {reason}")

    def _tell_isolation(self, isolated: bool) -> None:
        """Log, once per pool, if processes are not separated by namespaces (`isolated` is False)."""
        if not isolated:
            self._tell(
                "namespaces",
                "This machine allows no namespaces: sandbox processes see the other processes, and "
                "share /dev/shm.",
            )

    def _tell_mode(self, reason: str, handle: Handle, code: Code | None) -> None:
        """Set up `handle` by `reason`, which says why its process cannot be forked for each call.

        For built-in code (None) nothing happens. With "" the handle forks and is never replaced. Else
        the reason is logged, once per code.
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
        """Log a line unless this pool has logged one on the same subject before."""
        with self._lock:
            is_new = subject not in self._told
            self._told.add(subject)
        if is_new:
            log.info(line)


def _ended(status: int | None) -> str:
    """Return how a process ended, for an error; None: its exit status is not known."""
    return "ended its process" + ("" if status is None else f" (exit code {status})")
