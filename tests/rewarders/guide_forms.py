"""Functions with the signatures of the examples in TRL's guide and of ms-swift's plugin examples."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from swift.rewards import ORM, AsyncORM, orms  # ms-swift, or what Penstock offers in its place

Chats = list[list[dict[str, str]]]


def in_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def in_letters(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def thinks(completions: Chats, **kwargs: Any) -> list[float]:
    return [float("</think>" in one[0]["content"]) for one in completions]


def boxed(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    pairs = zip(found, ground_truth, strict=True)
    return [float(box is not None and box.group(1) == gold) for box, gold in pairs]


def maths(prompts: Any, completions: Any, task: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if kind == "math" else None for kind in task]


def coding(prompts: Any, completions: Any, task: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if kind == "code" else None for kind in task]


async def waited(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(bool(one)) for one in completions]


def logged(completions: Any, ground_truth: Any, log_extra=None, log_metric=None, **kwargs: Any) -> Any:
    log_extra("gold", list(ground_truth))
    log_metric("share", 0.5)
    return [1.0] * len(completions)


def curriculum(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


class Accuracy(ORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args, **kwargs)

    def __call__(self, completions, solution, **kwargs) -> list[float]:
        return [float(gold in text) for text, gold in zip(completions, solution, strict=True)]


class Countdown(ORM):
    def __call__(self, completions, target, nums, **kwargs) -> list[float]:
        return [float(sum(these) == aim) for these, aim in zip(nums, target, strict=True)]


class CodeFormat(ORM):
    def __call__(self, completions, **kwargs) -> list[float]:
        return [float(info["language"] == "python") for info in kwargs["verification_info"]]


class Scheduled(ORM):
    def __init__(self):
        self.limit = 2

    def __call__(self, completions, solution, **kwargs) -> list[float]:
        return [float(kwargs["trainer_state"].global_step < self.limit) for _ in completions]


class Judged(AsyncORM):
    async def __call__(self, completions, **kwargs) -> list[float]:
        async def judge(text: str) -> float:
            await asyncio.sleep(0.01)
            return float("72" in text)

        return list(await asyncio.gather(*map(judge, completions)))


class InTokens(ORM):
    def __call__(self, completions, **kwargs) -> list[float]:
        return [float(len(ids)) for ids in kwargs.get("response_token_ids")]


orms |= {"external_accuracy": Accuracy, "external_countdown": Countdown, "code_format": CodeFormat}
orms |= {"scheduled": Scheduled, "judged": Judged, "in_tokens_of_swift": InTokens}
