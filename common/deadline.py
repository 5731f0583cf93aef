"""Deadlines of waits, and when a wait is to be reported; work that nobody has to wait for."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

REPORT_EVERY_S = 30.0
"""A wait is reported each time that it has lasted this many seconds more."""


_LEAVE_S = 2.0  # of a grace period, for the process to end


class Deadline:
    """A limit of `limit_s` seconds on a wait, counted from the creation or the last `restart`.

    No error is raised at the limit: the caller asks `expired`. Time is counted at each poll, which is a
    reading of `waited_s` or `remaining_s` or a call of `expired` or `report_due`. A poll adds the
    seconds since the poll before, at most `longest_gap_s`: after a longer gap the process was stopped,
    or the queue server did not answer. Example: with 5 s, a process stopped for an hour waited 5 s.
    """

    def __init__(self, limit_s: float, longest_gap_s: float = 5.0) -> None:
        self.limit_s = limit_s
        self._longest_gap_s = longest_gap_s
        self._progress: object = None
        self.restart()

    def restart(self) -> None:
        """Set the seconds waited, and those of `report_due`, to 0, and count from now on.

        The `progress` that `expired` saw last is kept.
        """
        self._waited_s = self._reported_s = 0.0
        self._polled_at = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds waited since the creation or the last restart. Reading this property is a poll.

        The seconds between two polls count as at most `longest_gap_s`.
        """
        now = time.monotonic()
        self._waited_s += min(now - self._polled_at, self._longest_gap_s)
        self._polled_at = now
        return self._waited_s

    @property
    def remaining_s(self) -> float:
        """Seconds left until the limit, 0 after it. Reading this property is a poll, like `waited_s`."""
        return max(0.0, self.limit_s - self.waited_s)

    def expired(self, progress: object = None) -> bool:
        """Return whether over `limit_s` seconds were waited since the last restart. The call is a poll.

        A `progress` other than None that differs from the last one passed restarts the deadline and
        gives False, as does the first one. Example: a counter of sampled tokens that grew from 7 to 8.
        """
        if progress is not None and progress != self._progress:
            self._progress = progress
            self.restart()
            return False
        return self.waited_s > self.limit_s

    def report_due(self, every_s: float | None = None) -> bool:
        """Return True once per `every_s` seconds waited, else False. The call is a poll.

        None and 0 mean 30 s. The seconds count from the last restart or True. A wait of 70 s that polls
        often gets True at 30 s and at 60 s. A wait whose only poll is at 70 s gets True once.
        """
        if self.waited_s - self._reported_s < (every_s or REPORT_EVERY_S):
            return False
        self._reported_s = self._waited_s
        return True


def run_aside(work: Callable[[], Result]) -> "Future[Result]":
    """Start `work` in a thread that no process waits for at its end, and return what will be its result.

    A result that nobody waits for any more is dropped.
    """
    found: Future[Result] = Future()

    def run() -> None:
        """Store the result or the error in `found`, which cannot be cancelled from now on."""
        try:
            found.set_result(work())
        except BaseException as error:  # whoever waits for the result raises it
            found.set_exception(error)

    found.set_running_or_notify_cancel()
    threading.Thread(target=run, name="aside", daemon=True).start()
    return found


class GracePeriod(threading.Event):
    """Set when a process is to give up: `stopping` is set, and it holds nothing, or its time is over.

    As the event of a Connection it lets commands wait for a server that is away for up to 2 s before the
    end of the `grace_s` seconds, since what is `held` is given back or handed on by commands. `held` is
    true while there is anything.
    """

    def __init__(self, stopping: threading.Event, held: object, grace_s: float) -> None:
        super().__init__()
        self._stopping, self._held, self._grace_s = stopping, held, grace_s
        self._since = 0.0

    def left_s(self) -> float:
        """Return the seconds that are left of the grace period, which this call begins, if none has."""
        self._since = self._since or time.monotonic()
        return max(0.0, self._since + self._grace_s - time.monotonic())

    def is_set(self) -> bool:
        """Return whether commands are to give up. The first call since `stopping` begins the period."""
        return self._stopping.is_set() and (self.left_s() <= _LEAVE_S or not self._held)
