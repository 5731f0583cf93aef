"""The learner's sign of life: a lease in Redis, renewed in a thread beside the main loop.

A thread that renewed for ever would hide a main loop that hangs. So the main loop names what it does,
its phase, and the lease is renewed only while the phase lasts no longer than its limit.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, PenstockError, RunTaken, ServerUnavailable
from penstock.common.log import get_logger
from penstock.common.phases import Phases
from penstock.learner.streams.learner_queue import LearnerQueue

log = get_logger(__name__)

_JOIN_S = 5.0
_LONGEST_PAUSE_S = 1.0  # between two signs of life, however long the lease: others go by them


def end_process(reason: str) -> None:
    """End this process with DeadlineExceeded's exit code, whatever its main thread hangs in."""
    print(f"learner: {DeadlineExceeded.__name__}: {reason}", file=sys.stderr, flush=True)
    os._exit(DeadlineExceeded.exit_code)


class Heartbeat:
    """Renews the learner's lease while it gets on; as a context, lets it go at the end.

    After `stall_timeout_s` within one phase `on_stall` is called with a sentence that says which.
    """

    def __init__(
        self,
        queue: LearnerQueue,
        phases: Phases,
        lease_s: float,
        stall_timeout_s: float,
        on_stall: Callable[[str], None] = end_process,
    ) -> None:
        self._queue = queue
        self._lease_s = lease_s
        self._on_stall = on_stall
        self._phases = phases
        self._deadline = Deadline(stall_timeout_s)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left.set()
        self._thread.join(_JOIN_S)
        if kind is not None and issubclass(kind, ServerUnavailable):
            return  # it was waited for long enough
        with contextlib.suppress(PenstockError):  # superseded, or the server is away: it runs out
            self._queue.beat(0.0, "leaving")

    def _run(self) -> None:
        superseded = False
        while not self._left.wait(min(self._lease_s / 4, _LONGEST_PAUSE_S)):
            if self._deadline.expired(self._phases.progress):
                self._on_stall(
                    f"the learner has been {self._phases.name} for {self._deadline.waited_s:.0f} s "
                    "(LEARNER_STALL_TIMEOUT_S): it hangs there, or needs a larger limit"
                )
                return
            if superseded:
                continue
            try:
                self._queue.beat(self._lease_s, self._phases.name)
            except RunTaken:  # the main loop learns it at its next call, unless it hangs: watch on
                superseded = True
            except PenstockError as error:  # the main loop meets the same server and reports it
                log.warning("the learner's lease was not renewed", cause=str(error))
