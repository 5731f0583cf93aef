"""Rewards for tags around reasoning and answer: `format`, `strict_format`, `xml_tags`."""

import re
from typing import Any

_BLOCK = r"<{0}>(?:(?!</?(?:think|answer)>).)*</{0}>"
_THINK, _ANSWER = _BLOCK.format("think"), _BLOCK.format("answer")
_FORMAT = re.compile(rf"\s*{_THINK}\s*{_ANSWER}\s*", flags=re.DOTALL)
_STRICT = re.compile(_THINK + _ANSWER, flags=re.DOTALL)
_XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def has_structure(completion: str) -> bool:
    """Return whether a text is <think>..</think><answer>..</answer>, with white space at most."""
    return _FORMAT.fullmatch(completion) is not None


def think_answer(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for <think>..</think><answer>..</answer> and only white space beside, else 0.0.

    Source: DeepSeek-R1 (arXiv:2501.12948).

    Example:
        >>> think_answer([""], ["<think>2 + 2</think> <answer>4</answer>"])
        [1.0]
    """
    return [float(has_structure(completion)) for completion in completions]


def strict_think_answer(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for <think>..</think><answer>..</answer> and nothing beside, else 0.0.

    Example:
        >>> strict_think_answer([""], ["<think>2 + 2</think> <answer>4</answer>"])
        [0.0]
    """
    return [1.0 if _STRICT.fullmatch(completion) else 0.0 for completion in completions]


def xml_tags(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 0.2 for each of <reasoning>, </reasoning>, <answer>, </answer> that occurs anywhere.

    Example:
        >>> xml_tags(["", ""], ["<answer>4</answer>", "4"])
        [0.4, 0.0]
    """
    return [round(0.2 * sum(tag in text for tag in _XML_TAGS), 1) for text in completions]
