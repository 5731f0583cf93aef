"""Formulas: what math_verify reads and compares. This is the only module that imports math_verify.

math_verify's own time limits are off, because they return "wrong" when they expire. The sandbox's time
limit applies instead.
"""

import logging
import re
from fractions import Fraction
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Float, Rational, nan, zoo

# Units are removed before: math_verify's own removal reads 5 from 5m.
_CONFIG = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    )
]
_MISREAD = re.compile(r"\d_|\d'|\\overline\s*\{?\s*\d|(?<!_)\d\s+\d|\d[a-zA-Z]\d|:|\.{3}|\\[lc]?dots")
"""Bases, repeating decimals, ratios, rows of numbers and 0b10: math_verify drops a part of these."""

# math_verify logs a warning in every process that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def expression(text: str) -> Any:
    """Return the expression that math_verify reads from all of a text; None if it reads none.

    Raise MemoryError or RecursionError: these depend on the machine, not on the answer. Raise
    ZeroDivisionError for a text whose value is not defined.
    """
    if len(text) < 1000 and _MISREAD.search(text):
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    tex = text.replace("\u2983", r"\{").replace("\u2984", r"\}")
    try:
        found = parse(f"${tex}$", _CONFIG, "no_fallback", parsing_timeout=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises many errors on model text, for example on "-0733"
        return None
    if found and isinstance(found[0], Basic) and found[0].has(zoo, nan):
        raise ZeroDivisionError(text)
    return found[0] if found else None


def same_expression(one: Any, other: Any) -> bool:
    """Return whether two expressions are equal, in either order; False for what sympy cannot compare.

    An assignment equals its right side ("x = 5" and 5); another equation equals only equations. Raise
    MemoryError or RecursionError.
    """
    for equation, value in ((one, other), (other, one)):
        if not isinstance(equation, Eq) or isinstance(value, Eq) or not equation.lhs.free_symbols:
            continue
        if not (equation.lhs.is_Symbol or equation.lhs.is_Function):
            return False
    orders = [(one, other)] if type(one) is type(other) else [(one, other), (other, one)]
    try:
        return any(verify(*order, timeout_seconds=None, raise_on_error=True) for order in orders)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises many errors on what it cannot compare
        return False


def number_expression(number: Fraction, is_rounded: bool) -> Any:
    """Return a number for `same_expression`; a rounded number is compared to six decimals."""
    exact = Rational(number.numerator, number.denominator)
    return Float(exact) if is_rounded else exact
