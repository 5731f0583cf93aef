"""Whether two values are equal: docs/rewards.md has the rules."""

import re

from penstock.rewarders.rewards.formulas import same_expression
from penstock.rewarders.rewards.numbers import same_number
from penstock.rewarders.rewards.values import SET, Choice, Group, Named, NumberValue, Value
from penstock.rewarders.rewards.words import are_opposite


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
    if isinstance(one, Group) and isinstance(other, Group):
        return _same_group(one, other)
    return _key(one) == _key(other) or _same_formula(one, other)


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
    r"""Return a value's text without spaces and braces that mean nothing; of words the text unchanged.

    Values with equal texts are equal.
    Example: "\sqrt{2} x" becomes "\sqrt2x"; "\sqrt{2x}" keeps its braces, "x^{2}3" a space.
    """
    if not value.is_formula:
        return value.text
    text = re.sub(r"\{ *(\w) *\}", r"\1 ", re.sub(r"\{ *(\w) *\}", r"\1 ", value.text))
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
    Raise MemoryError or RecursionError, as sympy does.
    """
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


def _keys(group: Group) -> dict[str, Value]:
    """Return the group's items by their names, or words beside them; {} if these are not different."""
    found = {item.name if isinstance(item, Named) else item.label: item for item in group.items}
    return found if len(found) == len(group.items) and "" not in found else {}


def _has_names(group: Group) -> bool:
    """Return whether two of the group's values have different names, as in x=1, y=2; x_1 is x."""
    names = [item.name for item in group.items if isinstance(item, Named)]
    return len({re.sub(r"^x ?_ ?\{? ?\d+ ?\}?$", "x", name) for name in names}) > 1
