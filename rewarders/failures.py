"""What the log says of rewards that fail: the first failure of a cause, and later ones as a count."""

import re
import threading
from collections import Counter

from penstock.common.log import get_logger
from penstock.common.text import SHOWN, short

log = get_logger(__name__)

_TEN, _MOST_CAUSES = 10, 100
_VARYING = re.compile(r"\"[^\"]*\"|'[^']*'|(?<!\d)\d{1,2}(?!\d)|\d{4,}")
"""What differs between two failures of one cause. Three digits may be a status such as 401."""
_PLACE = re.compile(r"([^/(;`]{1,80}), line (\d+), in ([^`]{1,80}): `")
"""A place in the user's code: its file, line and function."""


class Failures:
    """Logs failures by cause: the first one, then at 10, 100, 1,000 and so on how many there were."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def tell(self, reason: str, what: str, completion: str = "") -> None:
        """Log or count a failure: `reason` such as "reward own: ValueError: .. (own.py, line 3, ..)".

        `what` says what became of it, such as "the group of train:5 is retried"; `completion` is the
        text that the reward was called with, "" if none is at fault. Any thread may call this.
        """
        with self._lock:
            cause = cause_of(reason)
            if cause not in self._counts and len(self._counts) >= _MOST_CAUSES:
                cause = "others"
            self._counts[cause] += 1
            count = self._counts[cause]
        if count == 1:
            shown = f" The completion: {short(completion[:SHOWN])!r}." if completion else ""
            more = "Later ones of this cause are counted"
            log.warning(f"{reason}. {what[:1].upper()}{what[1:]}.{shown} {more}.")
        elif count == _TEN ** (len(str(count)) - 1):
            log.warning(f"{count} failures so far of this cause, the newest: {reason}.")


def cause_of(reason: str) -> str:
    """Return what failures of one cause have in common: the type of the error, and its place if known.

    Example: "reward own: ValueError: no 'x' (own.py, line 3, in own: `int(x)`)" is of the cause "reward
    own: ValueError: own.py, line 3, in own".
    """
    if place := _PLACE.search(reason):
        kind = ":".join(reason[: place.start()].split(":")[:2])
        file, line, function = place.groups()
        return f"{_VARYING.sub('..', kind)}: {file}, line {line}, in {function}"
    return _VARYING.sub("..", reason.partition(", found ")[0])
