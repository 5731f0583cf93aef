"""The reward `soft_overlong`: DAPO's gradual penalty for long completions."""

from typing import Any

from penstock.rewarders.rewards.lengths import overlong_punishment


def soft_overlong(
    prompts: list[Any],
    completions: list[str],
    completion_ids: list[list[int]],
    soft_max_length: int,
    soft_cache_length: int,
    **columns: Any,
) -> list[float]:
    """Return 0 for short completions, falling to -1 over the last soft_cache_length tokens.

    -1 is reached at soft_max_length tokens: see `overlong_punishment`.
    """
    return [overlong_punishment(len(ids), soft_max_length, soft_cache_length) for ids in completion_ids]
