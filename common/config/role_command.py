"""The commands that read variables, and the settings of the roles."""

import re
from collections.abc import Mapping
from textwrap import shorten
from typing import ClassVar, Self

from pydantic import Field, NonNegativeInt, create_model, field_validator, model_validator
from pydantic_settings import CliPositionalArg, CliToggleFlag

from penstock.common.config.command import Command, parser_of
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.redis_url import parse_url
from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings, Section
from penstock.common.config.variables import (
    REQUIRED,
    SECTIONS,
    START_HERE,
    EnvFile,
    environment_of,
    field_of,
)
from penstock.common.errors import ConfigError
from penstock.common.files.modes import umask
from penstock.common.log import configure_logs
from penstock.common.text import one_line, printable


class SettingsCommand(Command):
    """Base of the commands that read variables."""

    env_file: EnvFile | None = Field(None, description="file with variables; those of the process win")
    redis_url: str = Field(
        "", repr=False, description="queue server; empty: the server that `penstock up` started"
    )
    dry_run: CliToggleFlag[bool] = Field(
        False, validation_alias="dry-run", description="print the settings as variables and end"
    )

    @field_validator("redis_url")
    @classmethod
    def _well_formed(cls, url: str) -> str:
        """Return `url`. Raise ValueError, with no part of it, unless it is "" or a form of REDIS_URL."""
        try:
            if url:
                parse_url(url)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return url


class RunCommand(SettingsCommand):
    """Base of the commands that concern one run."""

    role: ClassVar[str] = ""
    """Name in the log lines."""

    run: RunSettings = Field(RunSettings(), description="Shared by all processes of a run (RUN_*).")

    def execute(self) -> int:
        """Do the work of the command by `work` and return its exit code.

        Log lines are set up before by RUN_LOG_FORMAT; the umask is RUN_UMASK during the work. With
        --dry-run only print the settings as variables, then what `describe` returns as "# TITLE: VALUE";
        return 0. Raise what these methods raise.
        """
        if self.dry_run:
            for name, value in environment_of(self).items():
                print(printable(f"{name}={value}"))
            for title, figure in self.describe().items():
                print(one_line(f"# {title}: {figure}"))
            return 0
        configure_logs(self.role, self.run.log_format)
        with umask(self.run.umask):
            return self.work()

    def describe(self) -> Mapping[str, object]:
        """Return what --dry-run prints beside the settings: derived values by title; here none, {}."""
        return {}

    def work(self) -> int:
        """Do the work and return the exit code. Raise PenstockError if the work fails. Abstract here."""
        raise NotImplementedError


