"""Environment variables: their names, the settings they give, and the reverse.

Example: LEARNER_MAX_STEPS=100 gives `{"learner": {"max_steps": "100"}}`.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated

from dotenv import dotenv_values
from dotenv.parser import Binding, parse_stream
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.other_names import same_here
from penstock.common.config.redis_url import parse_url
from penstock.common.config.secret_file import read_secret
from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings, Section
from penstock.common.errors import ConfigError
from penstock.common.files.reading import absence, at_home, read_text
from penstock.common.text import did_you_mean

SECTIONS: dict[str, type[Section]] = {
    "RUN": RunSettings, "LEARNER": LearnerSettings, "ACTOR": ActorSettings, "REWARDER": RewarderSettings
}  # fmt: skip
"""The sections by the prefix of their variables."""

START_HERE = (
    "LEARNER_MODEL", "LEARNER_DATASET", "LEARNER_REWARDS", "RUN_NAME", "LEARNER_MAX_STEPS",
    "LEARNER_LEARNING_RATE", "LEARNER_GROUPS_PER_STEP", "LEARNER_NUM_GENERATIONS",
    "LEARNER_MAX_COMPLETION_LENGTH", "LEARNER_EVAL_HOLDOUT",
)  # fmt: skip
"""The settings that matter first, in the order in which a new run decides about them."""

REQUIRED = ("LEARNER_MODEL", "LEARNER_DATASET")
"""Settings without which no run can start. An evaluation needs no LEARNER_DATASET."""

UP_ENV_FILE = "PENSTOCK_UP_ENV_FILE"
"""Variable by which `penstock up` tells its processes the path of its --env-file."""

_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)$")


def variables() -> list[str]:
    """Return the names of the variables of all settings, set or not, such as LEARNER_MAX_STEPS."""
    return [
        f"{prefix}_{name.upper()}" for prefix, kind in SECTIONS.items() for name in kind.model_fields
    ]


def field_of(variable: str) -> FieldInfo:
    """Return the field of the setting that `variable` sets. Raise KeyError if there is none."""
    prefix, _, name = variable.partition("_")
    return SECTIONS[prefix].model_fields[name.lower()]


def _is_file(path: Path) -> Path:
    """Return `path`. Raise ValueError if no file is there."""
    if os.path.isfile(path):
        return path
    found = "expected a regular file, found something else" if os.path.exists(path) else absence(path)
    raise ValueError(f"--env-file {path}: {found}")


EnvFile = Annotated[Path, AfterValidator(_is_file)]
"""The file of variables that --env-file names."""


def check_names(names: Iterable[str], env_file: Path | str | None = None) -> None:
    """Raise ConfigError for those of `names` that should be a setting's but are none, a line for each.

    Such a name begins with RUN_, LEARNER_, ACTOR_ or REWARDER_. A line has the nearest known name, or
    ours for a setting of TRL, verl, ms-swift or prime-rl, and says whether this process or `env_file`
    has the name. Names that Kubernetes sets, such as LEARNER_PORT and LEARNER_SERVICE_HOST, pass.
    """
    known = variables()
    lines = []
    for name in sorted(set(names).difference(known)):
        prefix, underscore, setting = name.partition("_")
        if prefix in SECTIONS and underscore and not _KUBERNETES.search(name):
            hint = did_you_mean(name, known, "docs/configuration.md lists the names")
            place = f" (in {env_file}: correct or delete it there)" if env_file else ""
            if name in os.environ:
                place = f" (set in this process: correct it, or type `unset {name}`)"
            lines.append(f"unknown variable {name}: {same_here(setting) or hint}{place}")
    if lines:
        raise ConfigError("\n".join(lines))


def read_environment(env_file: Path | str | None, strict: bool = True) -> dict[str, str]:
    """Return the variables of the file `env_file`, if given, and of this process, which win.

    A file that is missing gives none. Values are taken as they are: ${NAME} is not replaced. Raise
    ConfigError if the file cannot be read or is not UTF-8 and, if `strict`, for its lines that set no
    variable, or a setting's name in small letters.
    """
    path = Path(env_file or "")
    found = lines_of(path) if path.is_file() else []
    faults = [f"{path}, line {line}: {fault}" for line, one in found if (fault := _fault_of(one))]
    if faults and strict:
        raise ConfigError("\n".join([*faults, "Correct these lines, or write # before them"]))
    return {at.key: at.value for _, at in found if at.key and at.value is not None} | dict(os.environ)


def lines_of(path: Path) -> list[tuple[int, Binding]]:
    """Return a file's variables and comments by line. Raise ConfigError if it cannot be read."""
    found = []
    for one in parse_stream(StringIO(read_text(path, f"--env-file {path}"))):
        text = one.original.string
        blank = text[: len(text) - len(text.lstrip())].count("\n")  # the parser counts from there
        found.append((one.original.line + blank, one))
    return found


