"""The reward of benchmarks/time_to_reward.py, for both sides; it imports nothing heavy."""

from __future__ import annotations

from typing import Any


def is_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.0 for each completion that is the answer, else 0.0."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
