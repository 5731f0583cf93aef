"""Deadlines of waits, and when a wait is to be reported."""

import time

REPORT_EVERY_S = 30.0
"""A wait is reported each time that it has lasted this many seconds more."""


class Deadline:
    """A limit `limit_s` on the seconds waited since the last restart, counted from poll to poll.

    Creating a deadline starts it. A gap between two polls counts as at most `longest_gap_s`: the process
    was stopped, or the queue server did not answer, and the awaited thing may have arrived meanwhile. A
    wait with a limit of 60 s whose process is stopped for an hour has waited 5 s when the process
    continues.
    """

    def __init__(self, limit_s: float, longest_gap_s: float = 5.0) -> None:
        self.limit_s = limit_s
        self._longest_gap_s = longest_gap_s
        self._progress: object = None
        self.restart()

    def restart(self) -> None:
        """Count from 0 s again, also for `report_due`: the awaited thing arrived."""
        self._waited_s = self._reported_s = 0.0
        self._polled_at = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds waited since the last restart, as the class counts them. Reading this is a poll."""
        now = time.monotonic()
        self._waited_s += min(now - self._polled_at, self._longest_gap_s)
        self._polled_at = now
        return self._waited_s

    @property
    def remaining_s(self) -> float:
        """Seconds left until the limit, 0 after it. Reading this property is a poll."""
        return max(0.0, self.limit_s - self.waited_s)

    def expired(self, progress: object = None) -> bool:
        """Return whether more than `limit_s` was waited since the last restart. The call is a poll.

        A `progress` that differs from the one passed before restarts the deadline and gives False, such
        as a counter of sampled tokens that grew from 7 to 8. The first one passed does so too; None is
        ignored.
        """
        if progress is not None and progress != self._progress:
            self._progress = progress
            self.restart()
            return False
        return self.waited_s > self.limit_s

    def report_due(self, every_s: float | None = None) -> bool:
        """Return True once per `every_s` seconds waited, None: per 30 s; else False. The call is a poll.

        The seconds count from the last restart or the last True. A wait of 70 s that polls often gets
        True at 30 s and at 60 s; one that polls at 70 s alone gets True once.
        """
        if self.waited_s - self._reported_s < (every_s or REPORT_EVERY_S):
            return False
        self._reported_s = self._waited_s
        return True
