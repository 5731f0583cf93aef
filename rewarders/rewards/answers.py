"""Finding the answer in a text, and the reward `correctness`, which compares it as a word or number.

The answer is in the last <answer> block, else after the last ####, else in the last \\boxed{}, else
it is the whole text if that stands alone, else its last part with a number or a formula.
"""

import re
from typing import Any

from penstock.rewarders.rewards.words import has_sentence

_BOX, _BRACE = re.compile(r"\\boxed\s*\{"), re.compile("[{}]")
_PHRASE = re.compile(
    r"\b(?:answer\s*:|(?:answer|option|choice) is\b\s*:?)|(?:答案|故选|应选)[是为:：]*",  # noqa: RUF001
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"\W*+(?:(?:not|never|neither|either|between|any|one of|at (?:least|most)|minus|half|twice|log|ln"
    r"|(?:less|more|fewer|greater) than)\b"
    r"|(?:(?=[^\s,;|&]*\d)[^\s,;|&]++|[A-J])(?:,\s|\s*[;|&]|\s+(?:and|to|vs)\b)\W*+(?:\d|[A-J]\b))"
    r"|.*\bor\b",
    re.IGNORECASE | re.DOTALL,
)
"""More than one answer, or none, behind "answer is": "5 and 6", "B, C", "5 or maybe 6", "not 5"."""
_CHOICE = re.compile(r"[\s*]*(\([A-J]\)|[A-J]\b(?! ?[-+*/=^]))")
_SENTENCES = re.compile(r"[.!?:]\s+[A-Z]|\n(?!\s*\\|&)|\w\s*[!?]\s+\w")
_NUMERAL = r"(?:\d[\d.,:'%/^*!\w]*(?<![.,:'])|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\})"
_PART = re.compile(
    r"\$\$[^$]+\$\$|(?<![\\\d])\$[^$\n]+(?<!\\)\$(?!\d)|\\\([^\n]+?\\\)|\\\[.+?\\\]"
    rf"|(?<![^\s=(*\"'“$€£¥₹:~])[-+\u2212]?[$€£¥₹]?"
    rf"{_NUMERAL}(?:(?:\s?[-+*/=^ ]\s?| : )[-+]?\(?{_NUMERAL}\)?)*"
    r"(?: ?\\?%|\\(?:sqrt|[dt]?frac) ?(?:\{[^{}]*\})+|\\pi\b| pi\b"
    r"| (?:hundred|thousand|million|billion|trillion)\b)?",
    re.DOTALL,
)
_LAST_NUMBER = re.compile(r"(?:^|\s|=)(-?(?:\d*\.)?\d+)$")


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

    Of a block the inside is returned. A block without </answer> does not count. Nor does what stands
    before the last </think>, or behind a <think> that is open.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    inside, end = after_marker(text), 0
    while (tag := text.find("<answer>", end)) >= 0 and (closed := text.find("</answer>", tag)) >= 0:
        end = closed + len("</answer>")
        inside = text[tag + len("<answer>") : closed]
    return inside


def after_marker(text: str) -> str:
    """Return the text after the last ####, GSM8K's mark of an answer; the whole text without a mark."""
    return text.rpartition("####")[2]


def last_box(text: str) -> str | None:
    r"""Return the inside of the last \boxed{} whose braces are closed; None if there is none.

    Example: of "\boxed{1}, so \boxed{\frac{1}{2}}" the inside is "\frac{1}{2}".
    """
    return next(reversed(all_boxes(text)), None)


def all_boxes(text: str) -> list[str]:
    r"""Return the insides of all \boxed{} whose braces are closed, in order; of nested boxes the inner.

    Return [] if there is none.
    """
    starts = {opening.end() for opening in _BOX.finditer(text)}
    opened: list[int] = []
    found: list[tuple[int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (begin := opened.pop()) in starts and not (found and found[-1][0] > begin):
            found.append((begin, brace.start()))
    return [text[begin:end] for begin, end in found]


def last_part(text: str) -> str:
    """Return the part of a text after its last "answer is" or "answer:", else the text's last part.

    A part is a formula in dollars, or a number with what belongs to it, such as 3 million; of "x = 5"
    the 5. Directly behind "answer is" a choice from A to J is a part too. In the sentence behind
    "answer is", the first part with a digit counts. For several answers there ("5 and 6"), or a denied
    one ("not 5"), return the whole rest of the sentence. Return "" if the text has no part.
    """
    phrases = [found.end() for found in _PHRASE.finditer(text)]
    rest = re.split(r"[.!?](?!\w)|\n", text[phrases[-1] :].strip())[0] if phrases else ""
    if _SEVERAL.match(rest):
        return rest
    if choice := _CHOICE.match(rest):
        return choice[1]
    parts = _PART.findall(rest) or _PART.findall(text)[-1:] or [""]
    part = next((part for part in parts if re.search(r"\d", part)), parts[0])
    return str(part) if part.endswith("$") or part.startswith("\\") else str(part).rpartition("=")[2]


def has_phrase(text: str) -> bool:
    """Return whether a text has "answer is" or "answer:", in any case, or such words in Chinese.

    "option is" and "choice is" count too.
    """
    return bool(_PHRASE.search(text))


def is_prose(text: str) -> bool:
    """Return whether a text has two words, and more than one sentence or line or over 200 letters."""
    return has_sentence(text) and (len(text) > 200 or bool(_SENTENCES.search(text.strip())))


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


def _last_number(text: str) -> float | None:
    """Return the number at the end of a text, behind its begin, a space or "="; None without one.

    Dollar and percent signs are ignored. Example: "= 72.0%" gives 72.0, "x72" None.
    """
    found = _LAST_NUMBER.search(text.replace("$", "").replace("%", "").strip())
    return float(found.group(1)) if found else None
