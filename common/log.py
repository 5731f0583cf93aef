"""Structured logs on standard error: one event with its fields per line, as text or as JSON."""

import logging
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from penstock.common.text import as_block, hide_passwords, one_line

_LINE = 135
"""Characters of a sentence in a log line of 160 characters; the others are for time and level."""


def is_coloured(file: TextIO) -> bool:
    """Return whether to write colours: to a terminal, unless NO_COLOR is set or TERM is "dumb"."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Lossy:
    """Writes to `file`, but drops what its disk has no room for: no log line is worth the work."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return the file's method `name`; an OSError of it has no effect, but for BrokenPipeError."""

        def call(*given: object) -> None:
            """Call the method with the arguments `given`. Raise BrokenPipeError if nobody reads."""
            try:
                getattr(self._file, name)(*given)
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    raise

        return call


def configure_logs(role: str, form: Literal["text", "json"]) -> None:
    """Send this process's log lines to standard error, from level info on, as "text" or "json" (`form`).

    A line that cannot be written, as on a full disk, is dropped. Passwords are ***. Lines of JSON have
    the field `role`. Lines of text do not name the role; their unprintable characters are escaped, and
    they are coloured on a terminal.
    """

    def add_role(_logger: object, _method: str, event: EventDict) -> EventDict:
        """Return the fields of a log line, `event`, and `role`. Logger and method are unused."""
        return {"role": role, **event}

    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=is_coloured(sys.stderr), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            *([add_role] if form == "json" else []),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if form == "text" else "iso", utc=False),
            structlog.processors.format_exc_info,
            _hide,
            *([] if form == "json" else [_escape]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lossy(sys.stderr))),
    )


def log_errors_alone() -> None:
    """Log only errors in this process from now on: its own texts are on the screen."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _escape(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return the fields of a log line, `event`, with unprintable characters, line ends too, escaped.

    This concerns names and values. Only a traceback (the fields `exception` and `stack`) keeps its line
    ends: it begins on a new line, and its lines are indented. Another value keeps its type if its text
    is printable, else it becomes text. Logger and method are unused.
    """
    found: EventDict = {}
    for name, value in event.items():
        text = value if isinstance(value, str) else repr(value)
        if name in ("exception", "stack"):
            found[name] = as_block(f"\n{text}")
        else:
            found[one_line(name)] = value if text.isprintable() else one_line(text)
    return found


def _hide(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return the fields of a log line, `event`, with the passwords in their values as ***.

    Passwords are found by `hide_passwords`. A value that is no text becomes its repr() if a password is
    in it, else it stays as it is. Logger and method are unused.
    """
    found: EventDict = {}
    for name, value in event.items():
        text = value if isinstance(value, str) else repr(value)
        hidden = hide_passwords(text)
        found[name] = value if hidden == text else hidden
    return found


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger. Its methods (info, warning, ...) take an event, a text, and the event's fields.

    `name` is not shown in the lines and has no effect on them.
    """
    return cast(FilteringBoundLogger, structlog.get_logger(name))


def shorten(sentence: str) -> str:
    """Return a sentence cut at a word to at most 135 characters; a cut sentence ends in " ...".

    Its log line then has at most 160 characters. Spaces and line ends in a row become one space. A first
    word of over 135 characters gives "..." alone.
    """
    return textwrap.shorten(sentence, _LINE, placeholder=" ...")
