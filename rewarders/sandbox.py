"""What runs inside a scoring process: one reward on one group, within its memory, nothing hidden.

Whatever goes wrong goes back as text. An exception itself would have to be pickled, and one that
cannot be unpickled takes the whole pool down.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from numbers import Real
from typing import Any

from rewarders.rewards import Reward

OUT_OF_MEMORY = 77
"""Exit code of a scoring process that met its memory limit."""

Reply = tuple[list[float | None] | None, str]
"""The values, or None and what went wrong."""


def prepare(memory_bytes: int) -> None:
    """Set up a new scoring process."""
    # A SIGTERM to the process group is for the rewarder, which finishes what it holds.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def ready(memory_bytes: int) -> bool:
    """Whether the process started with room to work in."""
    return not _came_near(memory_bytes)


def call_reward(
    reward: Reward,
    prompts: list[str],
    completions: list[str],
    columns: dict[str, list[Any]],
    memory_bytes: int,
) -> Reply:
    """Call a reward and check what it returns; ends the process when memory ran out."""
    try:
        values = checked_values(reward(prompts, completions, **columns), len(completions))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # rewards run on model text and may raise anything, SystemExit too
        return None, f"{type(error).__name__}: {error}"
    if _came_near(memory_bytes):
        os._exit(OUT_OF_MEMORY)
    return values, ""


def checked_values(values: Any, count: int) -> list[float | None]:
    """A reward's values as plain floats; raises ValueError for anything but `count` finite ones."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise ValueError(f"expected a list of {count} values, found {str(values)[:80]}")
    for value in values:
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise ValueError(f"expected finite numbers or None, found {str(value)[:80]}")
    return [None if value is None else float(value) for value in values]


def _came_near(memory_bytes: int) -> bool:
    """Whether this process once held a quarter of its limit.

    math_verify swallows MemoryError and answers "wrong". A number or list that grows until it fails
    was held at about a third of the limit just before; honest scorings stay far below.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory_bytes / 4
