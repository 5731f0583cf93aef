"""Answers as values: what stands in a box or alone is read by `read_value`, and compared by `same`.

docs/rewards.md has the rules. A gold and an answer are read by the same functions.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from penstock.rewarders.rewards.formulas import expression, number_expression, same_expression
from penstock.rewarders.rewards.numbers import DIGITS, read_number, same_number
from penstock.rewarders.rewards.spelling import spell
from penstock.rewarders.rewards.words import without_words

_TERMS = re.compile(
    r"(?P<terms>\d+(?:\.\d+)?(?: ?: ?\d+(?:\.\d+)?)+|\d+/\d+/\d+|\d{4}-\d\d?-\d\d?)"
    r" ?(?:(?P<half>[ap])\.? ?m\.?)?",
    re.IGNORECASE,
)
_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sep(?:t|tember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"\(([A-J])\)\s*(.*)|([A-J])(?:[.:)](?:\s+(.+))?)?", re.DOTALL)
_CLAUSE = re.compile(r"\b(?:it|is|are|was|were|be|has|have|we|you|he|she|they|this|that|there)\b", re.I)
_MARK = re.compile(
    rf"(?<![\d,.]){DIGITS}|[()\[\]{{}}\u2983\u2984,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
)
_SUM = re.compile(
    r"(?:[^a-zA-Z\\<>!,]|\\(?:times|cdot|frac|div|sqrt)|(?<=\d),(?=\d{3})|(?<=\d) ?x ?(?=\d))+=(.+)"
)
_OPENING, _CLOSING, _SET = tuple("([{\u2983"), tuple(")]}\u2984"), "\u2983\u2984"
_SEPARATORS = (",", ";", "and", "or")


@dataclass(frozen=True)
class Value:
    """A value as it is written: a formula, words, or a row of terms such as 12:30.

    `text` has one spelling and no white space; `half` is "a" or "p" of a time, or "".
    """

    text: str
    is_formula: bool = True
    half: str = ""

    @cached_property
    def expression(self) -> Any:
        """The expression that math_verify reads, None for words. Raise as `expression` does."""
        return expression(self.text) if self.is_formula else None


@dataclass(frozen=True)
class NumberValue(Value):
    """A number; `percent` if a percent sign follows."""

    number: Fraction = Fraction(0)
    percent: bool = False

    @cached_property
    def expression(self) -> Any:
        """The number as sympy has it, a decimal rounded to six places."""
        is_rounded = "." in self.text and abs(self.number) > Fraction(1, 1000)
        return number_expression(self.number / (100 if self.percent else 1), is_rounded)


@dataclass(frozen=True)
class Group(Value):
    """Several values: `kind` is their brackets, such as "[)", or "" for a bare list."""

    kind: str = ""
    items: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Choice(Value):
    """A letter from A to J, and the text of the choice if it is there."""

    letter: str = ""
    meaning: Value | None = None


def read_value(text: str) -> Value | None:
    """Return the value of a text that is an answer and nothing else; None if it cannot be read.

    Example: "$1,000$ dollars" is 1000. Raise MemoryError or RecursionError.
    """
    try:
        return _read(spell(text))
    except (ZeroDivisionError, ValueError, OverflowError):
        return None


def _read(text: str) -> Value | None:
    """Return the value of a text in one spelling, None for none. Raise as `expression`."""
    if not re.search(r"\w|\\[a-z]", text):
        return None
    if choice := _CHOICE.fullmatch(text):
        letter, meaning = choice[1] or choice[3], choice[2] or choice[4]
        return Choice(text, False, letter=letter, meaning=_read(spell(meaning)) if meaning else None)
    if _MONTH.search(text) and re.search(r"\d", text):
        words = re.findall(r"[a-z]{3}|\d+", re.sub(r"(?<=[a-z]{3})[a-z]+", "", text.lower()))
        return Value(" ".join(sorted(words)), False)
    if sum_ := _SUM.fullmatch(text):
        return _read(spell(sum_[1]))
    if r"\begin" not in text:
        if r"\pm" in text:
            signs = [_read(spell(text.replace(r"\pm", sign).replace(r"\mp", sign))) for sign in "+-"]
            return Group(text, items=tuple(filter(None, signs)))
        if terms := _TERMS.fullmatch(text):
            return Value(
                terms["terms"].replace(" ", "").lstrip("0"), False, (terms["half"] or "").lower()
            )
        if group := _read_group(text):
            return group
    if number := read_number(text):
        return NumberValue(text, number=number[0], percent=number[1])
    bare = without_words(text)
    if not bare:
        literal = re.sub(r"\\[a-z]+|[^\w\s.:/-]", " ", text).casefold()
        return None if _CLAUSE.search(literal) else Value(" ".join(literal.split()), False)
    if bare != text:
        return None if re.fullmatch("[a-zA-Z]{2,}", bare) else _read(spell(bare))
    value = Value(text)
    return value if value.expression is not None or _is_whole(text) else None


def _is_whole(text: str) -> bool:
    """Return whether brackets are closed: such a text is compared if sympy cannot read it."""
    return text.count("{") == text.count("}") and text[-1] not in "=+-*/^"


def _read_group(text: str) -> Group | None:
    """Return the values that separators part, within brackets or bare; None for fewer than two."""
    kind, parts = "", _split(text)
    if len(parts) < 2 and text[0] in "([" + _SET[0] and text[-1] in ")]" + _SET[1]:
        kind, parts = text[0] + text[-1], _split(text[1:-1])
    parts = [part for part in parts if part.strip()]
    if len(parts) < 2:
        return None
    items = tuple(item for part in parts if (item := _read(spell(part))))
    return Group(text, kind=kind, items=items) if len(items) == len(parts) else None


def _split(text: str) -> list[str]:
    """Return the parts between separators outside of brackets, all of the text if a bracket closes none.

    Separators of thousands part nothing: "1,2" has two parts, "1,234" one.
    """
    depth, parts, begin = 0, [], 0
    for found in _MARK.finditer(text):
        depth += (found[0] in _OPENING) - (found[0] in _CLOSING)
        if depth < 0:
            return [text]
        if depth == 0 and found[0] in _SEPARATORS:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]


def same(one: Value, other: Value) -> bool:
    """Return whether two values are equal, in either order. Raise MemoryError or RecursionError."""
    if isinstance(one, Choice) or isinstance(other, Choice):
        return _same_choice(one, other)
    if isinstance(one, NumberValue) and isinstance(other, NumberValue):
        return same_number((one.number, one.percent), (other.number, other.percent))
    if _key(one) == _key(other):
        return not (one.half and other.half and one.half != other.half)
    if isinstance(one, Group) and isinstance(other, Group):
        return _same_group(one, other)
    try:
        left, right = one.expression, other.expression
    except ZeroDivisionError:
        return False
    return left is not None and right is not None and same_expression(left, right)


def _key(value: Value) -> str:
    """Return the text without white space and braces: values with equal texts are equal."""
    return re.sub(r"[\s{}]", "", value.text)


def _same_choice(one: Value, other: Value) -> bool:
    """Return whether the letters are equal; a choice with a text also equals that text alone."""
    if isinstance(one, Choice) and isinstance(other, Choice):
        return one.letter == other.letter
    choice, value = (one, other) if isinstance(one, Choice) else (other, one)
    return isinstance(choice, Choice) and choice.meaning is not None and same(choice.meaning, value)


def _same_group(one: Group, other: Group) -> bool:
    """Return whether the values are equal: in any order for sets and bare lists, else in order.

    A bare list equals a tuple in the same order. Brackets matter for two values: (0,1) is not [0,1].
    """
    size, kinds = len(one.items), {one.kind, other.kind}
    if size != len(other.items):
        return False
    if kinds <= {"", _SET}:
        left = list(other.items)
        for item in one.items:
            found = next((at for at, candidate in enumerate(left) if same(item, candidate)), None)
            if found is None:
                return False
            del left[found]
        return True
    fits = len(kinds) == 1 or kinds in ({"", "()"}, {"", "[]"}) or (kinds == {"()", "[]"} and size > 2)
    return fits and all(map(same, one.items, other.items))