class RoleCommand(RunCommand):
    """Base of the commands `learner`, `actor` and `rewarder`."""

    general: ClassVar[type[SettingsCommand]] = SettingsCommand
    """Has the flags of the role that are no settings."""

    words: CliPositionalArg[list[str]] = Field([], description="`help SECTION` prints its flags")

    @field_validator("words")
    @classmethod
    def _only_help(cls, words: list[str]) -> list[str]:
        """Return `words`, the arguments that are no flags, unchanged.

        Raise ValueError unless they are none, `help`, or `help SECTION`.
        """
        if words[:1] not in ([], ["help"]) or len(words) > 2:
            raise ValueError(f"unexpected argument: {' '.join(words)}; see `{cls.role} --help`")
        return words

    def execute(self) -> int:
        """Run the role, or print its settings with --dry-run; return the exit code.

        With the word `help` print the overview instead, or the flags of the section named after it, and
        return 0. Raise ConfigError for an unknown section, or what the role raises.
        """
        if not self.words:
            return super().execute()
        text = self.section_help(self.words[1]) if self.words[1:] else self.overview(self.role)
        print(text.rstrip())
        return 0

    @classmethod
    def sections(cls) -> dict[str, tuple[str, type[Section]]]:
        """Return the sections of the role's settings by name: the prefix of the flags, and the class.

        The first is "run". Example: a learner has {"run": ("run", RunSettings), "data": ("learner",
        DataSettings), ...}, an actor "run" and "actor" alone.
        """
        whole = SECTIONS[cls.role.upper()]
        bases = [part for part in reversed(whole.__bases__) if issubclass(part, Section)]
        parts = bases if bases != [Section] else [whole]
        found: dict[str, tuple[str, type[Section]]] = {"run": ("run", RunSettings)}
        for part in parts:
            name = re.sub(r"\B(?=[A-Z])", "-", part.__name__).removesuffix("-Settings").lower()
            found[name] = (cls.role, part)
        return found

    @classmethod
    def overview(cls, prog: str) -> str:
        """Return the screen of --help for the command called `prog`.

        It has the flags that are no settings, the settings that matter first, and a line for each
        section with its name and its docstring.
        """
        lines = [
            *cls.start_here(),
            f"sections of the settings (`{prog} help SECTION` prints one; SECTION `all`: all):",
            *(f"  {name:<16}{section.__doc__}" for name, (_, section) in cls.sections().items()),
            "",
            "A flag (--run.lease-s 60) wins over its variable (RUN_LEASE_S=60), that over --env-file.",
        ]
        texts = {"usage": f"{prog} [FLAG ...]\n       {prog} help SECTION", "epilog": "\n".join(lines)}
        parser, _ = parser_of(cls.general, prog, description=cls.__doc__ or "", **texts)
        return parser.format_help()

    @classmethod
    def start_here(cls) -> list[str]:
        """Return lines with the settings that matter first, the required ones marked; here none."""
        return []

    @classmethod
    def section_help(cls, name: str) -> str:
        """Return the flags of the section `name` as a help screen; for "all" those of all sections.

        Raise ConfigError, with the known names, if there is no such section.
        """
        sections = cls.sections()
        if name == "all":
            return "\n".join(map(cls.section_help, sections))
        if name not in sections:
            raise ConfigError(
                f"help {name}: no such section; expected one of {', '.join(sections)}, all"
            )
        prefix, section = sections[name]
        field = Field(section(), description=section.__doc__)
        kind = create_model(name, __base__=Command, **{prefix: (section, field)})  # type: ignore[call-overload]
        text = parser_of(kind, cls.role)[0].format_help()
        return f"{name}: flags{text.partition(f'{prefix} options')[2]}".rstrip()


class LearnerFlags(SettingsCommand):
    """The learner's flags that are no settings."""

    as_json: CliToggleFlag[bool] = Field(
        False, validation_alias="json", description="with --dry-run: lines for `rewarder --check`"
    )
    rows: NonNegativeInt = Field(0, description="with --dry-run --json: rows to show")
    rewards_alone: CliToggleFlag[bool] = Field(
        False, description="with --dry-run --json: rewards and rows alone, which need no model"
    )

    @model_validator(mode="after")
    def _shown_alone(self) -> Self:
        """Return self. Raise ValueError for a flag of --dry-run without the flag that it needs."""
        if (self.as_json and not self.dry_run) or (
            (self.rows or self.rewards_alone) and not self.as_json
        ):
            raise ValueError(
                "--rows belongs to --dry-run --json, --rewards-alone too, and --json to --dry-run: add "
                "them"
            )
        return self


class LearnerCommand(LearnerFlags, RoleCommand):
    """Settings of the learner."""

    role = "learner"
    general = LearnerFlags

    @classmethod
    def start_here(cls) -> list[str]:
        """Return a line with name and meaning for each of the ten settings that matter first."""
        lines = ["start here:"]
        for name in START_HERE:
            mark = "(required) " if name in REQUIRED else ""
            lines.append(f"  {name:<30}{shorten(f'{mark}{field_of(name).description}', 66)}")
        return [*lines, ""]

    learner: LearnerSettings = LearnerSettings()


class ActorCommand(RoleCommand):
    """Settings of an actor."""

    role = "actor"
    actor: ActorSettings = ActorSettings()


class RewarderFlags(SettingsCommand):
    """The rewarder's flags that are no settings."""

    check: CliToggleFlag[bool] = Field(
        False,
        description="check rewards and gold answers of `learner --dry-run --json` on standard input",
    )


class RewarderCommand(RewarderFlags, RoleCommand):
    """Settings of a rewarder."""

    role = "rewarder"
    general = RewarderFlags
    rewarder: RewarderSettings = RewarderSettings()
