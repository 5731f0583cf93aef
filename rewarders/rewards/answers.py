"""Finding the answer in a text, and the reward `correctness`, which compares it as a word or number.

The answer is in the last <answer> block, else after the last ####, else in the last \\boxed{}, else
it is the whole text if that stands alone, else its last part (parts.py).
"""

import re
from fractions import Fraction
from typing import Any

_BOX, _BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{"), re.compile("[{}]")
_BARE_BOX = re.compile(r"\\boxed\s*(\d[\d.,]*(?<![.,])|[a-zA-Z](?![a-zA-Z]))")
_NUMBER_LINE = re.compile(r"\s*[-$€£]*\d[\d.,/]*%?[ \t]*(?=\n)")
_LAST_NUMBER = re.compile(r"(?:^|(?<![\d\s])\s+|=)(-?(?:\d*\.)?\d+)$")


def final_answer(text: str) -> str:
    r"""Return the part of a text that holds its answer; the whole text if nothing marks the answer.

    That is the last <answer> block, else the text after the last ####. If there is a \boxed{} in it, the
    last one alone is returned, as "\boxed{72}". The rewarder calls this function outside of the sandbox,
    so the time is in proportion to the text's length.
    """
    inside = marked_part(text)
    box = last_box(inside)
    return inside if box is None else rf"\boxed{{{box}}}"


def marked_part(text: str) -> str:
    """Return the last <answer> block, else the text after the last ####, else the whole text.

    Of a block the inside is returned. A block without </answer> does not count, nor does what a model
    only thought.
    """
    text = _said(text)
    inside, end = after_marker(text), 0
    if "\n" in inside.strip() and _BOX.search(text) and not _BOX.search(inside):
        inside = text  # a heading of Markdown behind a box
    while (tag := text.find("<answer>", end)) >= 0 and (closed := text.find("</answer>", tag)) >= 0:
        end = closed + len("</answer>")
        inside = after_marker(text[tag + len("<answer>") : closed])
    return inside


def _said(text: str) -> str:
    """Return what stands behind the last </think>, and before a <think> that is open.

    If that is nothing, tags may be wrong: return the whole text if it has a block of <answer>, or if
    nothing follows </think>.
    """
    after = text.rpartition("</think>")[2]
    said = after.partition("<think>")[0]
    return said if said.strip() or (after.strip() and "</answer>" not in text) else text


def after_marker(text: str) -> str:
    """Return the text after the last ####, GSM8K's mark of an answer; the whole text without a mark.

    Of several lines whose first is a number, this line is returned.
    """
    _, mark, rest = text.rpartition("####")
    number = _NUMBER_LINE.match(rest) if mark else None
    return number[0] if number else rest


def last_box(text: str) -> str | None:
    r"""Return the inside of the last \boxed{} whose braces are closed; None if there is none.

    Example: of "\boxed{1}, so \boxed{\frac{1}{2}}" the inside is "\frac{1}{2}".
    """
    return next(reversed(all_boxes(text)), None)


def all_boxes(text: str) -> list[str]:
    r"""Return the insides of all \boxed{} whose braces are closed, in order; of nested boxes the inner.

    Return [] if there is none.
    """
    text = _BARE_BOX.sub(r"\\boxed{\1}", text)
    starts = {opening.end() for opening in _BOX.finditer(text)}
    opened: list[int] = []
    found: list[tuple[int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (begin := opened.pop()) in starts and not (found and found[-1][0] > begin):
            found.append((begin, brace.start()))
    return [text[begin:end] for begin, end in found]


def correctness(
    prompts: list[Any], completions: list[str], solution: list[Any], **columns: Any
) -> list[float | None]:
    """Return for each completion 2.0 for exactly the gold answer, 1.5 for an equal number, else 0.0.

    The answer is in the block of the last <answer>; "..." is none. A number must be at its end. The
    group's gold answer is the text of solution[0] after its last ####, or the whole text. If it is
    empty, all get None. `prompts` and `columns` are ignored.
    Example: for "#### 72", "<answer>72</answer>" gets 2.0 and "<answer>= 72.0</answer>" gets 1.5.
    """
    gold = after_marker(str(solution[0])).strip()
    if not gold:
        return [None] * len(completions)
    return [_value(tagged_answer(completion), gold) for completion in completions]


def tagged_answer(completion: str) -> str | None:
    """Return the inside of the block that the last <answer> begins, without white space around it.

    Return None if there is no <answer>, if no </answer> follows the last one, or if the inside is just
    "...".
    """
    _, opened, rest = completion.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    answer = inside.strip()
    return answer if opened and closed and answer != "..." else None


def _value(answer: str | None, gold: str) -> float:
    """Return 2.0 if `answer` is exactly `gold`, 1.5 if both end in an equal number, else 0.0.

    An answer that is None gets 0.0.
    """
    if answer is None:
        return 0.0
    if answer == gold:
        return 2.0
    number = _last_number(answer)
    return 1.5 if number is not None and number == _last_number(gold) else 0.0


def _last_number(text: str) -> Fraction | None:
    """Return the number at the end of a text, behind its begin, a space or "="; None without one.

    Dollar and percent signs and commas between digits are ignored, and no digit may stand before the
    space. Over 1,000 digits give None. Example: "= 72.0%" gives 72, "x72" and "5 72" None.
    """
    text = re.sub(r"[$%]|(?<=\d),(?=\d{3}(?!\d))", "", text).strip()
    found = _LAST_NUMBER.search(text)
    return Fraction(found[1]) if found and len(found[1]) <= 1000 else None
