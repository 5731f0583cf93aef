"""From a command line and an environment to checked settings.

Every command of the project starts here, so that a wrong variable is found before anything heavy is
imported. Wrong settings raise ConfigError with one line per mistake.
"""

import difflib
import os
import re
import sys
from pathlib import Path
from typing import Any, TypeVar

from dotenv import dotenv_values
from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, CliImplicitFlag, SettingsConfigDict, SettingsError

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

Command = TypeVar("Command", bound="CommandSettings")


class CommandSettings(BaseSettings):
    """What every command takes; a role's command adds its own section."""

    model_config = SettingsConfigDict(
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="ignore",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        nested_model_default_partial_update=True,
    )

    redis_url: str = Field("", description="queue server; empty: the one `penstock up` started")
    run: RunSettings = RunSettings()
    dry_run: CliImplicitFlag[bool] = Field(
        False,
        validation_alias=AliasChoices("dry-run"),
        description="print the settings and end (--env-file FILE reads variables from a file)",
    )


class LearnerCommand(CommandSettings):
    """Train the policy: issue tickets, take scored groups, publish weights."""

    learner: LearnerSettings = LearnerSettings()


class ActorCommand(CommandSettings):
    """Generate completions for the tickets of a run."""

    actor: ActorSettings = ActorSettings()


class RewarderCommand(CommandSettings):
    """Score the completions of a run and filter groups without signal."""

    rewarder: RewarderSettings = RewarderSettings()


class RunCommand(CommandSettings):
    """Look at a run's queues."""


def load(kind: type[Command], prog: str, arguments: list[str] | None = None) -> Command:
    """Settings of a command from flags, environment and --env-file; raises ConfigError.

    `--help` prints and exits with 0.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    env_file = _take_env_file(arguments)
    check_names(dict(os.environ) | dict.fromkeys(_read_env_file(env_file), ""))

    class WithProgram(kind):  # type: ignore[misc, valid-type]
        __doc__ = kind.__doc__
        model_config = SettingsConfigDict(cli_prog_name=prog)

    try:
        return WithProgram(_cli_parse_args=arguments, _env_file=env_file)
    except ValidationError as error:
        raise ConfigError("\n".join(mistake(detail) for detail in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(f"{prog}: {error}: {error.__cause__}") from error
    except SystemExit as ending:
        if ending.code in (0, None):
            raise
        raise ConfigError(f"{prog}: see the line above, and `{prog} --help`") from ending


def check_names(environment: dict[str, Any]) -> None:
    """Refuse variables that carry one of our prefixes but are not ours; raises ConfigError."""
    known = set(variables())
    for name in sorted(environment):
        prefix = name.partition("_")[0]
        if prefix not in SECTIONS or "_" not in name or name in known or _KUBERNETES.search(name):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"`{prefix.lower()} --help` lists the names"
        raise ConfigError(f"unknown variable {name}: {hint}")


def variables() -> list[str]:
    """The names of all environment variables of the project's own."""
    return [
        f"{prefix}_{field.upper()}"
        for prefix, section in SECTIONS.items()
        for field in section.model_fields
    ]


def environment_of(settings: CommandSettings) -> dict[str, str]:
    """The environment that would give these settings: what --dry-run prints."""
    found = {"REDIS_URL": settings.redis_url} if settings.redis_url else {}
    for prefix, kind in SECTIONS.items():
        section = getattr(settings, prefix.lower(), None)
        if isinstance(section, kind):
            for name, value in section.model_dump(mode="json").items():
                found[f"{prefix}_{name.upper()}"] = (
                    ",".join(map(str, value)) if isinstance(value, list) else str(value)
                )
    return found


def _take_env_file(arguments: list[str]) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == "--env-file":
            if position + 1 == len(arguments):
                raise ConfigError("--env-file needs the name of a file")
            path = arguments[position + 1]
            del arguments[position : position + 2]
            return path
        if argument.startswith("--env-file="):
            del arguments[position]
            return argument.partition("=")[2]
    return None


def _read_env_file(path: str | None) -> dict[str, str | None]:
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ConfigError(f"--env-file {path}: no such file")
    return dotenv_values(path)


def mistake(detail: Any, *section: str) -> str:
    """What is wrong with a variable, from pydantic's account of it; `section` goes before its name."""
    place = [*section, *(str(part) for part in detail["loc"])]
    name = "_".join(place[:2]).upper()
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    found = "" if isinstance(detail["input"], dict) else f", found {detail['input']!r}"
    return f"{name}: {detail['msg']}{found}"
