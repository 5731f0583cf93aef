"""Where the answer is in a text. Pure string work.

By convention it is in the last <answer> block, else after the last ####, else in the last \\boxed{},
else somewhere in the text, the last that can be read as mathematics.
"""

import re

_ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{")


def final_answer(text: str) -> str:
    """The part of a text that holds its answer; the whole text if nothing marks it.

    The tags go because math_verify finds no number that touches them, and all boxes but the last because
    it would make a set of them.
    """
    blocks = _ANSWER.findall(text)
    inside = blocks[-1] if blocks else after_marker(text)
    box = last_box(inside)
    return inside if box is None else rf"\boxed{{{box}}}"


def after_marker(text: str) -> str:
    """What follows the last ####, as GSM8K marks its answers; everything if there is none."""
    return text.rpartition("####")[2]


def last_box(text: str) -> str | None:
    """The inside of the last \\boxed{} whose braces are closed; None if there is none.

    Example:
        >>> last_box(r"\boxed{1}, so \boxed{\frac{1}{2}}")
        '\\frac{1}{2}'
    """
    for opening in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, opening.end())
        if end is not None:
            return text[opening.end() : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None
