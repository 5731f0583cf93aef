"""A pool of sandbox processes, so that no call can stop the process that makes it.

A call that hangs is killed at its time limit; a call that crashes or uses up the memory ends only its
own process. Model text does this to verifiers: math_verify never ends with `9^{9^{9^{9}}}`.

    pool -> nursery (trusted, fresh) -> keeper (trusted) -> process (no rights) -> one process per call
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from penstock.common.sandbox import frames
from penstock.common.sandbox.handle import Handle, Mistake, Outcome, ProcessGone, outcome_of
from penstock.common.sandbox.settings import MOST_CODES, Code, SandboxSettings
from penstock.common.sandbox.starter import STARTS, Starter
from penstock.common.sandbox.user import hide_memory


class SandboxPool:
    """`workers` sandbox processes, ready after __init__; `run` may be called from as many threads.

    Use the pool as a context, which kills the processes at its end. Raise ConfigError if the user does
    not exist or the memory limit is too low, SandboxFailed if the start failed otherwise.
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
        """Kill the processes as `close` does."""
        self.close()

    def run(self, work: str, *arguments: Any, code: Code | None = None) -> Any | Mistake:
        """Call the function `work`, "package.module:function", in a process; return its result.

        With a `code`, the process has imported only that. It serves one call, or up to 100 if the code
        cannot be forked. Arguments are plain data (bytes too), and the result is JSON; the caller has to
        check the result. A Mistake holds the exception of `work` as text, or says that the arguments or
        the import failed, that the call took too long, needed too much memory, or ended its process.
        Raise SandboxFailed or ConfigError if no process without a user's code can be started.
        """
        try:
            request = frames.pack_request({"work": work, "arguments": arguments})
        except (TypeError, ValueError, OverflowError) as error:
            return Mistake(f"the arguments are no plain data: {error}")
        slot = self._idle.get()
        try:
            outcome = self._run_in(slot, request, code)
        finally:
            self._idle.put(slot)
            with self._lock:
                self.finished += 1
        if isinstance(outcome, Mistake):
            return outcome
        return outcome_of(outcome, self._settings, self._settings.timeout_s)

    def close(self) -> None:
        """Kill idle processes and the nurseries. Closing twice does no harm; do not `run` later."""
        for slot in [self._idle.get() for _ in range(self._idle.qsize())]:
            for handle in slot.values():
                handle.end()
        self._starter.close()

    def _start_processes(self) -> None:
        """Start all processes and wait for all. If one fails, kill all and raise its error."""
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
        self, slot: dict[Code | None, Handle], request: bytes, code: Code | None
    ) -> Outcome | Mistake:
        """Make a call in the process that `slot` has for this `code`, started first if there is none.

        `request` is the packed call. Return its outcome, or a Mistake if the process cannot be started
        or ended before the call five times. The process stays in `slot`, as the last entry, if it can
        serve more calls; otherwise the process is ended. Raise SandboxFailed or ConfigError as `run`
        does.
        """
        for _ in range(STARTS):
            handle: Handle | Mistake | None = slot.pop(code, None)
            if handle is None:
                handle = self._starter.start(code)
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
        return self._starter.never_ready(code)

    def _forget_oldest(self, slot: dict[Code | None, Handle]) -> None:
        """End the process in `slot` whose user's code was used longest ago, if over MOST_CODES."""
        own = [code for code in slot if code is not None]
        if len(own) > MOST_CODES:
            slot.pop(own[0]).end()
