"""Conversions of texts of unknown origin, such as a data set's columns and a model's completions."""

import json
from typing import Any

SHOWN = 2000
"""Most letters of a question, a completion or a reason in a verdict, which people read."""


def as_text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def short(value: object, letters: int = 200) -> str:
    """Return the text of an error or value of unknown origin, cut to so many letters.

    Example:
        >>> short("a" * 10, letters=6)
        'aaa...'
    """
    text = encodable(str(value)[: letters + 1])
    return text if len(text) <= letters else f"{text[: letters - 3]}..."


def encodable(text: str) -> str:
    """Return the text with each lone surrogate, which UTF-8 cannot encode, replaced by its escape.

    Example:
        >>> encodable("a\\ud800")
        'a\\\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return the text with unprintable letters, such as terminal commands, escaped. Line ends stay.

    Example:
        >>> printable("a\\x1b[2J")
        'a\\\\x1b[2J'
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
