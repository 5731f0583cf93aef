"""Finding the answer in a text. Pure string functions.

The answer is in the last <answer> block, else after the last ####, else in the last \\boxed{}, else
it is the last part of the text that math_verify can read.
"""

import re

_ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{")


def final_answer(text: str) -> str:
    """Return the part of a text that holds its answer; the whole text if nothing marks the answer.

    Tags are removed, because math_verify finds no number that touches a tag. All boxes but the last are
    removed, because math_verify would read several boxes as a set.
    """
    blocks = _ANSWER.findall(text)
    inside = blocks[-1] if blocks else after_marker(text)
    box = last_box(inside)
    return inside if box is None else rf"\boxed{{{box}}}"


def after_marker(text: str) -> str:
    """Return the text after the last ####, GSM8K's mark of an answer; the whole text without a mark."""
    return text.rpartition("####")[2]


def last_box(text: str) -> str | None:
    r"""Return the inside of the last \boxed{} whose braces are closed; None if there is none.

    Example: of "\boxed{1}, so \boxed{\frac{1}{2}}" the inside is "\frac{1}{2}".
    """
    for opening in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, opening.end())
        if end is not None:
            return text[opening.end() : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one before `start`; None if there is none."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None
