"""Whether two values are equal: docs/rewards.md has the rules."""

import re

from penstock.rewarders.rewards.formulas import same_expression
from penstock.rewarders.rewards.numbers import read_number, same_number
from penstock.rewarders.rewards.values import SET, Choice, Group, Named, NumberValue, Value
from penstock.rewarders.rewards.words import are_opposite

_MEASURE = re.compile(
    r"(.*[\d}]) ?([ACJKLNVWdghlmst])(?:\^ ?\{? ?[23] ?\}?)?"
    r"(?:/ ?([a-z])(?:\^ ?\{? ?[23] ?\}?)?)?"
)
"""A formula that is a number with a unit: 12m, 9.8m/s^2."""
_UNITS = {
    "m": "m|met(?:er|re)s?", "g": "g|grams?", "s": "s|sec|seconds?", "h": "h|hrs?|hours?", "d": "days?",
    "l": "l|lit(?:er|re)s?", "L": "l|lit(?:er|re)s?", "t": "t|ton(?:ne)?s?", "N": "n|newtons?",
    "V": "v|volts?", "W": "w|watts?", "J": "j|joules?", "A": "a|amp(?:ere)?s?", "K": "k|kelvins?",
    "C": "c|celsius",
}  # fmt: skip
"""By the letter of a unit, a pattern of its names as labels have them: in lower case."""
_ELEMENT = "(?:A[glu]|B[aer]?|C[alru]?|F[e]?|H[eg]?|I|K|Li|M[gn]|N[aei]?|O|P[b]?|S[in]?|Zn)(?![a-z])"
_INDEX = r"(?!1(?!\d))\d++"
_MOLECULE = re.compile(
    rf"(?:\d++ ?+)?+(?:{_ELEMENT} ?+(?:(?:_? ?+{_INDEX}|_ ?+\{{ ?+{_INDEX} ?+\}}) ?+)?+){{2,}}+"
)
_MODULUS = re.compile(r"\\[pb]?mod ?\{? ?(\w+) ?\}?|\( ?mod (\w+) ?\)")
_SYNONYMS = {
    "no solution": r"\emptyset", "no solutions": r"\emptyset", "empty set": r"\emptyset",
    "does not exist": "dne", "all real numbers": r"(-\infty,\infty)", "all reals": r"(-\infty,\infty)",
}  # fmt: skip


def same(one: Value, other: Value) -> bool:
    """Return whether two values are equal; same(a, b) is same(b, a).

    docs/rewards.md has the rules. A.m. or p.m. counts if both have it, as does a name: x = 5 equals 5.
    Words of opposite directions, as in 5% increase and 5% decrease, make values differ.
    Choices need one letter, and equal texts if both have one; a choice equals another value by its text.
    Numbers may differ by rounding (5e-6 of the larger), and % or k may be missing in one. Groups are
    compared item by item, sets and bare lists in any order. Others are compared as text, then by sympy.
    Raise MemoryError or RecursionError, as sympy does.
    """
    if (one.half and other.half and one.half != other.half) or are_opposite(one.sides, other.sides):
        return False
    if isinstance(one, Choice) or isinstance(other, Choice):
        return _same_choice(one, other)
    if isinstance(one, NumberValue) and isinstance(other, NumberValue):
        return same_number((one.number, one.unit), (other.number, other.unit))
    if _clock(one, other.half) == _clock(other, one.half):
        return True
    if isinstance(one, Group) and isinstance(other, Group):
        return _same_group(one, other)
    return _key(one) == _key(other) or _same_measure(one, other) or _same_formula(one, other)


def _clock(time: Value, half: str) -> tuple[int, ...] | Value:
    """Return the hour of 24, the minute and any second of a time of day; another value as it is.

    `half` is that of the value it is compared with: "a", "p" or "". It stands in for a missing a.m. or
    p.m. of a text with a colon. If both are missing, the value is a ratio or number.
    """
    found = re.fullmatch(r"(\d\d?)((?: ?: ?\d\d){0,2})", time.text)
    if not found or not (time.half or (half and found[2])):
        return time
    hour, own = int(found[1]) % 24, time.half or half
    if 0 < hour < 12 or (hour == 12 and time.half):
        hour = hour % 12 + 12 * (own == "p")
    return (hour, *(map(int, re.findall(r"\d+", found[2])) if found[2] else (0,)))


def _same_measure(one: Value, other: Value) -> bool:
    """Return whether two values are a number beside a unit, and a formula of it and the unit's letter.

    12 m and 12 meters equal 12m, which alone is a product. As everywhere, powers of units do not count.
    """
    number, formula = (one, other) if isinstance(one, NumberValue) else (other, one)
    found = _MEASURE.fullmatch(formula.text)
    if not (found and isinstance(number, NumberValue)):
        return False
    units = [_UNITS.get(letter, "") for letter in found.groups()[1:] if letter]
    if not (
        all(units) and re.fullmatch(" (?:per )?".join(f"(?:{unit})" for unit in units), number.label)
    ):
        return False
    try:
        factor = read_number(found[1])
    except (ZeroDivisionError, ValueError, OverflowError):
        return False
    return factor is not None and same_number(factor, (number.number, number.unit))


def _same_formula(one: Value, other: Value) -> bool:
    """Return whether two values are equal as named ones, else by sympy; a group is no number.

    Raise MemoryError or RecursionError, as sympy does.
    """
    if isinstance(one, Named) or isinstance(other, Named):
        return _same_named(one, other)
    kinds = {type(one), type(other)}  # math_verify reads 3100 in (3,100)
    return kinds != {Group, NumberValue} and _same_expression(one, other)


