"""Attempts with hints: LEARNER_ENVIRONMENT=retry.py:Guess. Rows have a whole number as `answer`."""

from typing import Any


class Guess:
    """A number is to be found; each attempt is answered with a hint."""

    def reset(self, answer: Any, **row: Any) -> None:
        """Begin without attempts. The number is the row's `answer`, or what is in it behind ####.

        GSM8K has such answers. Commas are left out. Raise ValueError if that is no whole number.
        """
        self._answer = int(str(answer).rpartition("####")[2].replace(",", ""))
        self._attempts: list[float] = []

    def guess(self, number: int) -> str:
        """Say whether a number is the answer.

        Args:
            number: The number.

        Returns:
            "right", "too low" or "too high".
        """
        self._attempts.append(number)
        if number == self._answer:
            return "right"
        return "too low" if number < self._answer else "too high"

    def get_reward(self) -> float:
        """Return 1.0 if the last attempt is right, else 0.0, also without any attempt."""
        return float(self._attempts[-1:] == [self._answer])
