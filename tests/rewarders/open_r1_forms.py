"""Nine functions with the signatures of Open R1's rewards, as its documentation shows them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

Chats = list[list[dict[str, str]]]


def accuracy_reward(completions: Chats, solution: list[str], **kwargs: Any) -> list[float | None]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(gold in text) if gold else None for text, gold in zip(contents, solution, strict=True)]


def format_reward(completions: Chats, **kwargs: Any) -> list[float]:
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    return [float(bool(re.match(pattern, one[0]["content"], re.DOTALL))) for one in completions]


def tag_count_reward(completions: Chats, **kwargs: Any) -> list[float]:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [sum(0.25 for tag in tags if one[0]["content"].count(tag) == 1) for one in completions]


def reasoning_steps_reward(completions: Chats, **kwargs: Any) -> list[float]:
    steps = [len(re.findall(r"Step \d+:|^\d+\.", one[0]["content"])) for one in completions]
    return [min(1.0, count / 3) for count in steps]


def len_reward(completions: Chats, solution: list[str], **kwargs: Any) -> list[float]:
    lengths = [len(one[0]["content"]) for one in completions]
    return [0.5 - (length - min(lengths)) / max(1, max(lengths) - min(lengths)) for length in lengths]


def get_cosine_scaled_reward(max_len: int = 1000) -> Callable[..., list[float | None]]:
    def cosine_scaled_reward(
        completions: Chats, solution: list[str], **kwargs: Any
    ) -> list[float | None]:
        right = accuracy_reward(completions, solution)
        return [None if one is None else one * (1 - 1 / max_len) for one in right]

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int, max_penalty: float) -> Callable[..., list[float]]:
    def repetition_penalty_reward(completions: Chats, **kwargs: Any) -> list[float]:
        words = [one[0]["content"].split() for one in completions]
        return [max_penalty * (len(one) > len(set(one))) for one in words]

    return repetition_penalty_reward


def get_soft_overlong_punishment(max_completion_len: int) -> Callable[..., list[float]]:
    def soft_overlong_punishment(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [-1.0 * (len(ids) > max_completion_len) for ids in completion_ids]

    return soft_overlong_punishment


async def code_reward(completions: Chats, test_batch_size: int = 1, **kwargs: Any) -> list[float]:
    async def run(text: str) -> float:
        await asyncio.sleep(0)
        return float("72" in text)

    return await asyncio.gather(*(run(one[0]["content"]) for one in completions))


cosine = get_cosine_scaled_reward()
repetition = get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0)
overlong = get_soft_overlong_punishment(max_completion_len=2)
