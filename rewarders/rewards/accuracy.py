"""The rewards for right answers. This is the only module that imports math_verify.

math_verify's own time limits are off, because they return "wrong" when they expire. The sandbox's time
limit applies instead. If the gold answer cannot be read, each of these rewards is None for the whole
group; the other rewards still train the group.
"""

import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from math_verify import parse, verify

from penstock.rewarders.rewards.answers import final_answer, last_box
from penstock.rewarders.rewards.form import has_structure
from penstock.rewarders.rewards.lengths import half_cosine, relative_lengths

_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
_NUMBER = re.compile(r"[-+]?[\d.,:]*\s*%?")
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d+)?e[-+]?\d\d?", flags=re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d)\\[,!;: ]\s?(?=\d{3}(?!\d))")
_BOXED_SCIENTIFIC = re.compile(r"\\boxed\{\s*(" + _SCIENTIFIC.pattern + r")\s*\}", re.IGNORECASE)
_EMPHASIS = '*`"\u201c\u201d'
"""Removed around an answer: markdown's stars and backticks, and quotes."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")

# math_verify logs a warning in every process that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def accuracy(completions: list[str], solution: list[Any], **columns: Any) -> list[float | None]:
    """Return 1.0 where the answer equals the gold solution, else 0.0; all None without a gold answer.

    Raise what math_verify raises. Example: for "#### 72", "<answer>72</answer>" gets 1.0, "71" gets 0.0.
    """
    return _by_verdict(completions, solution, lambda _, right: float(right))


def acc(completions: list[str], solution: list[Any], **columns: Any) -> list[float | None]:
    """Return 1.0 where the last box holds the gold answer, -0.5 for another box, -1.0 without a box.

    All are None without a gold answer. Raise what math_verify raises.
    """
    gold = read_gold(solution[0])
    if not gold:
        return [None] * len(completions)
    boxes = [last_box(completion) for completion in completions]
    return [-1.0 if box is None else 1.0 if is_right(gold, box) else -0.5 for box in boxes]


def base_acc(completions: list[str], solution: list[Any], **columns: Any) -> list[float | None]:
    """Return 1.0 where the answer is right and in <think>..</think><answer>..</answer>, else 0.0.

    All are None without a gold answer. Raise what math_verify raises. "<answer>72</answer>" gets 0.0.
    """
    return _by_verdict(
        completions, solution, lambda index, right: float(right and has_structure(completions[index]))
    )


def cosine(
    completions: list[str],
    completion_ids: list[list[int]],
    solution: list[Any],
    cosine_max_len: int,
    cosine_min_len_value_wrong: float = -0.5,
    cosine_max_len_value_wrong: float = 0.0,
    cosine_min_len_value_correct: float = 1.0,
    cosine_max_len_value_correct: float = 0.5,
    **columns: Any,
) -> list[float | None]:
    """Return a value by correctness and length: right answers lose with length, wrong ones gain.

    The four values are those at length 0 and at `cosine_max_len` tokens, joined by half a cosine. All
    are None without a gold answer. Raise what math_verify raises. With the defaults and cosine_max_len
    100, a right answer of 50 tokens gets 0.75, a wrong one -0.25.
    """

    def value(index: int, right: bool) -> float:
        """Return the value of one completion."""
        wrong_ends = (cosine_min_len_value_wrong, cosine_max_len_value_wrong)
        right_ends = (cosine_min_len_value_correct, cosine_max_len_value_correct)
        ends = right_ends if right else wrong_ends
        return half_cosine(len(completion_ids[index]), cosine_max_len, *ends)

    return _by_verdict(completions, solution, value)


def length(
    completions: list[str], completion_ids: list[list[int]], solution: list[Any], **columns: Any
) -> list[float | None]:
    """Return 0.5 for the group's shortest completion to -0.5 for its longest, by number of tokens.

    All get 0.0 if all are equally long. Wrong answers get at most 0; all are None without a gold answer.
    Raise what math_verify raises.
    """
    gold = read_gold(solution[0])
    if not gold:
        return [None] * len(completions)
    right = [is_right(gold, final_answer(completion)) for completion in completions]
    return list(relative_lengths([len(ids) for ids in completion_ids], right))


def read_gold(solution: Any) -> list[Any]:
    """Return the expressions that math_verify reads from a gold solution, [] if none. Raise as _read."""
    return _read(final_answer(str(solution)))


def is_right(gold: list[Any], answer: str) -> bool:
    """Return whether a text's answer equals the gold answer. Raise what math_verify's verify raises."""
    # The order matters: verify(gold, answer).
    return bool(verify(gold, _read(answer), timeout_seconds=None, raise_on_error=True))


def _by_verdict(
    completions: list[str], solution: list[Any], value: Callable[[int, bool], float]
) -> list[float | None]:
    """Return `value(index, is right)` per completion; None without gold answer. Raise as `is_right`."""
    gold = read_gold(solution[0])
    if not gold:
        return [None] * len(completions)
    return [value(index, is_right(gold, final_answer(text))) for index, text in enumerate(completions)]


def _read(text: str) -> list[Any]:
    """Return the expressions that math_verify reads from a text; [] if it cannot read the text.

    Raise MemoryError or RecursionError: these depend on the machine, not on the answer.
    """
    try:
        bare = _delimited(_plain(text))
        return list(parse(bare, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises many errors on model text, for example on "-0733"
        return []


def _plain(text: str) -> str:
    r"""Return a text without forms that math_verify misreads.

    Dollar signs, separators of thousands, a leading plus, markdown and quotes are removed, and the
    typographic minus and scientific notation are rewritten. Example: "**1.5e3**" becomes "1500".
    """
    text = text.replace("\u2212", "-").strip().strip(_EMPHASIS).strip()
    text = _THOUSANDS.sub("", text.replace(r"\$", ""))
    text = _BOXED_SCIENTIFIC.sub(lambda found: rf"\boxed{{{Decimal(found[1]):f}}}", text)
    if _SCIENTIFIC.fullmatch(text):
        return f"{Decimal(text):f}"
    return text.removeprefix("+")


def _delimited(text: str) -> str:
    """Put dollars around bare mathematics, else math_verify reads 2 from `2x+1`. Return the text."""
    if any(mark in text for mark in _DELIMITERS):
        return text
    is_words = _WORD.search(text) and r"\begin{" not in text
    return text if is_words or _NUMBER.fullmatch(text) else f"${text}$"
