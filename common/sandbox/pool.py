"""A pool of sandbox processes, so that no call can stop the process that makes it.

A call that hangs is killed at its time limit; a call that crashes or uses up the memory ends only its
own process. Model text does this to verifiers: math_verify never ends with `9^{9^{9^{9}}}`.

    pool -> nursery (trusted, fresh) -> keeper (trusted) -> process (no rights) -> one process per call
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from penstock.common.log import get_logger
from penstock.common.sandbox import frames
from penstock.common.sandbox.handle import Handle, Mistake, Outcome, ProcessGone, outcome_of
from penstock.common.sandbox.settings import MOST_CODES, Code, SandboxSettings
from penstock.common.sandbox.starter import STARTS, Starter
from penstock.common.sandbox.user import hide_memory

_GONE = (
    "A sandbox process had ended before its next call. Something killed it, maybe the machine for lack "
    "of memory: see `dmesg`. Another one is started."
)

log = get_logger(__name__)


class SandboxPool:
    """A pool of `settings.workers` sandbox processes; `run` may be called from as many threads.

    __init__ starts the processes, and waits until each is ready or has failed. The pool is a context
    that kills them at its end. `finished` counts the ended calls. This process's memory is hidden from
    other processes of its user. Raise ConfigError if the user does not
    exist, this machine refuses the limits or rights, or the memory limit is too low; SandboxFailed if a
    process is not ready in time, or killed five times before.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self.finished = 0
        hide_memory()  # an ordinary user's rewards are processes of the same user
        self._settings = settings
        self._lock = threading.Lock()
        self._starter = Starter(settings)
        self._idle: queue.LifoQueue[dict[Code | None, Handle]] = queue.LifoQueue()
        self._start_processes()

    def __enter__(self) -> Self:
        """Return this pool, whose processes already run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the idle processes and the nurseries, and let an exception of the context pass."""
        self.close()

    def run(
        self, work: str, *arguments: Any, code: Code | None = None, timeout_s: float = 0.0
    ) -> Any | Mistake:
        """Call the function `work`, "package.module:function", in an idle process; return its result.

        Wait for an idle process without a limit, then for the result at most `timeout_s` seconds, by
        default those of the settings. `code` is the user's code that the process has imported, and no
        other; None is built-in code. If the code has no process yet, one is started first. A call of
        user's code is forked, so that it sees nothing that another left. Code that cannot be forked gets
        a new process every 100 calls, built-in code every 1000. `arguments` are plain data (bytes too),
        the result is JSON, which the caller has to check. A Mistake has the text of an exception of
        `work`, or says that the arguments or the import failed, the call took too long, needed too much
        memory, or ended its process. Raise SandboxFailed if five processes in a row ended before the
        call, for any code, and ConfigError if no process for built-in code can start. Unless the
        arguments are wrong, `finished` is one higher afterwards.
        """
        try:
            request = frames.pack_request({"work": work, "arguments": arguments})
        except (TypeError, ValueError, OverflowError) as error:
            return Mistake(f"the arguments are no plain data: {error}")
        limit_s = timeout_s or self._settings.timeout_s
        slot = self._idle.get()
        try:
            outcome = self._run_in(slot, request, code, limit_s)
        finally:
            self._idle.put(slot)
            with self._lock:
                self.finished += 1
        if isinstance(outcome, Mistake):
            return outcome
        return outcome_of(outcome, self._settings, limit_s)

    def close(self) -> None:
        """Kill the idle processes and the nurseries. No `run` may follow; closing twice does no harm.

        A process with a running call is not killed here.
        """
        for slot in [self._idle.get() for _ in range(self._idle.qsize())]:
            for handle in slot.values():
                handle.end()
        self._starter.close()

    def _start_processes(self) -> None:
        """Start all processes for built-in code in parallel; wait until each is ready or has failed.

        If any fails, kill all and raise the error of one that failed: ConfigError or SandboxFailed.
        """
        count = self._settings.workers
        with ThreadPoolExecutor(count) as threads:
            starts = [threads.submit(self._starter.start, None) for _ in range(count)]
        for start in starts:
            if start.exception() is None:
                handle = start.result()
                assert isinstance(handle, Handle), "only a user's code can fail to be imported"
                self._idle.put({None: handle})
        if self._idle.qsize() < count:
            self.close()
        for start in starts:
            start.result()

    def _run_in(
        self, slot: dict[Code | None, Handle], request: bytes, code: Code | None, timeout_s: float
    ) -> Outcome | Mistake:
        """Make a call in the process that `slot` has for this `code`, started first if there is none.

        `slot` has a worker's processes by their code, the last used at the end; None is built-in code.
        `request` is the packed call, which may take `timeout_s` seconds. Return the call's outcome, or a
        Mistake if the user's code cannot be started. Afterwards the process is the last in `slot`, or
        ended if it can serve no more calls. Over 8 processes of users' code, the one used longest ago is
        ended. Raise SandboxFailed if five processes in a row ended before the call, each of which is
        logged, and ConfigError if no process for built-in code can start.
        """
        for _ in range(STARTS):
            handle: Handle | Mistake | None = slot.pop(code, None)
            if handle is None:
                handle = self._starter.start(code)
            if isinstance(handle, Mistake):
                return handle
            try:
                return handle.call(request, timeout_s)
            except ProcessGone:
                handle.usable = False
                log.warning(_GONE)
            finally:
                if handle.usable and handle.calls_left > 0:
                    slot[code] = handle  # as the last one
                    self._forget_oldest(slot)
                else:
                    handle.end()
        raise self._starter.killed(code)

    def _forget_oldest(self, slot: dict[Code | None, Handle]) -> None:
        """If `slot` has over MOST_CODES, 8, processes of users' code, end and remove the first of them.

        The first is the one that was used longest ago.
        """
        own = [code for code in slot if code is not None]
        if len(own) > MOST_CODES:
            slot.pop(own[0]).end()