def _fault_of(line: Binding) -> str:
    """Return why a line is refused, or "". Of the line only its first word is shown: no password."""
    name = line.key or ""
    if line.error or (name and line.value is None):
        begin = re.sub(r"(?s)\W.*", " ...", line.original.string.strip())
        return f"{begin} sets no variable, expected NAME=VALUE"
    meant = name.upper()
    if meant in variables() and (line.value or "").startswith("${"):
        return f"{name} begins with ${{, which is not replaced: write the value itself"
    return f"{name} is no setting, expected {meant}" if name != meant and meant in variables() else ""


def origins_of(names: Iterable[str], env_file: Path | None) -> dict[str, str]:
    """Return by variable where its value comes from: "flag", a file of variables, or "environment".

    `names` are variables that are set in this process, and `env_file` is that of its --env-file. A
    variable of the process that has the value which the file of `penstock up` gives it came from there.
    """
    flags = {word.partition("=")[0] for word in sys.argv[1:]}
    shared = Path(os.environ.get(UP_ENV_FILE, ""))
    given = dotenv_values(shared, interpolate=False) if shared.is_file() else {}
    found = {}
    for name in names:
        section, _, setting = name.lower().partition("_")
        if f"--{section}.{setting.replace('_', '-')}" in flags:
            found[name] = "flag"
        elif name in os.environ:
            found[name] = str(shared) if given.get(name) == os.environ[name] else "environment"
        else:
            found[name] = str(env_file or "flag")  # such as --learner '{"max_steps": 3}'
    return found


def values_of(
    kind: type[BaseModel], environment: Mapping[str, str], env_file: Path | str | None = None
) -> dict[str, object]:
    """Return the values that variables give to the sections and the `redis_url` of the command `kind`.

    `environment` has this process's variables and those of `env_file`. The result has what is set: with
    LEARNER_MAX_STEPS=100 alone {"learner": {"max_steps": "100"}, "run": {}, "redis_url": ""} for a
    command with these fields. Raise ConfigError for an unknown variable or an unreadable REDIS_URL_FILE.
    """
    check_names(environment, env_file)
    found: dict[str, object] = {"redis_url": _redis_url(environment)}
    for prefix, section in SECTIONS.items():
        variable_of = {name: f"{prefix}_{name.upper()}" for name in section.model_fields}
        found[prefix.lower()] = {
            name: environment[variable]
            for name, variable in variable_of.items()
            if variable in environment
        }
    return {name: value for name, value in found.items() if name in kind.model_fields}


def _redis_url(environment: Mapping[str, str]) -> str:
    """Return REDIS_URL, or the line of the file that REDIS_URL_FILE names, or "" if neither is set.

    `environment` has the variables by name. Raise ConfigError if both are set, or if the file cannot be
    read or is not one line of text.
    """
    url, file = environment.get("REDIS_URL", ""), environment.get("REDIS_URL_FILE", "")
    if url and file:
        raise ConfigError("REDIS_URL and REDIS_URL_FILE are both set, expected one; unset the other")
    return read_secret(at_home(Path(file)), "REDIS_URL_FILE") if file else url


def environment_of(settings: BaseModel) -> dict[str, str]:
    """Return the variables of all settings of a command, defaults too, as --dry-run prints them.

    `settings` is the command. REDIS_URL is there only if it is set. It has *** for user and password,
    and no options: a command needs the real one.
    """
    url = getattr(settings, "redis_url", "")
    found = {"REDIS_URL": str(parse_url(url))} if url else {}
    for prefix in SECTIONS:
        if section := getattr(settings, prefix.lower(), None):
            found |= section_variables(prefix, section)
    return found


def section_variables(prefix: str, section: BaseModel) -> dict[str, str]:
    """Return the variables of a section's fields, unset ones included; `prefix` is such as "RUN"."""
    fields = section.model_dump(mode="json")
    return {f"{prefix}_{name.upper()}": _text_of(value) for name, value in fields.items()}


def _text_of(value: object) -> str:
    """Return a setting's value as its variable's text: maps as JSON, lists with commas, else str()."""
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
