"""Finding the answer in a text, and the reward `correctness`, which compares it as a word or number.

The answer is in the last <answer> block, else after the last ####, else in the last \\boxed{}, else
it is the whole text if that stands alone, else its last part with a number or a formula.
"""

import re
from fractions import Fraction
from typing import Any

from penstock.rewarders.rewards.words import has_sentence

_BOX, _BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{"), re.compile("[{}]")
_BARE_BOX = re.compile(r"\\boxed\s*(\d[\d.,]*(?<![.,])|[a-zA-Z](?![a-zA-Z]))")
_PHRASE = re.compile(
    r"\b(?:answer[\s*]*:|(?:answer|option|choice) (?:is|(?:would|will|must|should) be)\b\s*:?)"
    r"|(?:答案|故选|应选)[是为:：]*",  # noqa: RUF001
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"$|.*:$|(?:in)?(?:correct|valid)\b|(?:right|reasonable|verified|confirmed|clear|positive|negative|round(?:ed)?"
    r"|simplified|exact|unique|known|as|an?|the|given|shown|obtained|found|displayed|presented|written|stated"
    r"|below|above|then|thus|therefore|simply|in|to|what|easy|this|that|here)\b",
    re.IGNORECASE,
)
"""What stands behind "answer is" and is no answer itself: "correct", "as follows", "an integer"."""
_MAYBE = "or|maybe|perhaps|possibly|alternatively"
_SEVERAL = re.compile(
    r"\W*+(?:[a-z]+ly )?(?:(?:not|never|neither|either|both|between|any|anything|one of|from .*\bto"
    r"|at (?:least|most)|negative|minus|half|twice|log|ln|(?:less|more|fewer|greater) than)\b"
    r"|(?:(?=[^\s,;|&]*\d)[^\s,;|&]++|\(?[A-J]\)?)"
    rf"(?:,\s|\s*[;|&/]|\s+(?:and|to|vs|as well as|{_MAYBE})\b|\s*\((?:{_MAYBE})\b|(?<=\))\s*(?=\())"
    rf"\W*+(?:(?:but|it|that|could|might|may|be|also|{_MAYBE})\W+)*+(?:\d|[a-z] ?= ?-?\d|[A-J]\b))"
    r"|.*\bor\b",
    re.IGNORECASE | re.DOTALL,
)
"""More than one answer, or none, behind "answer is": "5 and 6", "B, C", "5 or maybe 6", "not 5"."""
_CHOICE = re.compile(
    r"[\s*]*(?:(?:the )?(?:option|choice|letter) )?"
    r"(\([A-J]\)|[A-J]\b(?!'| ?(?:[-+/=^<>]|\*(?!\*))))(?! (?:is|was) (?:wrong|not|false|incorrect)\b)"
    r"(?!(?<=[AI]) (?!(?:because|since|as|with|for|by|from|due|when|if|and|but|not|which|that|given|in"
    r"|is|at|on|according|based|of|only|while|where|so|to|here)\b)[a-z])"
)
_FUNCTION = "(?:sqrt|sin|cos|tan|log|ln|exp)"
_CUT_BEFORE = re.compile(
    r"(?:\b(?:not|not equals?(?: to)?|never|than|negative|minus|(?:any|every|no)thing but|all but|except"
    r"|either|excluding|divisible by|exceeds|above|below|(?:square|cube|root|multiples?|powers?) of"
    r"|maybe|perhaps|possibly|alternatively|(?<=\d )or|(?:between|both)\b[^.\n]*\band"
    r"|one of (?:[\d., ]|and\b|or\b)*)"
    r"|n't|(?<![-=\n])[<>]=?|[≤≥≠√±\u00d7^_]|\\(?:[lg]eq?|neq?|[lg]t)"
    r"|(?:\b[a-zA-Z]|[\d)]|\b(?:equals|is|be|was))[ \t][-\u2212] ?\(?"
    rf"|[\w)] \+|\b{_FUNCTION}|\d ?x|[\d$)}}] (?:and|or|&)|\d out of|\b1 in"
    r"|\b(?:ratio|odds)\b[^.\n]*\d to"
    r"|\w\(|[(\[{][^()\[\]{}]*,) *\$?$",
    re.IGNORECASE,
)
_CUT_BEHIND = re.compile(
    r" ?(?:[√±\u00d7·÷^]|\\(?:pm|times|cdot|sqrt|pi)|\+ ?[\w(\\]|\*\*[\w(]"
    rf"|[xX] ?\d|[a-z]\^|{_FUNCTION}\b)"
    r"| (?:plus|minus|squared|cubed|factorial|dozens?|halves|thirds|quarters"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred)ths"
    r"|(?:times|multiplied by|divided by|of|out of|over|mod|choose) \d"
    r"|to the (?:power|second|third|(?:four|fif|six|seven|eigh|nin|ten)th|\d|[a-z]\b))"
)
"""What shows that a number is denied, or one of several, or a part of a formula, before or behind it."""
_SAME_NAME = re.compile(r"\b([a-zA-Z]) ?=[^=\n]*(?:\band|\bor|,) \$?\1 ?=[^=\n]*$")
"""The last of several values of a name: x = 2 or x = 3."""
_LARGER = re.compile(
    r"(?<![\d.,])(?:\d[\d.,]* (?:(?:week|day|hour|hr|minute|min|yard|pound|lb|dollar|euro|kilogram"
    r"|kilometer|meter)s?|feet|foot|ft|kg|km|m)(?:,|,? and)? )+$"
)
_SMALLER = re.compile(
    r" (?:(?:day|hour|hr|minute|min|second|sec|inche|inch|ounce|cent|gram|meter|centimeter)s?|feet|foot"
    r"|in|oz|g|cm)\b"
)
"""Units before and behind the last part of a quantity: 2 hours and 30 minutes."""
_NEXT = re.compile(rf"[.!?](?!\w)(?!\s*(?:{_MAYBE})\b)|\n", re.IGNORECASE)
_SENTENCES = re.compile(r"[.!?:]\s+[A-Z]|\n(?!\s*\\|&)|\w\s*[!?]\s+\w")
_NUMERAL = r"(?:\d[\d.,:'%/^*!\w]*(?<![.,:'])|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\})"
_PART = re.compile(
    r"\$\$[^$]+\$\$|(?<![\\\d])\$[^$\n]+(?<!\\)\$(?!\d)|\\\([^\n]{1,500}?\\\)|\\\[.{1,500}?\\\]"
    rf"|(?<![^\s=(*\"'“$€£¥₹:~])[-+\u2212]?[$€£¥₹]?"
    rf"{_NUMERAL}(?:(?:\s?[-+*/=^ ]\s?| : )[-+]?\(?{_NUMERAL}\)?)*"
    r"(?: ?\\?%|\\(?:sqrt|[dt]?frac) ?(?:\{[^{}]*\})+|\\pi\b| pi\b"
    r"| (?:hundred|thousand|lakhs?|million|crores?|billion|trillion)\b)?",
    re.DOTALL,
)
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
        inside = text[tag + len("<answer>") : closed]
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


