"""The game without a hint, and what is counted in a transcript of the game.

The run imports this file for its environment and its rewards.
"""

from __future__ import annotations

from typing import Any

from penstock.deploy.environments.retry import Guess

ATTEMPTS = 2
_ANSWERS = ("right", "too low", "too high", "no")


class GuessWithoutHint(Guess):
    """The number is to be found; a wrong attempt is answered with "no"."""

    def guess(self, number: int) -> str:
        """Say whether a number is the answer.

        Args:
            number: The number.
        """
        return "right" if super().guess(number) == "right" else "no"


def within_two(completions: list[Any], **columns: Any) -> list[float]:
    """Return for each transcript 1.0 if one of the first two attempts is right, else 0.0."""
    return [float("right" in _answers(talk)[:ATTEMPTS]) for talk in completions]


def at_first(completions: list[Any], **columns: Any) -> list[float]:
    """Return for each transcript 1.0 if the first attempt is right, else 0.0."""
    return [float("right" in _answers(talk)[:1]) for talk in completions]


def calls(completions: list[Any], **columns: Any) -> list[float]:
    """Return for each transcript the number of its answered calls, errors included."""
    return [float(len(_answers(talk))) for talk in completions]


def valid_calls(completions: list[Any], **columns: Any) -> list[float]:
    """Return for each transcript the number of its calls that the game answered without an error."""
    return [float(sum(one in _ANSWERS for one in _answers(talk))) for talk in completions]


def _answers(talk: list[dict[str, Any]]) -> list[str]:
    """Return the answers to a transcript's calls, in their order."""
    return [one["content"] for one in talk if one["role"] == "tool"]
