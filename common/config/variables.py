"""Environment variables: their names, the settings they give, and the reverse.

Example: LEARNER_MAX_STEPS=100 gives `{"learner": {"max_steps": "100"}}`.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dotenv import dotenv_values
from pydantic import BaseModel

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings, Section
from penstock.common.errors import ConfigError

SECTIONS: dict[str, type[Section]] = {
    "RUN": RunSettings,
    "LEARNER": LearnerSettings,
    "ACTOR": ActorSettings,
    "REWARDER": RewarderSettings,
}
"""The sections by the prefix of their variables."""

_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)$")


def variables() -> list[str]:
    """Return the names of all variables that begin with a prefix of SECTIONS."""
    return [
        f"{prefix}_{field.upper()}"
        for prefix, section in SECTIONS.items()
        for field in section.model_fields
    ]


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if a name has a prefix of SECTIONS but is no setting, with the nearest name.

    Names that Kubernetes sets, such as LEARNER_PORT and LEARNER_SERVICE_HOST, pass.
    """
    known = set(variables())
    for name in sorted(names):
        prefix = name.partition("_")[0]
        if prefix not in SECTIONS or "_" not in name or name in known or _KUBERNETES.search(name):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists the names"
        raise ConfigError(f"unknown variable {name}: {hint}")


def read_environment(env_file: Path | str | None) -> dict[str, str]:
    """Return the variables of the file and of this process, which win over the file's."""
    from_file = dotenv_values(env_file) if env_file else {}
    return {name: value for name, value in from_file.items() if value is not None} | dict(os.environ)


def values_of(kind: type[BaseModel], environment: Mapping[str, str]) -> dict[str, object]:
    """Return the values that variables give to a command's sections and to its `redis_url`.

    Raise ConfigError if a variable's name is unknown.
    """
    check_names(environment)
    found: dict[str, object] = {}
    if "redis_url" in kind.model_fields and "REDIS_URL" in environment:
        found["redis_url"] = environment["REDIS_URL"]
    for prefix, section in SECTIONS.items():
        field = kind.model_fields.get(prefix.lower())
        if field is not None and field.annotation is section:
            found[prefix.lower()] = {
                name: environment[variable]
                for name in section.model_fields
                if (variable := f"{prefix}_{name.upper()}") in environment
            }
    return found


def environment_of(settings: BaseModel) -> dict[str, str]:
    """Return the variables that give a command these settings, as --dry-run prints them."""
    found = {"REDIS_URL": url} if (url := getattr(settings, "redis_url", "")) else {}
    for prefix, kind in SECTIONS.items():
        section = getattr(settings, prefix.lower(), None)
        if isinstance(section, kind):
            for name, value in section.model_dump(mode="json").items():
                found[f"{prefix}_{name.upper()}"] = (
                    ",".join(map(str, value)) if isinstance(value, list) else str(value)
                )
    return found
