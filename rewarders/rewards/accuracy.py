"""The reward `accuracy`, and the only module that imports math_verify.

math_verify's own time limits are off: they return "wrong" when they strike. The pool kills instead.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

_ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
_NUMBER = re.compile(r"[-+]?[\d.,:]*(e[-+]?\d+)?\s*%?", flags=re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")

# It warns in every process that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def accuracy(
    prompts: list[str], completions: list[str], solution: list[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the answer equals the gold solution, else 0.0; None for all if no gold can be read.

    Example:
        >>> accuracy(["", ""], ["It is <answer>72</answer>", "71"], ["#### 72", "#### 72"])
        [1.0, 0.0]
    """
    gold = _read(_after_marker(str(solution[0])))
    if not gold:
        return [None] * len(completions)
    return [_verdict(gold, _read(final_answer(completion))) for completion in completions]


def final_answer(completion: str) -> str:
    """The part of a completion that holds its answer.

    The inside of the last <answer> block, else what follows the last ####, else everything. The
    tags go because math_verify finds no number that touches them.
    """
    blocks = _ANSWER.findall(completion)
    return blocks[-1] if blocks else _after_marker(completion)


def _after_marker(text: str) -> str:
    return text.rpartition("####")[2]


def _read(text: str) -> list[Any]:
    """What math_verify makes of a text; nothing where it cannot read it."""
    try:
        return parse(
            _delimited(text.strip()),
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
    except (MemoryError, RecursionError):
        raise  # these depend on the machine, not on the answer
    except Exception:  # sympy raises whatever it likes on untrusted text, such as "-0733"
        return []


def _delimited(text: str) -> str:
    """Bare mathematics between dollars; without them math_verify reads 2 from `2x+1`."""
    bare = not (
        any(mark in text for mark in _DELIMITERS) or _NUMBER.fullmatch(text) or _WORD.search(text)
    )
    return f"${text}$" if bare else text


def _verdict(gold: list[Any], answer: list[Any]) -> float:
    # The order matters: verify(gold, answer).
    return float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
