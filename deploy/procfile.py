"""Procfiles: the processes of a run, one `name: command` per line."""

import re
from pathlib import Path

from penstock.common.errors import ConfigError
from penstock.common.files.reading import read_text

SHIPPED = Path(__file__).with_name("Procfile")
"""Used where the working directory has no Procfile of its own."""

_LINE = re.compile(r"(?P<name>[A-Za-z0-9_-]+)\s*:\s*(?P<command>\S.*)")


def read_procfile(path: Path | None) -> dict[str, str]:
    """Return the commands of the Procfile `path` by name, in order.

    For None the file is ./Procfile or, if there is none, the one that comes with Penstock. Raise
    ConfigError if the file is missing, malformed, not readable or not UTF-8.
    """
    path = path or (Path("Procfile") if Path("Procfile").is_file() else SHIPPED)
    if not path.is_file():
        raise ConfigError(f"--procfile {path}: no such file; name one with lines `name: command`")
    return parse(read_text(path, f"--procfile {path}"), str(path))


def parse(text: str, source: str) -> dict[str, str]:
    """Return the commands of a Procfile's `text` by name, in order. `source` is its name in errors.

    Empty lines and lines that begin with # are left out. Raise ConfigError for a line that is not `name:
    command`, a name that is there twice, or no command at all.
    """
    commands: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigError(f"{source}, line {number}: found {line!r}, write `name: command`")
        if found["name"] in commands:
            raise ConfigError(f"{source}, line {number}: {found['name']} is there twice; rename one")
        commands[found["name"]] = found["command"]
    if not commands:
        raise ConfigError(f"{source} names no process: write lines `name: command`")
    return commands
