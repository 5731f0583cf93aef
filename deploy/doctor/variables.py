"""Checks of the variables: unknown and nearly known names, wrong values, lines of no effect, secrets."""

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from dotenv.parser import Binding
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.common.config.command import mistake
from penstock.common.config.variables import SECTIONS, check_names, lines_of, values_of, variables
from penstock.common.errors import ConfigError
from penstock.deploy.doctor.finding import Finding
from penstock.deploy.doctor.settings import Settings

_URLS = ("REDIS_URL", "REDIS_URL_FILE")
_NEAR = 0.88
"""How alike a name and a setting's are, from 0 to 1, that were probably meant to be the same."""
_SECRET = re.compile(r"(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|ACCESS_KEY)$")
_OWN = ("PENSTOCK_FAILPOINT", "PENSTOCK_GUARD", "PENSTOCK_OPENENV", "PENSTOCK_REWARD_PACKAGES")
_REFUSED = "every role refuses to start"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_variables(environment: Mapping[str, str], env_file: Path | None) -> Iterator[Finding]:
    """Yield what is wrong with the names of the variables `environment`, and with the lines of the file.

    Raise ConfigError if the file cannot be read.
    """
    for name in sorted(environment):
        yield from _check_name(name, environment, env_file)
    if env_file is not None:
        yield from _check_file(env_file)
    for name in ("REDIS_URL_FILE", "RUN_QUEUE_PASSWORD_FILE"):
        if path := environment.get(name):
            yield from _check_mode(Path(path), f"{name} names {path}, which holds a password")


def read_settings(
    environment: Mapping[str, str], env_file: Path | None
) -> tuple[Settings | None, list[Finding]]:
    """Return the settings of all roles, and a finding per wrong value. With one, the settings are None.

    Names that are no setting's are left out: `check_variables` reports them.
    """
    known = {name: value for name, value in environment.items() if _is_known(name)}
    try:
        return Settings.model_validate(values_of(Settings, known)), []
    except ConfigError as error:
        why = "no role can start: it does not know the queue server"
        return None, [Finding("values", "error", str(error), why, "do: correct the variable")]
    except ValidationError as error:
        return None, [_wrong_value(detail, known, env_file) for detail in error.errors()]


def removal(name: str, env_file: Path | None) -> str:
    """Return the remedy that takes the variable `name` away: from the file, or from the process."""
    if not _NAME.fullmatch(name):
        return "do: delete the variable"
    if env_file is None or name in os.environ:
        return f"type: unset {name}"
    return _edit(f"/^ *(export +)?{name} *=/s/^/# /", env_file)


def _is_known(name: str) -> bool:
    """Return whether a variable of this name passes `check_names`."""
    try:
        check_names([name])
    except ConfigError:
        return False
    return True


def _check_name(name: str, environment: Mapping[str, str], env_file: Path | None) -> Iterator[Finding]:
    """Yield a finding if `name` is no setting's name, but has a section's prefix or is nearly one."""
    known = [*variables(), *_URLS]
    if name in known or name in _OWN:
        return
    meant = name.upper().removeprefix("PENSTOCK_")
    near = next(iter(difflib.get_close_matches(meant, known, n=1, cutoff=_NEAR)), "")
    if not near and meant != name:
        near = next((f"{part}_{meant}" for part in SECTIONS if f"{part}_{meant}" in known), "")
    refused = (name.upper() in variables() and name not in os.environ) or not _is_known(name)
    if refused:
        near = near or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), "")
    if not (refused or near):
        return
    found = f"the variable {name} is set, and no setting has this name"
    why = _REFUSED if refused else "it is ignored, and the setting has its default"
    replaced = near and near not in environment and _NAME.fullmatch(name)
    remedy = _renaming(name, near, env_file) if replaced else removal(name, env_file)
    nearest = f"; the nearest name is {near}" if near else ""
    yield Finding("names", "error" if refused else "warning", found, f"{why}{nearest}", remedy)


def _renaming(name: str, near: str, env_file: Path | None) -> str:
    """Return the remedy that gives the variable `name` the name `near`, in the file or the process."""
    if env_file is None or name in os.environ:
        return f'type: export {near}="${name}"; unset {name}'
    return _edit(f"s/^( *(export +)?){name} *=/\\1{near}=/", env_file)


def _edit(script: str, path: Path) -> str:
    """Return the remedy that changes a file by a script of sed, and keeps the old file as FILE.bak."""
    return f"type: sed -E -i.bak {shlex.quote(script)} {shlex.quote(str(path))}"


def _wrong_value(detail: ErrorDetails, known: Mapping[str, str], env_file: Path | None) -> Finding:
    """Return the finding of an error of pydantic: the variable goes back to its default.

    Of several settings that contradict each other the first that the error names and that is set goes.
    """
    found = mistake(detail, detail["loc"])
    named = [name for name in re.findall(r"[A-Z][A-Z0-9_]+", found) if name in known]
    why = "every role that reads this setting refuses to start"
    remedy = removal(named[0], env_file) if named else "do: correct the setting"
    return Finding("values", "error", found, why, remedy)


def _check_file(path: Path) -> Iterator[Finding]:
    """Yield findings on the file of variables: lines of no effect, doubles, secrets, other values.

    Raise ConfigError if the file cannot be read.
    """
    lines = lines_of(path)
    seen: dict[str, tuple[str | None, int]] = {}
    for line, binding in lines:
        yield from _check_line(binding, line, seen, path)
    values = {one.key: one.value for _, one in lines if one.key}
    for name in (*variables(), *_URLS):
        value, other = values.get(name), os.environ.get(name)
        if None not in (value, other) and value != other:
            found = f"{name} has another value in this process than in {path}"
            why = "the value of the process is used, not that of the file"
            yield Finding("names", "warning", found, why, f"type: unset {name}")
    url = values.get("REDIS_URL") or ""
    if "@" in url or any(_SECRET.search(name) and value for name, value in values.items()):
        yield from _check_mode(path, f"{path} holds a password or a key")


def _check_line(
    binding: Binding, line: int, seen: dict[str, tuple[str | None, int]], path: Path
) -> Iterator[Finding]:
    """Yield a finding if line `line` of the file `path` sets no variable, or that of an earlier line.

    `seen` has by name the value and the number of the earlier line that counts so far; this one is
    added. The remedies make comments of lines, so that the other lines keep their numbers.
    """
    name = binding.key
    if binding.error or (name is not None and binding.value is None):
        found = f"line {line} of {path} sets no variable: expected NAME=VALUE"
        yield Finding("lines", "error", found, _REFUSED, _edit(f"{line}s/^/# /", path))
    elif name is not None:
        if name in seen and seen[name][0] != binding.value:
            found = f"line {line} of {path} sets {name} again, to another value"
            remedy = _edit(f"{seen[name][1]}s/^/# /", path)
            yield Finding("lines", "warning", found, "the last line counts", remedy)
        seen[name] = binding.value, line


def _check_mode(path: Path, found: str) -> Iterator[Finding]:
    """Yield a finding if other users may read or change a secret's file; none if it cannot be read."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if mode & 0o066:
        what = f"{found}, and other users may read or change it (mode {mode & 0o777:o})"
        why = "whoever has the password controls the run: its code and its data"
        yield Finding("secrets", "warning", what, why, f"type: chmod 600 {shlex.quote(str(path))}")
