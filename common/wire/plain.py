"""Checks of plain data, which comes from files, rewards and other processes, where the data enters.

Plain data is None, truth values, numbers, texts, bytes, and lists and maps of these. Deeper nesting than
DEEPEST would end a later recursion, such as an encoder's or a chat template's, with RecursionError.
"""

import reprlib
from typing import Any

PlainData = Any

DEEPEST = 32
"""Most levels of lists and maps in a value of the user's data: [[1]] has 2."""

_LEAVES = frozenset({type(None), bool, float, bytes})
_LOWEST, _HIGHEST = -(2**63), 2**64 - 1  # msgpack has no other integers

_Place = tuple["_Place", object] | None


def find_fault(value: PlainData, deepest: int = DEEPEST) -> str:
    """Return the first thing found that keeps `value` from being plain data, and where; "" if none does.

    Faults are more than `deepest` levels of lists and maps, a key that is no text, an integer over 64
    bits, a text with a lone surrogate, and a type other than None, bool, int, float, str, bytes, list,
    tuple and dict.
    Example:
        >>> find_fault({"a": [1, {2: "b"}]})
        'a.1: a key is 2; expected a text'
    """
    waiting: list[tuple[PlainData, int, _Place]] = [([value], 0, None)]  # no recursion: it has a limit
    while waiting:
        found, level, place = waiting.pop()
        if level > deepest:
            return f"{_path(place)}nested deeper than {deepest} levels"
        is_map = isinstance(found, dict)
        for key, item in found.items() if is_map else enumerate(found):
            if is_map and not _is_text(key):
                return f"{_path(place)}a key is {brief(key)}; expected a text"
            kind = type(item)
            if kind in _LEAVES or (kind is str and (item.isascii() or is_encodable(item))):
                continue
            if kind is int and _LOWEST <= item <= _HIGHEST:
                continue
            here = (place, key) if level else None
            if isinstance(item, (list, tuple, dict)):
                waiting.append((item, level + 1, here))
            elif fault := _fault_of(item):
                return f"{_path(here)}{fault}"
    return ""


def _fault_of(item: PlainData) -> str:
    """Return what keeps `item`, which is no list or map, from being plain data; "" if nothing does."""
    if isinstance(item, str):
        return "" if is_encodable(item) else "a text holds half a character (a lone surrogate)"
    if isinstance(item, int):
        fits = _LOWEST <= item <= _HIGHEST
        return "" if fits else f"an integer of {item.bit_length()} bits; expected at most 64"
    plain = isinstance(item, (float, bytes))
    return "" if plain else f"found {brief(item)}; expected plain data, such as texts and numbers"


def _is_text(key: object) -> bool:
    """Return True if a map's key is a text without lone surrogates."""
    return isinstance(key, str) and is_encodable(key)


def _path(place: _Place) -> str:
    """Return a place within a value as text: ((None, "a"), 1) gives "a.1: ", and None gives "".

    A place is (the place around it, a key or index). Of a deep one come the six outermost steps and
    "...".
    """
    steps: list[object] = []
    while place is not None:
        place, step = place
        steps.insert(0, step)
    shown = [brief(step).strip("'") for step in steps[:6]] + ["..."] * (len(steps) > 6)
    return f"{'.'.join(shown)}: " if shown else ""


def is_encodable(text: str) -> bool:
    """Return True unless the text has a lone surrogate, such as "\\ud800", which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def brief(value: object) -> str:
    """Return the repr of a value of unknown origin, for errors, cut to at most 60 characters.

    A cut text ends in "..."; long lists, maps and texts are cut inside too. An integer of over 4300
    digits gives "a value of type int".
    """
    try:
        text = reprlib.repr(value)  # plain repr fails on a thousand nested lists
    except ValueError:  # an integer of over 4300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
