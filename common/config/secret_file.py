"""Secrets that are read from files, because the environment and the command line are easily seen."""

import stat
import sys
from pathlib import Path

from penstock.common.errors import ConfigError

_LONGEST = 4096


def read_secret(path: Path, setting: str) -> str:
    """Return the one line of the file `path`, without spaces around the text.

    `setting`, the variable that names the file, begins warning and errors. Warn on standard error if
    other users may read or write the file, or its group may write. Raise ConfigError, without the file's
    content, if the file cannot be read, is empty or no UTF-8, or has several lines, an unprintable
    character or over 4096.
    """
    try:
        with path.open("rb") as file:
            text = file.read(4 * _LONGEST + 1).decode().strip()  # a letter has up to four bytes
            mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8"
        text = f"{setting}: {path} cannot be read ({cause}), expected one line; name another file"
        raise ConfigError(text) from None
    if not text or len(text) > _LONGEST or not text.isprintable():
        form = f"expected one line of printable text in {path}, found another form"
        raise ConfigError(f"{setting}: {form}; write the secret alone into it")
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        seen = f"other users may read or change {path}: `chmod 600 {path}`"
        print(f"warning: {setting}: {seen}", file=sys.stderr, flush=True)
    return text
