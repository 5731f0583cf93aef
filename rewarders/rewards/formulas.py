"""Formulas: what math_verify reads and compares. This is the only module that imports math_verify.

math_verify's own time limits are off, because they return "wrong" when they expire. The sandbox's time
limit applies instead.
"""

import logging
import re
from fractions import Fraction
from itertools import accumulate
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from mpmath import findroot, mpf
from sympy import Basic, Dummy, Eq, Expr, Float, I, Pow, Rational, Symbol, lambdify, nan, zoo
from sympy.core.function import AppliedUndef

# Units are removed before: math_verify's own removal reads 5 from 5m.
_CONFIG = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    )
]
_MISREAD = re.compile(
    r"\d_|[\da-zA-Z)}] *(?:\^ *\{? *)?(?:'|\\prime)"
    r"|\\overline\s*\{?\s*\d|(?<!_)\d\s+\d|\d[a-zA-Z]\d|:|\.{3}|\.\d+\.\d|\\[lc]?dots"
    r"|\\to(?![a-z])|\\(?:long)?(?:right|left)arrow(?![a-z])|→"
)
"""Bases, derivatives, repeating decimals, ratios, rows of numbers, 1.2.3, 0b10.

math_verify drops parts of these."""

_CAPITALS = re.compile(
    r"\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![a-zA-Z]| ?[_(^])"
)
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d)")
_LONGEST, _DEEPEST = 1000, 40
_SAFE_NAME = re.compile(r"[\w\\{}^,'* +-]*")
"""A symbol's or function's name that is no Python text: sympy runs some of what it prints."""

# math_verify logs a warning in every process that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def expression(text: str) -> Any:
    """Return the sympy expression that math_verify reads in a text that `spell` returned.

    Return None if math_verify reads nothing or would drop a part, for a name that may be Python text,
    and for what takes its parser minutes: over 1000 characters, braces not closed, over 40 brackets open
    at once, or 40 signs in a row. Raise ZeroDivisionError if the value divides by zero, MemoryError or
    RecursionError, as sympy does.
    """
    if len(text) > _LONGEST or _MISREAD.search(text) or not _is_nested(text):
        return None
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    tex = _apart(text.replace("\u2983", r"\{").replace("\u2984", r"\}"))
    try:
        found = parse(f"${tex}$", _CONFIG, "no_fallback", parsing_timeout=None, raise_on_error=True)
        _check_names(found)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises many errors on model text, for example on "-0733"
        return None
    if found and isinstance(found[0], Basic) and _is_undefined(found[0]):
        raise ZeroDivisionError(text)
    return _with_imaginary_unit(found[0], tex) if found else None


def _with_imaginary_unit(found: Any, tex: str) -> Any:
    """Return what math_verify read in `tex`, with sympy's imaginary unit for a free symbol i.

    An equation stays as it is, and so does a formula that has a symbol I too.
    """
    if not isinstance(found, Expr) or "I" in tex:
        return found
    return found.xreplace({symbol: I for symbol in found.free_symbols if symbol.name == "i"})


def _check_names(found: list[Any]) -> None:
    """Raise ValueError if a name in what math_verify has `found` may be Python text."""
    for one in found[0].atoms(Symbol, AppliedUndef) if found and isinstance(found[0], Basic) else ():
        name = str(one.func if isinstance(one, AppliedUndef) else one)
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"{name} is no name of a symbol, expected letters, digits and an index")


def _is_nested(text: str) -> bool:
    """Return whether the braces {} of a text are balanced: each closed behind where it was opened.

    Return False as well if over 40 brackets of any kind are open at once, or 40 signs + or - in a row.
    """
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0 and is_shallow(text) and not re.search(rf"(?:[-+] ?){{{_DEEPEST}}}", text)


def is_shallow(text: str) -> bool:
    """Return whether at most 40 brackets of a text, of any kind, are open at once."""
    brackets = re.findall(r"(?<!\\)[{}]|[(\[\])]", text)
    return max(accumulate((1 if one in "([{" else -1 for one in brackets), initial=0)) <= _DEEPEST


def _is_undefined(found: Basic) -> bool:
    """Return whether a sympy expression divides by a number that is 0, as 1/(2-2) does, or has NaN."""
    parts = [power for power in found.atoms(Pow) if power.exp.is_negative and power.base.is_number]
    return found.has(zoo, nan) or any(power.base.is_zero for power in parts)


