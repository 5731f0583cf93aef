"""Tools and environments that the tests of conversations name by file."""

from __future__ import annotations

import os
import time


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


class Counter:
    """Counts; the first row's column `fails` says which step ends the process."""

    def __init__(self) -> None:
        self._count = 0
        self._fails = ""

    def reset(self, start: int = 0, fails: str = "") -> str | None:
        self._count, self._fails = start, fails
        if fails == "reset":
            os._exit(3)
        return f" It stands at {start}." if start else None

    def up(self, by: int) -> str:
        """Count up.

        Args:
            by: how much
        """
        if self._fails == "tool":
            os._exit(3)
        self._count += by
        return f"now {self._count}"

    def get_reward(self) -> float:
        if self._fails == "reward":
            return float("nan")
        return float(self._count)
