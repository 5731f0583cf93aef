"""Texts of unknown origin: a column as text, and anything as what a terminal may be shown."""

import json
from typing import Any

SHOWN = 2000
"""Letters of a question and a completion that ride along with a verdict, to be shown."""


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def encodable(text: str) -> str:
    """The text with each lone surrogate, which UTF-8 cannot hold, written out.

    Example:
        >>> encodable("a\\ud800")
        'a\\\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """The text with all written out that a terminal would obey; line ends stay.

    Example:
        >>> printable("a\\x1b[2J")
        'a\\\\x1b[2J'
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
