"""The learner's heartbeat: a lease on the queue server, renewed by a thread beside the main loop.

A thread that always renewed would hide a main loop that hangs. The thread therefore watches the
phases of the main loop, and ends the process when these make no progress for too long.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable

from penstock.common.broker.lease_keeper import KeeperThread
from penstock.common.deadline import Deadline
from penstock.common.errors import (
    ConfigError,
    DeadlineExceeded,
    PenstockError,
    RunTaken,
    ServerUnavailable,
)
from penstock.common.log import get_logger
from penstock.common.phases import LEAVING, Phases
from penstock.learner.streams.learner_queue import LearnerQueue

log = get_logger(__name__)

_LONGEST_PAUSE_S = 1.0  # between two heartbeats, also with a long lease: actors watch them


def end_process(reason: str) -> None:
    """Print `reason` to stderr and end the process at once with exit code 81 (DeadlineExceeded).

    This works also while the main thread hangs. Nothing is closed or cleaned up. It never returns.
    """
    print(f"learner: {DeadlineExceeded.__name__}: {reason}", file=sys.stderr, flush=True)
    os._exit(DeadlineExceeded.exit_code)


class Heartbeat:
    """Renews the learner's lease while its main loop makes progress; a context that ends the lease.

    The lease lasts `lease_s` after each renewal. A thread, which the context starts, renews it four
    times per lease, and once a second at least. When `phases` makes no progress for `stall_timeout_s`,
    the thread calls `on_stall` with a sentence that names the phase, and renews no more. By default
    `on_stall` ends the process. A thread that has died ends the main loop at the next poll of a phase.
    """

    def __init__(
        self,
        queue: LearnerQueue,
        phases: Phases,
        lease_s: float,
        stall_timeout_s: float,
        on_stall: Callable[[str], None] = end_process,
    ) -> None:
        self._queue, self._phases = queue, phases
        self._lease_s, self._on_stall = lease_s, on_stall
        self._deadline = Deadline(stall_timeout_s)
        self._guard_at = 0.0
        every_s = min(lease_s / 4, _LONGEST_PAUSE_S)
        told = "The learner's lease was not renewed"
        self._thread = KeeperThread("heartbeat", every_s, self._keep, told)

    def __enter__(self) -> "Heartbeat":
        """Start the thread that renews the lease, and return the heartbeat."""
        self._thread.start()
        self._phases.check = self._thread.check
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the thread, in up to 5 s, then end the lease, so that another learner can start at once.

        If the block raised ServerUnavailable (`kind` is the class of its error), the lease is left to
        expire. The block's error passes; errors of the queue server while ending the lease are ignored.
        """
        self._thread.stop()
        if kind is not None and issubclass(kind, ServerUnavailable):
            return  # the main loop has waited for the server already, or was refused
        with contextlib.suppress(PenstockError):  # superseded, or no server: the lease expires by itself
            self._queue.beat(0.0, LEAVING)

    def _guard(self) -> None:
        """Restore what another client changed on the server, and check that the server evicts no keys.

        See `LearnerQueue.restore`. Do nothing within a quarter of a lease after the last time. If keys
        may be evicted, log that once: the main loop raises it. Raise RunTaken, ServerUnavailable or
        another error of Connection.call.
        """
        now = time.monotonic()
        if now < self._guard_at:
            return
        self._guard_at = now + self._lease_s / 4
        self._queue.restore()
        try:
            self._queue.connection.check_eviction()
        except ConfigError as error:
            self._queue.report(f"The learner ends at its next poll: {error}")

    def _keep(self) -> None:
        """Renew the lease, with the phase's name, then `_guard`, unless the main loop hangs.

        When the phases have made no progress for the stall timeout, call `on_stall` and end the thread.
        A RunTaken is left to the main loop. Raise ServerUnavailable or another error of `call`.
        """
        if self._deadline.expired(self._phases.progress):
            self._thread.end()
            self._on_stall(
                f"the learner has been {self._phases.name} for {self._deadline.waited_s:.0f} s "
                "(LEARNER_STALL_TIMEOUT_S): it hangs, or needs a larger limit"
            )
            return
        with contextlib.suppress(RunTaken):  # the main loop gets it too, unless it was a passing mistake
            self._queue.beat(self._lease_s, self._phases.name)
            self._guard()
