"""Conversions of texts of unknown origin, such as a data set's columns and a model's completions."""

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

SHOWN = 2000
"""Most characters of a question, a completion or a reason in a verdict, which people read."""

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)
"""A model or data set of the Hugging Face hub: NAME or OWNER/NAME."""

_BYTES = "\0bytes"
"""The only key of a map that stands for bytes in a line of JSON. Its value has a letter per byte."""
_WORD = re.compile(r"\S+")
_ACCENT = "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20dc\ufe20-\ufe2f]"
_UNSEEN = re.compile(
    "[\u034f\u0488\u0489\u115f\u1160\u17b4\u17b5\u180b-\u180f\u20dd-\u20e4\u3164\uffa0"
    f"\U000e0100-\U000e01ef]|(?<={_ACCENT * 4}){_ACCENT}"
)
"""What Python calls printable: characters without width, frames around a letter, piles of accents."""
_FORM = "USER:PASSWORD@HOST"  # of a URL in the text of an error
_PASSWORD = re.compile(r"((?:password|passwd|secret|token|api_?key)=)[^\s&]+", re.IGNORECASE)


def as_text(value: Any) -> str:
    """Return a text unchanged, any other value as JSON; parts that JSON has no form for become str()."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def to_line(value: Any) -> str:
    """Return a value as a line of JSON for `from_line`; parts without a form in JSON become str()."""
    return json.dumps(
        value, default=lambda x: {_BYTES: str(x, "latin-1")} if type(x) is bytes else str(x)
    )


def from_line(line: str | bytes) -> Any:
    """Return the value that `to_line` was given. Raise ValueError if the line is no JSON."""

    def restored(found: dict[str, Any]) -> Any:
        """Return the bytes that a map stands for, or the map, also one that a data set has by chance."""
        letters = found.get(_BYTES)
        return letters.encode("latin-1") if isinstance(letters, str) and len(found) == 1 else found

    return json.loads(line, object_hook=restored)


def short(value: object, length: int = 200) -> str:
    """Return str(value), of an error or value of unknown origin, cut to at most `length` characters.

    `length` is 3 or more. A cut text ends in "..."; lone surrogates, which UTF-8 cannot encode, are
    escaped. For an error without text, such as a bare assert, the result is repr(value).
    Example:
        >>> short("a" * 10, length=6), short(AssertionError())
        ('aaa...', 'AssertionError()')
    """
    shown = str(value) or (repr(value) if isinstance(value, BaseException) else "")
    text = encodable(shown[: length + 1])
    return text if len(text) <= length else f"{text[: length - 3]}..."


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean NEAREST?" with the name in `known` nearest to `name`; `otherwise` for none.

    Example:
        >>> did_you_mean("temprature", ["temperature", "top_p"])
        'did you mean temperature?'
    """
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 group", "2 groups".

    Example:
        >>> counted(1200, "group")
        '1,200 groups'
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def encodable(text: str) -> str:
    """Return the text with each lone surrogate, which UTF-8 cannot encode, replaced by its escape.

    Example:
        >>> encodable("a\\ud800")
        'a\\\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def hide_passwords(text: str) -> str:
    """Return the text with `***` for the login of each URL and for values such as that of `password=`.

    The other names are passwd=, secret=, token=, api_key= and apikey=, in upper or lower case, also as
    the end of a name such as hf_token=. A value ends before a space or `&`. The login USER:PASSWORD of
    "USER:PASSWORD@HOST" is no secret and stays.
    Example:
        >>> hide_passwords("redis://me:secret@host/0 and http://host?password=secret")
        'redis://***@host/0 and http://host?password=***'
    """
    if ":/" in text:
        text = _WORD.sub(_hide_login, text)
    return _PASSWORD.sub(r"\1***", text)


def _hide_login(word: re.Match[str]) -> str:
    """Return a word with `***` for the login of a URL in it, up to the last `@`; another word unchanged.

    `word` is a match of letters without spaces. The URL may have one slash, as if it were a path. The
    form USER:PASSWORD@HOST stays. The time is in proportion to the word's length.
    """
    scheme, mark, rest = word[0].partition(":/")
    _, at, place = rest.rpartition("@")
    slash = "/" if rest.startswith("/") else ""
    is_form = rest[len(slash) :].startswith(_FORM)
    return f"{scheme}{mark}{slash}***@{place}" if at and not is_form else word[0]


def printable(text: str) -> str:
    """Return the text with unprintable characters, such as terminal commands, escaped. Line ends stay.

    Unprintable are control characters, line separators, characters that have no width or change the
    direction of writing, and the fifth and further accents of a letter. Every command and every log line
    of text is printed through this function.
    Example:
        >>> printable("a\\x1b[2J")
        'a\\\\x1b[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    text = _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def one_line(text: str) -> str:
    """Return the text with unprintable characters escaped, its line ends too.

    Example:
        >>> one_line("a\\nb")
        'a\\\\nb'
    """
    return printable(text).replace("\n", "\\n")


def indented(text: str) -> str:
    """Return the text with all lines but the first indented by two spaces: "a\\n  b" for "a\\rb"."""
    return "\n  ".join(text.splitlines())


def as_block(text: str) -> str:
    """Return the text as `printable` does, with all lines but the first indented by two spaces.

    A value with line ends inside it cannot look like another line of the log then.
    Example:
        >>> as_block("a\\nb")
        'a\\n  b'
    """
    return printable(text).replace("\n", "\n  ")
