"""How a gold answer is read, in words; and why one cannot be read."""

import math
import re
from collections.abc import Sequence
from typing import Any

from penstock.common.text import short
from penstock.rewarders.rewards.accuracy import GOLD_TYPES, read_gold
from penstock.rewarders.rewards.answers import after_marker, all_boxes, marked_part
from penstock.rewarders.rewards.parts import is_prose, last_part
from penstock.rewarders.rewards.values import (
    SET,
    Choice,
    Group,
    Named,
    NumberValue,
    Value,
    divides_by_zero,
)
from penstock.rewarders.rewards.words import has_sentence

_GROUPS = {":": "ratio or time", "-": "range", "matrix": "matrix", SET: "set"}
_BRACES = str.maketrans(SET, "{}")


def describe_golds(golds: Sequence[Any], as_text: bool) -> list[tuple[str | None, str]]:
    """Return for each of `golds`, in order, how it is read and ""; or None and why it cannot be read.

    With `as_text`, golds are compared as texts, as `correctness` does, and only an empty one cannot be
    read. Raise MemoryError or RecursionError, as read_gold does.
    Example: for "#### 72" the result is ("number 72", ""), for "$1/0$" (None, "divides by zero").
    """
    return [_describe_text(gold) if as_text else _describe(gold) for gold in golds]


def _describe_text(gold: Any) -> tuple[str | None, str]:
    """Return ("text 72", ""), where 72 is the text that `correctness` compares; or (None, "empty").

    The text is what follows the last #### in str(gold), stripped and cut to 200 characters.
    """
    text = after_marker(str(gold)).strip()
    return (short(f"text {text}"), "") if text else (None, "empty")


def _describe(gold: Any) -> tuple[str | None, str]:
    """Return how a gold answer is read, such as "number 72", and ""; or None and why it cannot be read.

    Raise MemoryError or RecursionError, as sympy does.
    """
    value = read_gold(gold)
    return (None, _why_unreadable(gold)) if value is None else (short(_in_words(value)), "")


def _in_words(value: Value) -> str:
    """Return a value in words: "number 1,000", "x = number 5", "choice B", "words east"."""
    text = value.text.translate(_BRACES) + (f" {value.half}.m." if value.half else "")
    if isinstance(value, Choice):
        return f"choice {value.letter}"
    if isinstance(value, Named) and value.value is not None:
        return f"{value.name} = {_in_words(value.value)}"
    if isinstance(value, NumberValue):
        return f"number {value.text}"
    if isinstance(value, Group):
        return f"{_GROUPS.get(value.kind, 'list')} {text}"
    return f"{'formula' if value.is_formula else 'words'} {text}"


def _why_unreadable(gold: Any) -> str:
    """Return a short reason why the gold answer `gold` cannot be read, such as "divides by zero".

    The caller knows already that it cannot. Raise MemoryError or RecursionError, as sympy does.
    """
    if gold is None:
        return "null"
    if isinstance(gold, float) and math.isnan(gold):
        return "not a number (NaN)"
    if not isinstance(gold, (*GOLD_TYPES, list, tuple)):
        return f"a {type(gold).__name__}, expected a text or a number"
    marked = marked_part(str(gold))
    boxes = list(dict.fromkeys(all_boxes(marked)))
    inside = (boxes[-1] if boxes else marked).strip()
    if len(boxes) > 1:
        return f"one of its {len(boxes)} boxes cannot be read"
    if not inside:
        return "empty"
    if not re.search(r"\w|\\[a-z]", inside):
        return "has no letter or digit"
    if any(map(divides_by_zero, (inside, last_part(inside)))):
        return "divides by zero"
    if is_prose(inside) or has_sentence(inside):
        return "a sentence"
    return "no number, formula, choice or word that can be read"
