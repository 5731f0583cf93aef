"""The reward `soft_overlong`, and the formulas of all rewards that depend on a completion's tokens."""

import math
from collections.abc import Sequence
from typing import Any


def soft_overlong(
    completion_ids: list[list[int]], soft_max_length: int, soft_cache_length: int, **columns: Any
) -> list[float]:
    """Return for each completion 0 up to soft_max_length - soft_cache_length tokens, then less.

    From there the value goes linearly down to -1 at soft_max_length tokens, and stays -1 beyond.
    `completion_ids` are the completions' token ids. soft_cache_length is above 0. `columns` are ignored.
    """
    return [overlong_punishment(len(ids), soft_max_length, soft_cache_length) for ids in completion_ids]


def overlong_punishment(length: int, max_length: int, cache_length: int) -> float:
    """Return 0 up to max_length - cache_length tokens, then linearly down to -1 at max_length, then -1.

    `length` is a completion's number of tokens, cache_length is above 0. Source: equation 13 of DAPO
    (arXiv:2503.14476). Example: with max_length 100 and cache_length 20, the lengths 80, 90, 100 and 101
    get 0, -0.5, -1 and -1.
    """
    if length <= max_length - cache_length:
        return 0.0
    return max(-1.0, (max_length - cache_length - length) / cache_length)


def half_cosine(length: int, max_len: int, at_zero: float, at_max: float) -> float:
    """Return `at_zero` at length 0, moving along half a cosine to `at_max` from `max_len` tokens on.

    `length` is a completion's number of tokens; `max_len` is above 0. Source: "Demystifying Long
    Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), cosine reward.
    Example: half_cosine(50, 100, 1.0, 0.5) is 0.75.
    """
    share = min(length, max_len) / max_len
    return at_max + (at_zero - at_max) * (1.0 + math.cos(math.pi * share)) / 2.0


def relative_lengths(lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
    """Return for each completion of a group 0.5 (the shortest) to -0.5 (the longest), linearly between.

    `lengths` are the completions' numbers of tokens; there is at least one. `right` says of each whether
    its answer is right; a wrong one gets at most 0. All get 0 if all lengths are equal. Source: Kimi
    k1.5 (arXiv:2501.12599), length penalty. Example: relative_lengths([10, 20, 30], [True, True, False])
    is [0.5, 0.0, -0.5].
    """
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    if not spread:
        return [0.0] * len(lengths)
    values = [0.5 - (length - shortest) / spread for length in lengths]
    return [value if fine else min(0.0, value) for value, fine in zip(values, right, strict=True)]