def last_part(text: str) -> str:
    """Return the part of a text after its last "answer is" or "answer:", else the text's last part.

    A part is a formula in dollars, or a number with what belongs to it, such as 3 million; of "x = 5"
    the 5. Directly behind "answer is" a choice from A to J is a part too. In the sentence behind
    "answer is", the first part with a digit counts. For several answers there ("5 and 6"), a denied
    one ("not 5"), a part of a formula ("2 ± 1"), and up to three words, return the whole rest of the
    sentence. Without "answer is", return the sentence of the last part for those.
    """
    phrases = [found.end() for found in _PHRASE.finditer(text)]
    tail = text[phrases[-1] :].strip(" \t\r\n*:") if phrases else text
    rest = _NEXT.split(tail)[0] if phrases else ""
    if _SEVERAL.match(rest):
        return rest
    if choice := _CHOICE.match(rest):
        return choice[1]
    is_words = phrases and rest.count(" ") < 3 and not _FILLER.match(rest.strip())
    parts = [*_PART.finditer(rest)] or ([] if is_words else [*_PART.finditer(text)][-1:])
    part = next((part for part in parts if re.search(r"\d", part[0])), parts[0] if parts else None)
    if part is None:
        return rest
    if compound := _compound(part):
        return compound
    if _is_cut(part):
        return rest if phrases else _sentence(part)
    return _whole(part)


def _compound(part: re.Match[str]) -> str:
    """Return the quantity of several units that ends with a part: 2 hours and 30 minutes; "" without."""
    begin = max(0, part.start() - 100)
    larger = _LARGER.search(part.string[begin : part.start()])
    smaller = _SMALLER.match(part.string, part.end())
    return part.string[begin + larger.start() : smaller.end()] if larger and smaller else ""


def _sentence(part: re.Match[str]) -> str:
    """Return the sentence or line of a text around a part, without the point at its end."""
    ends = [found.span() for found in _NEXT.finditer(part.string)]
    begin = max((end for _, end in ends if end <= part.start()), default=0)
    return part.string[begin : min((at for at, _ in ends if at >= part.end()), default=None)].strip()


def _is_cut(part: re.Match[str]) -> bool:
    """Return whether a part is denied, one of several, or cut from a formula; but not 2 in "1 x 2=2"."""
    before, behind = part.string[max(0, part.start() - 100) : part.start()], part.string[part.end() :]
    return bool(
        _SAME_NAME.search(before + part[0][:100])
        or ("=" not in part[0] and _CUT_BEFORE.search(before))
        or _CUT_BEHIND.match(behind)
    )


def _whole(part: re.Match[str]) -> str:
    """Return a part that `_PART` found: a formula in dollars, or what stands behind its last "="."""
    text = part[0]
    return text if text.endswith("$") or text.startswith("\\") else text.rpartition("=")[2]


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


def _last_number(text: str) -> Fraction | None:
    """Return the number at the end of a text, behind its begin, a space or "="; None without one.

    Dollar and percent signs and commas between digits are ignored, and no digit may stand before the
    space. Over 1,000 digits give None. Example: "= 72.0%" gives 72, "x72" and "5 72" None.
    """
    text = re.sub(r"[$%]|(?<=\d),(?=\d{3}(?!\d))", "", text).strip()
    found = _LAST_NUMBER.search(text)
    return Fraction(found[1]) if found and len(found[1]) <= 1000 else None
