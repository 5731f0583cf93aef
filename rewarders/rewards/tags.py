"""The reward `format`: reasoning and answer each in their own tags, in that order."""

from __future__ import annotations

import re
from typing import Any

_BLOCK = r"<{0}>(?:(?!</?(?:think|answer)>).)*</{0}>"
_FORMAT = re.compile(rf"\s*{_BLOCK.format('think')}\s*{_BLOCK.format('answer')}\s*", flags=re.DOTALL)


def think_answer(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1.0 for <think>..</think><answer>..</answer> and nothing else but white space, else 0.0.

    Example:
        >>> think_answer([""], ["<think>2 + 2</think> <answer>4</answer>"])
        [1.0]
    """
    return [1.0 if _FORMAT.fullmatch(completion) else 0.0 for completion in completions]
