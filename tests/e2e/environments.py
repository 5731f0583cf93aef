"""The environment of the runs that are killed: it counts, and takes its time."""

from __future__ import annotations

import time


class Counter:
    """Counts up; the reward is the last number, a little different for each episode."""

    def __init__(self) -> None:
        self._count = 0
        self._began = time.time()

    def reset(self, question: str, **row: object) -> str:
        """Start at 0."""
        return "+0"

    def up(self, by: int) -> str:
        """Count up.

        Args:
            by: how much
        """
        time.sleep(0.2)
        self._count += by
        return str(self._count)

    def get_reward(self) -> float:
        return self._count + self._began % 1.0
