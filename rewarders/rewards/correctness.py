"""The reward `correctness` of "GRPO from scratch", for answers that are one number or word."""

import re
from typing import Any

from penstock.rewarders.rewards.answers import after_marker

_LAST_NUMBER = re.compile(r"(?:^|\s|=)(-?\d*\.?\d+)$")


def correctness(completions: list[str], solution: list[Any], **columns: Any) -> list[float | None]:
    """Return 2.0 where the answer is exactly the gold answer, 1.5 for an equal number, else 0.0.

    The answer is the last <answer> block, unless that is "...". Its number must be at its end. The gold
    answer is the text after ####, or the whole text without ####; all are None if it is empty.
    Example: for "#### 72", "<answer>72</answer>" gets 2.0 and "<answer>= 72.0</answer>" gets 1.5.
    """
    gold = after_marker(str(solution[0])).strip()
    if not gold:
        return [None] * len(completions)
    return [_value(tagged_answer(completion), gold) for completion in completions]


def tagged_answer(completion: str) -> str | None:
    """Return the inside of the last <answer> block; None if it is missing, not closed, or "..."."""
    _, opened, rest = completion.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    answer = inside.strip()
    return answer if opened and closed and answer != "..." else None


def _value(answer: str | None, gold: str) -> float:
    """Return the reward of one answer: 2.0 if equal, 1.5 if equal as numbers, else 0.0."""
    if answer is None:
        return 0.0
    if answer == gold:
        return 2.0
    number = _last_number(answer)
    return 1.5 if number is not None and number == _last_number(gold) else 0.0


def _last_number(text: str) -> float | None:
    """Return the number at the end of a text, dollar and percent signs ignored; None without one."""
    found = _LAST_NUMBER.search(text.replace("$", "").replace("%", "").strip())
    return float(found.group(1)) if found else None
