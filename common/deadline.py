"""How long something has been waited for in vain: what deadlines and reports go by."""

import time

REPORT_EVERY_S = 30.0
"""A wait in vain is reported this often."""

_LONGEST_LOOK_S = 5.0


class Deadline:
    """Counts the seconds since `renew` in which somebody looked, up to a limit.

    A stretch in which nobody looked (the process was stopped, the queue server was away) counts for no
    more than 5 s: what is waited for may have come meanwhile.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.renew()

    def renew(self) -> None:
        """What was waited for came: begin again."""
        self.waited_s = self._reported_s = 0.0
        self._looked_at = time.monotonic()

    def look(self) -> bool:
        """Whether the limit has passed; to be called again and again."""
        now = time.monotonic()
        self.waited_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self.waited_s > self.limit_s

    def report_due(self) -> bool:
        """Whether another 30 s have passed in vain."""
        if self.waited_s - self._reported_s < REPORT_EVERY_S:
            return False
        self._reported_s = self.waited_s
        return True