def _same_expression(one: Value, other: Value) -> bool:
    """Return whether sympy finds two values equal; False if it reads no expression in one of them.

    A division by zero is False too. Raise MemoryError or RecursionError, as sympy does.
    """
    try:
        left, right = one.expression, other.expression
    except ZeroDivisionError:
        return False
    return left is not None and right is not None and same_expression(left, right)


def _key(value: Value) -> str:
    r"""Return a value's text in one spelling: values with equal texts are equal.

    A formula loses spaces and braces without meaning. H_2O is H2O, 3:2 is 3 to 2, "no solution" is
    \emptyset.
    Example: "\sqrt{2} x" becomes "\sqrt2x"; "\sqrt{2x}" keeps its braces, "x^{2}3" a space.
    """
    if isinstance(value, Group) and value.kind in (":", "-"):
        return re.sub(r" ?[:-] ?(?=\d)", " to ", value.text)
    key = _formula_key(value.text) if value.is_formula else value.text
    return _SYNONYMS.get(key, key)


def _formula_key(text: str) -> str:
    """Return a formula's text without spaces and braces that mean nothing, as `_key` has it."""
    text = _MODULUS.sub(r" mod \1\2 ", text.replace("≡", r"\equiv "))
    text = re.sub(r"[_ {}]", "", text) if _MOLECULE.fullmatch(text) else text
    text = re.sub(r"\{ *(\w) *\}", r"\1 ", re.sub(r"\{ *(\w) *\}", r"\1 ", text))
    return re.sub(r"(?<!\d) +| +(?!\d)", "", text)


def _same_named(one: Value, other: Value) -> bool:
    """Return whether two values are equal, of which at least one has a name, as in x = 5.

    A name alone does not matter: x = 5 equals 5. With two names, the names and the values must be equal;
    or both are equations with the same solutions, and no name is as f(2) or y'. Raise MemoryError or
    RecursionError, as sympy does.
    """
    names = [value.name for value in (one, other) if isinstance(value, Named)]
    left, right = (value.value if isinstance(value, Named) else value for value in (one, other))
    is_same = bool(left and right and names[0] == names[-1] and same(left, right))
    if is_same or len(set(names)) < len(names) or re.search("['(]", "".join(names)):
        return is_same  # f(2) and f(3) are no unknowns to solve for
    return "=" in one.text and "=" in other.text and _same_expression(one, other)


def _same_choice(one: Value, other: Value) -> bool:
    """Return whether two values are equal, of which at least one is a choice such as "B. east".

    Letters decide, and texts if both have one. A choice equals a value that is no choice by its text.
    Raise MemoryError or RecursionError, as sympy does.
    """
    if isinstance(one, Choice) and isinstance(other, Choice):
        if one.meaning and other.meaning and not same(one.meaning, other.meaning):
            return False
        return one.letter == other.letter
    choice, value = (one, other) if isinstance(one, Choice) else (other, one)
    return isinstance(choice, Choice) and choice.meaning is not None and same(choice.meaning, value)


def _same_group(one: Group, other: Group) -> bool:
    """Return whether two groups have equal values: in any order for sets and bare lists, else in order.

    A bare list equals a tuple, (1,2) or [1,2], in the same order. Lists with the same names or words
    beside them (5 apples, 3 oranges) are compared by these, other lists of different names in order.
    Other kinds differ: a ratio is no range, and (0,1) is not [0,1]; from three values on, () equals [].
    [[1,2],[3,4]] equals the matrix of these rows. Raise MemoryError or RecursionError, as sympy does.
    """
    if {one.kind, other.kind} == {"matrix", "[]"}:
        one, other = _as_matrix(one), _as_matrix(other)
    size, kinds = len(one.items), {one.kind, other.kind}
    if size != len(other.items):
        return False
    left_keys, right_keys = _keys(one), _keys(other)
    if kinds <= {"", SET} and left_keys and left_keys.keys() == right_keys.keys():
        return all(same(item, right_keys[key]) for key, item in left_keys.items())
    if kinds <= {"", SET} and not (_has_names(one) or _has_names(other)):
        left = list(other.items)
        for item in one.items:
            found = next((at for at, candidate in enumerate(left) if same(item, candidate)), None)
            if found is None:
                return False
            del left[found]
        return True
    fits = (
        kinds <= {"", SET}
        or len(kinds) == 1
        or kinds in ({"", "()"}, {"", "[]"})
        or (kinds == {"()", "[]"} and size > 2)
    )
    return fits and all(map(same, one.items, other.items))


def _as_matrix(group: Group) -> Group:
    """Return rows in square brackets as a matrix, and any other group as it is."""
    rows = [item for item in group.items if isinstance(item, Group) and item.kind == "[]"]
    if group.kind == "matrix" or len(rows) < len(group.items):
        return group
    items = [cell for row in rows for cell in (*row.items, Value("row", False))]
    return Group(group.text, kind="matrix", items=tuple(items))


def _keys(group: Group) -> dict[str, Value]:
    """Return the group's items by their names, or words beside them; {} if these are not different."""
    found = {item.name if isinstance(item, Named) else item.label: item for item in group.items}
    return found if len(found) == len(group.items) and "" not in found else {}


def _has_names(group: Group) -> bool:
    """Return whether two of the group's values have different names, as in x=1, y=2; x_1 is x."""
    names = [item.name for item in group.items if isinstance(item, Named)]
    return len({re.sub(r"^x ?_ ?\{? ?\d+ ?\}?$", "x", name) for name in names}) > 1
