"""Log lines about a loop that may take minutes."""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

from penstock.common.deadline import Deadline
from penstock.common.log import get_logger, shorten

_Item = TypeVar("_Item")
log = get_logger(__name__)


def with_progress(
    items: Iterable[_Item], done: str, total: int = 0, every_s: float = 10.0
) -> Iterator[_Item]:
    """Yield `items` in order. Every `every_s` seconds, log `done` and how many items were yielded.

    Example: with `done` "gsm8k.jsonl: rows read" and a `total` of 7473 a line is "gsm8k.jsonl: rows
    read: 900 of 7,473." A total of 0 is unknown: "... rows read: 900." A line is logged when the next
    item arrives, and cut to 135 characters. An item of over 5 s counts as 5 s. `every_s` 0 means 30 s.
    """
    waited = Deadline(math.inf)
    for count, item in enumerate(items):
        if waited.report_due(every_s):
            log.info(shorten(f"{done}: {count:,}" + (f" of {total:,}." if total else ".")))
        yield item
