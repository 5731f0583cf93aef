"""The reward `soft_overlong`: DAPO's soft punishment of long completions."""

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
    """0 for what is short enough, falling to -1 at soft_max_length tokens."""
    return [overlong_punishment(len(ids), soft_max_length, soft_cache_length) for ids in completion_ids]