def _apart(tex: str) -> str:
    """Return the formula `tex`, its capital letters with the index 0 if the small ones are in it too.

    math_verify reads all letters as small ones: so R and r stay two symbols. Example: "R-r" becomes
    "R_{0}-r". Greek capitals always get the index. Other commands and letters with an index stay.
    """
    tex = _CAPITALS.sub(r"\g<0>_{0}", tex)
    names = set(re.sub(r"\\[a-zA-Z]+", "", tex))
    both = {name for name in names if name.isupper() and name.lower() in names}
    return re.sub(
        r"\\[a-zA-Z]+|[A-Z](?!\s*_)", lambda found: found[0] + "_{0}" * (found[0] in both), tex
    )


def same_expression(one: Any, other: Any) -> bool:
    """Return whether two sympy expressions are equal; False for what sympy cannot compare.

    The order of the two does not matter. An assignment equals its right side ("x = 5" and 5); another
    equation equals only equations. Raise MemoryError or RecursionError, as sympy does.
    """
    for equation, value in ((one, other), (other, one)):
        is_equation = isinstance(equation, Eq) and not isinstance(value, Eq)
        if is_equation and not (equation.lhs.is_Symbol or isinstance(equation.lhs, AppliedUndef)):
            return False
    verdict = _same_numbers(one, other)
    if verdict is not None or _differ(one, other):
        return bool(verdict)
    orders = [(one, other)] if type(one) is type(other) else [(one, other), (other, one)]
    try:
        return any(verify(*order, timeout_seconds=None, raise_on_error=True) for order in orders)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises many errors on what it cannot compare
        return False


def _same_numbers(one: Any, other: Any) -> bool | None:
    """Return whether two expressions are equal numbers; None if one is no number or sympy cannot say.

    Written decimals are equal if they differ by at most 5e-7, and by at most 5e-6 of the larger; others
    if sympy finds no difference. An infinity equals none. Raise MemoryError or RecursionError.
    """
    if not all(isinstance(side, Expr) and side.is_number for side in (one, other)):
        return None
    try:
        left, right = one.doit(), other.doit()
        if left.is_infinite or right.is_infinite or (left.is_Rational and right.is_Rational):
            return bool(left == right and left.is_Rational)
        if one.has(Float) or other.has(Float):
            gap, size = abs(complex(left - right)), max(abs(complex(left)), abs(complex(right)))
            return gap <= 5e-7 and gap <= 5e-6 * size
        parts = (left - right).evalf(30).as_real_imag()
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises many errors on what it cannot compute
        return None
    return all(not part or getattr(part, "_prec", 2) == 1 for part in parts)  # 1: no digit is known


def _differ(one: Any, other: Any) -> bool:
    """Return whether two expressions, or two equations, are found different at one point.

    Both are computed at one value of their symbols; of two equations, a root of the first is put into
    the second. Return False if there is no value or root, for an equation and another thing, and for
    unknown functions or exponents over 20. This spares sympy's simplification, which takes 0.1 to 0.3 s
    for most equations that are different. Raise MemoryError or RecursionError.
    """
    if isinstance(one, Eq) != isinstance(other, Eq) or not isinstance(one, Eq | Expr):
        return False
    try:
        left, right = (side.lhs - side.rhs if isinstance(side, Eq) else side for side in (one, other))
        gap = left - right
        powers = [power.exp for power in gap.atoms(Pow)]
        if gap.has(AppliedUndef) or any(exponent.is_Integer and exponent > 20 for exponent in powers):
            return False  # lambdify would call a function by its name; sandbox limits end large powers
        # lambdify writes the names of symbols, bound ones too, into the code that it runs.
        all_symbols = left.atoms(Symbol) | right.atoms(Symbol)
        places = {symbol: Dummy() for symbol in sorted(all_symbols, key=str)}
        free = left.free_symbols | right.free_symbols
        symbols = [place for symbol, place in places.items() if symbol in free]
        left, right = left.xreplace(places), right.xreplace(places)
        at = [mpf(0.1739085) + mpf(0.1414214) * n for n in range(len(symbols))]
        left, right = (lambdify(symbols, side, "mpmath") for side in (left, right))
        if isinstance(one, Eq):
            at[-1] = findroot(lambda root: left(*at[:-1], root), (0.9 + 0.4j, 1.7 - 0.3j))
        values = [complex(side(*at)) for side in (left, right)]
        return abs(values[0] - values[1]) > (1e-6 if isinstance(one, Eq) else 1e-12) + 1e-3 * max(
            map(abs, values)
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # no value or root at this point
        return False


def number_expression(number: Fraction, is_rounded: bool) -> Any:
    """Return a number for sympy: a Float, compared to six decimals, if `is_rounded`, else a Rational."""
    exact = Rational(number.numerator, number.denominator)
    return Float(exact) if is_rounded else exact
