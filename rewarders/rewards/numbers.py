r"""Numbers in the forms that people write: 1,000, 1 1/2, 5.89e-7, \frac{1}{2}, 3 million, 12%."""

import re
from fractions import Fraction

_GROUPED = (
    r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|[1-9]\d{0,2}(?:'\d{3})+"
    r"|[1-9]\d?(?:,\d\d)+,\d{3}"  # India: 1,00,000
)
DIGITS = rf"(?:[1-9]\d{{0,2}}(?:\.\d{{3}})+,\d+|(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(
    rf"({DIGITS})(?:\\overline ?\{{(?P<again>\d+)\}})?"
    r"(?: ?e ?(?P<e>[-+]?\d{1,3})"
    r"| ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{? ?(?P<power>[-+]?\d{1,3}) ?\}?)?",
    re.IGNORECASE,
)
_POWER = re.compile(r"10 ?\^ ?\{? ?([-+]?\d{1,3}) ?\}?")
_FRACTION = re.compile(
    rf"(?:(?P<whole>\d+)(?: | ?(?=\\)))?(?:(?P<up>{DIGITS}) ?/ ?(?P<down>{DIGITS})"
    rf"|\\frac ?(?:\{{ ?(?P<up2>{DIGITS}) ?\}}|(?P<up3>\d))"
    rf" ?(?:\{{ ?(?P<down2>{DIGITS}) ?\}}|(?P<down3>\d)))"
)
_SCALES = {
    "hundred": 2, "thousand": 3, "lakh": 5, "lakhs": 5, "million": 6, "crore": 7, "crores": 7,
    "billion": 9, "trillion": 12, "万": 4, "亿": 8,
}  # fmt: skip
_SCALE = re.compile(rf" ?({'|'.join(_SCALES)})$", re.IGNORECASE)
_UNIT = re.compile(r" ?%$| ?(?<=\d )k$")
_LONGEST = 100


def read_number(text: str) -> tuple[Fraction, Fraction] | None:
    """Return the number that a text is, and the unit behind it: 1/100 for %, 1000 for k, else 1.

    The number is not multiplied by the unit. Return None for a text that is not one number, or is over
    100 characters long. Raise ZeroDivisionError for a fraction over 0. Example: "-1 1/2" gives -3/2 and
    1, "3 million" gives 3000000 and 1.
    """
    if len(text) > _LONGEST:
        return None
    bare = _UNIT.sub("", text)
    unit = Fraction(1) if bare == text else Fraction(1, 100) if text.endswith("%") else Fraction(1000)
    scale = _SCALE.search(bare)
    core = bare[: scale.start()] if scale else bare
    sign = -1 if core.startswith("-") else 1
    found = _unsigned(core.removeprefix("-").removeprefix("+").strip())
    if found is None:
        return None
    return sign * found * 10 ** (_SCALES[scale[1].lower()] if scale else 0), unit


def _unsigned(text: str) -> Fraction | None:
    """Return the number of a text without sign, unit and scale such as million; None if it is no number.

    Forms are 1,000.5, 5.89e-7, 10^3, 1/3, 1 1/2, and \\frac{1}{2}. Raise ZeroDivisionError for a
    fraction over 0.
    """
    if power := _POWER.fullmatch(text):
        return Fraction(10) ** int(power[1])
    if found := _DECIMAL.fullmatch(text):
        number = _decimal(found[1]) * Fraction(10) ** int(found["e"] or found["power"] or 0)
        if again := found["again"]:
            places = len(found[1].partition(".")[2])
            number += Fraction(int(again), (10 ** len(again) - 1) * 10**places)
        return number
    if found := _FRACTION.fullmatch(text):
        up, down = (found[part] or found[part + "2"] or found[part + "3"] for part in ("up", "down"))
        return int(found["whole"] or 0) + _decimal(up) / _decimal(down)
    return None


def _decimal(digits: str) -> Fraction:
    """Return the number of a text of digits, with or without separators of thousands.

    Example: "1,000.5", "1 000.5" and "1.000,5" are 1000.5.
    """
    if re.fullmatch(r"\d{1,3}(\.\d{3})+,\d+", digits):
        digits = digits.replace(".", "").replace(",", ".")
    return Fraction(re.sub("[, ']", "", digits).removesuffix("."))


def same_number(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction]) -> bool:
    """Return whether two numbers, each a pair of number and unit, are equal.

    If one has no unit, that is the unit 1, the other's unit may be left out too. Example: 50%, (50,
    1/100), equals 50 and 0.5, but 50% does not equal $50k. Numbers are equal if they differ by at most
    5e-7, and by at most 5e-6 of the larger: 1/3 equals 0.333333, and 6.6e-34 does not equal 1.38e-23.
    """
    values = one[0] * one[1], other[0] * other[1]
    return _close(*values) or (1 in (one[1], other[1]) and _close(one[0], other[0]))


def _close(one: Fraction, other: Fraction) -> bool:
    """Return whether two numbers differ by at most 5e-7, and by at most 5e-6 of the larger size."""
    gap = abs(one - other)
    return gap <= Fraction(5, 10**7) and gap <= Fraction(5, 10**6) * max(abs(one), abs(other))
