"""Answers as values: what stands in a box or alone is read by `read_value`.

docs/rewards.md has the rules. A gold and an answer are read by the same functions.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from penstock.rewarders.rewards.formulas import expression, is_shallow, number_expression
from penstock.rewarders.rewards.numbers import DIGITS, read_number
from penstock.rewarders.rewards.spelling import spell
from penstock.rewarders.rewards.words import directions, is_words, plain_words, without_words

_HALF = re.compile(r"(?<=\d) ?(?P<half>[ap])\.? ?m\.?", re.IGNORECASE)
_DATE = re.compile(r"\d+/\d+/\d+|\d{4}-\d\d?-\d\d?")
_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sep(?:t|tember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b",
    re.IGNORECASE,
)
_ZEROS = re.compile(r"(?<![\d.,])0+(?=\d(?![\d.,]*\d[.,]))")
"""Zeros before a day or month: March 05."""
_NO_OTHER = r"(?!\s*(?:[,;&|/]|(?:or|and)\b))"
_CHOICE = re.compile(
    rf"\( ?([A-J]) ?\){_NO_OTHER}[.:]?\s*(.*)|([A-J])(?:[.:)]{_NO_OTHER}(?:\s*(.+))?)?", re.DOTALL
)
_OTHER_CHOICE = re.compile(r"(?<!\w)\([A-J]\)|(?<![\w(])[A-J][.:)](?=\s+\S)")
_LEAD = re.compile(
    r"(?:(?:(?:the|so|final|correct|right) )*(?:answer|ans|option|choice)(?: is)?\b ?:?"
    r"|(?:答案|故选|应选)[是为]?:?) ?(?=.)",
    re.I,
)
_BARE_MARK = re.compile(r"[()\[\]{}\u2983\u2984,;:]|(?<![a-zA-Z\\])(?:and|or|\\cup)(?![a-zA-Z])")
_MARK = re.compile(rf"(?<![\d,.]){DIGITS}|{_BARE_MARK.pattern}")
_LETTER = (
    r"\\?[a-zA-Z]+'*(?:_ ?(?:\{[\w +-]*\}|\w+))?(?:\^ ?(?:\{ ?-1 ?\}|-1))?"
    r"(?: ?(?:\((?:[a-zA-Z\d, |<>']|\\(?:cap|cup|mid)\b)*\)|\[[a-zA-Z\d, ]*\]))?"
)
_NAME = re.compile(
    rf"\\angle ?[A-Z]|(?:m ?)?(?:\\[a-z]+ ?)?\{{? ?[A-Z]{{2,}} ?\}}?|\|? ?{_LETTER} ?\|?"
    rf"|\( ?{_LETTER}(?: ?, ?{_LETTER})+ ?\)|{_LETTER} ?: ?{_LETTER}"
    rf"|\\frac ?\{{ ?{_LETTER} ?\}} ?\{{ ?{_LETTER} ?\}}"
)
_MATRIX = re.compile(
    r"\(?\[?\\begin ?\{((?:[pbB]|small)?matrix|array)\}(?: ?\{[lcr| ]*\})?((?:(?!\\end).)*)"
    r"\\end ?\{\1\}\]?\)?",
    re.DOTALL,
)
_ROW_END = re.compile(r"\\\\(?: ?\[[\d.]+ ?[a-z]+\])?")
_BUILDER = re.compile(
    rf"\u2983 ?{_LETTER}(?: ?\\in ?\\mathbb ?\{{? ?R ?\}}?)? ?(?:\\mid|\\vert|\||:) ?(.+)\u2984"
)
_RANGE = re.compile(rf"({DIGITS}) ?- ?({DIGITS})( ?%)?")
_RELATION = re.compile(r"(=|[<>]|\\(?:in|[lg][et])(?![a-z]))")
_MIRRORED = {">": "<", r"\gt": "<", r"\ge": r"\le"}
_SUM = re.compile(
    r"(?:[^a-zA-Z\\<>!,]|\\(?:times|cdot|frac|div|sqrt)|(?<=\d),(?=\d{3})|(?<=\d) ?x ?(?=\d))+"
)
_OPENING, _CLOSING, SET = tuple("([{\u2983"), tuple(")]}\u2984"), "\u2983\u2984"
_SEPARATORS, _LONGEST = (";", (",", "and", "or", r"\cup")), 2000


@dataclass(frozen=True)
class Value:
    """A value as it is written: a formula, words, or a row of terms such as 12:30.

    `text` is spelled as `spell` returns it. `half` is "a" (a.m.) or "p" (p.m.) of a time, else "".
    `label` has the words that were left out beside it, and `sides` are those of direction.
    """

    text: str
    is_formula: bool = True
    half: str = ""
    label: str = ""
    sides: frozenset[str] = frozenset()

    @cached_property
    def expression(self) -> Any:
        """Return the sympy expression that math_verify reads in the text, None if it reads none.

        None comes for words, and for a formula that is too long, too deep, or would be misread. Raise
        ZeroDivisionError for a division by zero, MemoryError or RecursionError from sympy.
        """
        return expression(self.text) if self.is_formula else None


@dataclass(frozen=True)
class NumberValue(Value):
    """A number without its percent sign or the k of $2k; `unit` is 1/100 for %, 1000 for k, else 1."""

    number: Fraction = Fraction(0)
    unit: Fraction = Fraction(1)

    @cached_property
    def expression(self) -> Any:
        """Return the number times its unit, for sympy.

        That is a Float for a text with a point and a number farther than 1/1000 from 0, else a Rational.
        """
        is_rounded = "." in self.text and abs(self.number) > Fraction(1, 1000)
        return number_expression(self.number * self.unit, is_rounded)


@dataclass(frozen=True)
class Group(Value):
    """Several values: `kind` is their brackets, "[)", or ":" of a ratio, "-" of a range, or ""."""

    kind: str = ""
    items: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Named(Value):
    """A value behind its name and an equals sign: x = 5, (a,b) = (1,2), f(x) = 2x."""

    name: str = ""
    value: Value | None = None


@dataclass(frozen=True)
class Choice(Value):
    """A letter from A to J, and the text of the choice if it is there."""

    letter: str = ""
    meaning: Value | None = None


def read_value(text: str) -> Value | None:
    """Return the value of a text that is an answer and nothing else; None if it cannot be read.

    A text that divides by zero, as 1/0 does, cannot be read. A leading "the answer is" is left out.
    Example: "$1,000$ dollars" is the number 1000. Raise MemoryError or RecursionError if the text is too
    large or too deep for sympy.
    """
    try:
        return _read_alone(text)
    except (ZeroDivisionError, ValueError, OverflowError):
        return None


def divides_by_zero(text: str) -> bool:
    """Return whether a text, read as an answer and nothing else, divides by zero, as 1/(2-2) does.

    Return False for a text that cannot be read for another reason. Raise MemoryError or RecursionError,
    as sympy does.
    """
    try:
        value = _read_alone(text)
    except ZeroDivisionError:
        return True
    except (ValueError, OverflowError):
        return False
    return value is not None and not is_defined(value)


def _read_alone(text: str) -> Value | None:
    """Return the value of a text that is an answer and nothing else; None if it cannot be read.

    A leading "the answer is" is left out. Over 2,000 characters, or 40 brackets open at once, are
    compared as they are. Raise ZeroDivisionError for a division by zero, ValueError or OverflowError for
    a number out of range, MemoryError or RecursionError, as sympy does.
    """
    if len(text) > _LONGEST or not is_shallow(text):
        return Value(text.strip()) if text.strip() else None
    text = spell(text)
    lead = _LEAD.match(text)
    value = _read(spell(text[lead.end() :]) if lead else text)
    return replace(value, sides=directions(text)) if value else None


def is_defined(value: Value) -> bool:
    """Return False for a value with a division by zero, such as 1/(2-2), else True.

    Raise MemoryError or RecursionError, as sympy does.
    """
    try:
        if "/" in value.text or r"\frac" in value.text:
            _ = value.expression
    except ZeroDivisionError:
        return False
    return True


def _read(text: str) -> Value | None:
    """Return the value of a text that `spell` returned; None if it cannot be read.

    The text is read as the first of these that fits: choice, date, range, time with a.m. or p.m.,
    several values or a relation, number, words, and formula with words around it. Raise
    ZeroDivisionError for a division by zero, ValueError or OverflowError for a number out of range,
    MemoryError or RecursionError, as sympy does.
    """
    if not re.search(r"\w|\\[a-z]", text):
        return None
    if choice := _CHOICE.fullmatch(text):
        letter, meaning = choice[1] or choice[3], choice[2] or choice[4]
        if meaning and _OTHER_CHOICE.search(meaning) and not re.match("(?:both|only|neither) ", meaning):
            return None
        value = (_read(spell(meaning)) or _as_words(meaning)) if meaning else None
        return None if isinstance(value, Choice) else Choice(text, False, letter=letter, meaning=value)
    if _MONTH.search(text) and re.search(r"\d", text):
        return Value(_sorted_dates(text), False)
    if _DATE.fullmatch(text):
        return Value(_in_words(text), False)
    if (ends := _RANGE.fullmatch(text)) and _is_rising(ends[1], ends[2]):
        return _group(text, "-", [ends[1], ends[2] + (ends[3] or "")])
    if half := _HALF.search(text):
        value = _read(text[: half.start()] + text[half.end() :])
        return replace(value, half=half["half"].lower()) if value else None
    if found := _read_compound(text):
        return found
    if number := read_number(text):
        return NumberValue(text, number=number[0], unit=number[1])
    bare = None if is_words(text) else without_words(text)
    if not bare:
        literal = plain_words(text)
        return Value(literal, False) if literal else None
    if bare != text:
        label = " ".join(re.findall(r"[^\W\d_]+", text.replace(bare, "", 1).casefold()))
        value = _read(spell(bare))
        return replace(value, label=label) if value else None
    value = Value(text)
    return value if _is_whole(text) or value.expression is not None else None


def _in_words(date: str) -> str:
    """Return 2024-03-05 as `_sorted_dates` returns March 5, 2024, and another date as it is."""
    year, *rest = date.split("-")
    if not rest or not 1 <= int(rest[0]) <= 12:
        return date
    at = 3 * int(rest[0]) - 3
    return _sorted_dates(f"{int(rest[1])} {'janfebmaraprmayjunjulaugsepoctnovdec'[at : at + 3]} {year}")


def _sorted_dates(text: str) -> str:
    """Return the dates of a text with the words of each sorted: "July 5 to June 6" is "5 jul to 6 jun".

    The ends of a range of two months keep their order, several dates are sorted.
    """
    short = re.sub(r"(?<=[a-z]{3})[a-z]+", "", text.lower())
    is_one = len(_MONTH.findall(text)) == 1
    ends = [short] if is_one else re.split(r" ?(?:\bto\b|\bunt\b|\bthr\b|-) ?", short)
    lists = [[end] if is_one else re.split(r"\b(?:and|or)\b|;", end) for end in ends]
    words = [
        [" ".join(sorted(re.findall(r"[a-z]{3}|\d+", _ZEROS.sub("", date)))) for date in dates]
        for dates in lists
    ]
    return " to ".join(" and ".join(sorted(dates)) for dates in words)


def _is_rising(low: str, high: str) -> bool:
    """Return whether two texts are numbers of which the first is smaller: 3-5 is a range, 5-3 is 2."""
    numbers = [found[0] for text in (low, high) if (found := read_number(text))]
    return len(numbers) == 2 and numbers[0] < numbers[1]


def _is_whole(text: str) -> bool:
    """Return whether a text, not "", has as many { as }, and none of = + - * / ^ at its end."""
    return text.count("{") == text.count("}") and text[-1] not in "=+-*/^"


def _read_compound(text: str) -> Value | None:
    """Return the value of a matrix, a list, a pair by plus or minus, a relation or a ratio, such as 3:2.

    All but a relation give a Group of their values. A relation gives a Named value (x = 5), the number
    of a sum (2+3 = 5), or plain text if it is false (6 = 5). Return None for another text, or if a part
    of it cannot be read. Raise ZeroDivisionError, MemoryError or RecursionError.
    """
    if found := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in _ROW_END.split(found[2]) if row.strip()]
        return _group(text, "matrix", [cell for row in rows for cell in [*row, "row"]])
    if r"\begin" in text:
        return None
    if found := _BUILDER.fullmatch(text):
        condition = _read(spell(found[1]))
        items = condition.items if isinstance(condition, Group) else (condition,)
        if all(isinstance(item, Named) and isinstance(item.value, Group) for item in items):
            return condition
    if r"\pm" in text or r"\mp" in text:
        return _group(text, "", _signed(text))
    kind, inside = "", text
    for _ in range(2):
        for separators in _SEPARATORS:
            if len(parts := [part for part in _split(inside, separators, kind) if part.strip()]) > 1:
                return _group(text, kind, parts)
        kind, inside = text[0] + text[-1], text[1:-1]
        if kind not in ("()", "[]", "(]", "[)", SET):
            break
    return _read_relation(text) or (
        _group(text, ":", parts) if len(parts := _split(text, (":",))) > 1 else None
    )


def _signed(text: str) -> list[str]:
    r"""Return the texts that a text with \pm or \mp stands for: "0, \pm 1" stands for 0, +1 and -1.

    Set braces around the text are left out. In a text with \mp, or with equations for two names, all
    signs change at once.
    """
    inside = text[1:-1] if text[0] == SET[0] and text.find(SET[1]) == len(text) - 1 else text
    parts = _split(inside, (",", "and", "or"))
    names = {part.partition("=")[0].strip() for part in parts if "=" in part}
    is_linked = r"\mp" in text or len(names) > 1
    parts = [text] if is_linked else parts
    return [
        part.replace(r"\pm", sign).replace(r"\mp", "+-"[sign == "+"])
        for part in parts
        for sign in ("+-" if is_linked or r"\pm" in part else "+")
    ]


def _read_relation(text: str) -> Value | None:
    """Return the value of an equation or inequality, None for another text or one that cannot be read.

    x = 5 and x in [0,1] are named values. x > 3 is a named interval, 3 < 5 is None. 2+3 = 5 is the
    number 5. A false equation of numbers, 6 = 5, is plain text. Raise ZeroDivisionError, MemoryError or
    RecursionError.
    """
    parts = [part.strip() for part in _RELATION.split(text)]
    signs, ends = parts[1::2], parts[::2]
    if {*signs} == {"="} and _is_false(ends):
        return Value(text, False)
    if {*signs} == {"="} and all(map(_SUM.fullmatch, ends[1:-1])):
        signs, ends = ["="], [ends[0], ends[-1]]  # x = 4*5 = 20
    if not all(ends) or len(signs) not in (1, 2):
        return None
    if signs[0] in ("=", r"\in"):
        return _read_equation(text, signs[0], *ends) if len(signs) == 1 else None
    return _read_inequality(text, signs, ends)


def _as_words(text: str) -> Value | None:
    """Return the words and numbers of a text, in lower case, as a value compared as text; None without.

    Example: "the East!" becomes the value "the east".
    """
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return Value(words, False) if words else None


def _read_equation(text: str, sign: str, left: str, right: str) -> Value | None:
    """Return the value of an equation (`sign` "="), or of x in [0,1] (`sign` "\\in").

    `text` is all of it, `left` and `right` are its sides. A name on one side gives a named value, a sum
    on the left the number on the right. Return None for anything else, or if a side cannot be read.
    Raise ZeroDivisionError, MemoryError or RecursionError.
    """
    if _NAME.fullmatch(right) and not _NAME.fullmatch(left):
        left, right = right, left
    value = _read(spell(right))
    if _NAME.fullmatch(left):
        return Named(text, name=left, value=value) if value else None
    is_sum = sign == "=" and _SUM.fullmatch(left)
    return value if is_sum and isinstance(value, NumberValue) else None


def _read_inequality(text: str, signs: list[str], ends: list[str]) -> Value | None:
    """Return the named interval of an inequality such as 1<x or 1<x<2; None if it cannot be read.

    None are 3<5, |x|>3 and signs of both directions. `ends` are the texts around one or two `signs`, and
    `text` is all. Raise ZeroDivisionError, MemoryError or RecursionError.
    """
    if signs[0][0] == ">" or signs[0][:2] == r"\g":
        signs, ends = [_MIRRORED.get(sign, "") for sign in reversed(signs)], ends[::-1]
    if not {*signs} <= {"<", r"\lt", r"\le"}:
        return None
    if len(signs) == 1 and (size := re.fullmatch(r"\| ?([^|]+?) ?\|", ends[0])):  # |x|<3
        signs, ends = signs * 2, [f"-({ends[1]})", size[1], ends[1]]
    elif len(signs) == 1 and _NAME.fullmatch(ends[1]):
        signs, ends = [*signs, "<"], [*ends, r"\infty"]
    elif len(signs) == 1:
        signs, ends = ["<", *signs], [r"-\infty", *ends]
    kind = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
    interval = _group(text, kind, ends[::2])
    is_named = interval and "|" not in ends[1] and _NAME.fullmatch(ends[1])
    return Named(text, name=ends[1], value=interval) if is_named else None


def _is_false(ends: list[str]) -> bool:
    """Return whether a number in a chain of equations is over 1% from its last number: x = 6 = 5.

    `ends` are the texts between the equals signs; those that are no numbers or sums do not count. False
    if none counts. Raise OverflowError for a number that is too large for a float, ZeroDivisionError,
    MemoryError or RecursionError.
    """
    sums = [end for end in ends if _SUM.fullmatch(end) and not re.search(r"[\d)] ?\(", end)]  # not 8(26)
    read = [_read(spell(end)) for end in sums]
    found = [value.expression for value in read if value]
    numbers = [float(one) for one in found if one is not None and one.is_number and one.is_real]
    return any(abs(one - numbers[-1]) > 0.01 * abs(numbers[-1]) for one in numbers)


def are_apart(one: Value, other: Value) -> bool:
    """Return whether two values are real numbers, or names for these, over 1% of the larger apart.

    Raise MemoryError or RecursionError, as sympy does.
    """
    inner = [
        value.value if isinstance(value, Named) and value.value else value for value in (one, other)
    ]
    try:
        found = [value.expression for value in inner if not isinstance(value, Group)]
        numbers = [float(each) for each in found if getattr(each, "is_real", None) and each.is_number]
    except (ZeroDivisionError, OverflowError, TypeError):
        return False
    return len(numbers) == 2 and abs(numbers[0] - numbers[1]) > 0.01 * max(map(abs, numbers))


def _group(text: str, kind: str, parts: list[str]) -> Group | None:
    """Return the values of the texts `parts` as a group with the text `text` and the brackets `kind`.

    `kind` may also be ":" of a ratio, "-" of a range, "matrix", or "" of a bare list. Return None if a
    part cannot be read, or if one of a ratio is words. Raise ZeroDivisionError, MemoryError or
    RecursionError.
    """
    items = tuple(item for part in parts if (item := _read(spell(part))))
    is_ratio = kind != ":" or all(item.is_formula for item in items)
    is_whole = len(items) == len(parts) and is_ratio
    return Group(text, kind != "-", kind=kind, items=items) if is_whole else None


def _split(text: str, separators: Iterable[str], brackets: str = "") -> list[str]:
    """Return the parts of a text, in order, between those `separators` that are outside of brackets.

    Return [text] without separators, or if a bracket is closed that was not opened. Separators of
    thousands part nothing: "1,2" has two parts, "1,234" one. `brackets`, such as "()", stand around the
    text, "" for none: within them "1,234" has two parts, "1,234, 5" has two too.
    """
    depth, parts, begin = 0, [], 0
    mark = _BARE_MARK if brackets and ", " not in text else _MARK
    for found in mark.finditer(text):
        depth += (found[0] in _OPENING) - (found[0] in _CLOSING)
        if depth < 0:
            return [text]
        if depth == 0 and found[0] in separators:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]
