r"""Words beside a formula: units, "x is", "the answer is". Products such as xy are not words."""

import re

_NO_WORDS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt lim max min gcd "
        "lcm mod det pi inf arg deg dim ker sup hundred thousand million billion trillion 万 亿",
    )
)
_SHORT_WORDS = frozenset(
    re.findall(
        r"\w+",
        "no to is of at in by as or on it cm mm km kg mg ml lb ft oz hr pm am sq yd kw hz us rs so we "
        "and was day had has may way man any all",
    )
)
_MEANING = frozenset(
    re.findall(r"\w+", "than least most not minus negative plus half quarter third twice under over")
)
_POWER = r"(?: ?\^ ?\{?-?[23]\}?|[23](?!\w))?"
_WORD = re.compile(
    rf"\\(?:text|textbf|textrm|textit|mbox|mathrm|mathbf|rm) ?\{{([^{{}}\d]*)\}}{_POWER}"
    rf"|(?<![\\a-zA-Z])((?<=[\d}})] )[msghLJNWVKC]{_POWER}(?![\w^(+*=-])|[^\W\d_]{{2,}}|[\u3040-\u9fff])"
    rf"{_POWER}"
    rf"(?: ?/ ?[a-zA-Z]+{_POWER})?"
)
_RUN = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")
_BETWEEN = " .:,=/"


def is_word(letters: str) -> bool:
    """Return whether letters are a word. Products have two letters, or three without e, i, o and u."""
    lower = letters.lower()
    if lower in _NO_WORDS:
        return False
    if lower in _SHORT_WORDS or len(letters) > 3 or not letters.isascii():
        return True
    return len(letters) == 3 and bool(set(lower) & set("eiou"))


def has_sentence(text: str) -> bool:
    """Return whether a text has two words or more, so that its last part may be its answer."""
    return sum(is_word(run) for run in _RUN.findall(text)) > 1


def without_words(text: str) -> str | None:
    r"""Return a text without the words before and after its formula; "" if it has only words.

    Return None if the words are part of the meaning: "at least 3", "5 of 7". Example: "x is 5 cm" and
    "5\text{ cm}" become "x is 5" and "5".
    """
    spans = [found.span() for found in _WORD.finditer(text) if _stands_alone(found)]
    if any(text[slice(*span)].lower() in _MEANING for span in spans):
        return None
    begin, end = 0, len(text)
    while spans and not text[begin : spans[0][0]].strip(_BETWEEN):
        begin = spans.pop(0)[1]
    while spans and not text[spans[-1][1] : end].strip(_BETWEEN):
        end = spans.pop()[0]
    return None if spans else text[begin:end].strip(_BETWEEN if (begin, end) != (0, len(text)) else " ")


def _stands_alone(found: re.Match[str]) -> bool:
    """Return whether a match is a word or a unit, and stands outside of braces."""
    before = found.string[: found.start()]
    if before.count("{") != before.count("}"):
        return False
    if found[1] is not None:
        return found[1].strip() not in ("e", "i", "d")
    return found[2][1:2] in ("", " ", "^", "2", "3") or is_word(found[2])
