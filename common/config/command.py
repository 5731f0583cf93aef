"""Command lines: from flags and variables to a checked command, and from a command to an exit code.

Every console script is a Command, whose fields are its flags, or a group of Commands. Settings are
checked before anything heavy is imported: modules such as torch are imported by `execute` alone.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliToggleFlag,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    get_subcommand,
)

from penstock.common.config.help import HelpFormatter, Parser, installed_version
from penstock.common.config.variables import SECTIONS, read_environment, values_of
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.text import as_block, hide_passwords, printable

_FLAG_SHOWN = (
    "warning: every local user sees --redis-url, password included, in the list of processes; set "
    "REDIS_URL, or REDIS_URL_FILE to a file with the URL"
)


class Command(BaseSettings):
    """Base of all commands: the fields are the flags and arguments, `execute` does the work."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_hide_none_type=True, cli_avoid_json=True, cli_exit_on_error=False,
        hide_input_in_errors=True,
    )  # fmt: skip

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_others: PydanticBaseSettingsSource,
        **_more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of values: flags, then variables, then the file of --env-file.

        Variables give values only to a command with --env-file, and none to `learner help SECTION`.
        Raise ConfigError for an unknown variable.
        """
        given = init_settings()
        if "env_file" not in cls.model_fields or given.get("words"):
            return (init_settings,)
        return init_settings, InitSettingsSource(
            cls, values_of(cls, read_environment(given.get("env_file")))
        )

    @classmethod
    def overview(cls, prog: str) -> str:
        """Return the screen of --help; empty: the list of all flags."""
        return ""

    def execute(self) -> int:
        """Do the work and return the exit code. Raise PenstockError if the work fails."""
        raise NotImplementedError


class CommandGroup(Command):
    """Commands under one name, such as `queues status`. Every field is one of them."""

    def execute(self) -> int:
        """Execute the command that was named; return its exit code and raise what it raises."""
        chosen = get_subcommand(self, cli_exit_on_error=False)
        assert isinstance(chosen, Command)
        return chosen.execute()


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found: a text, and for --json the objects of which each is printed as a line."""

    text: str
    rows: Sequence[Mapping[str, object]]
    exit_code: int = 0


class ResultCommand(Command):
    """Base of the commands that print a result."""

    as_json: CliToggleFlag[bool] = Field(False, validation_alias="json", description="print JSON lines")

    def show(self, result: Result) -> int:
        """Print the result as text or JSON; return its exit code, also if the reader has left."""
        lines = [json.dumps(row) for row in result.rows] if self.as_json else [printable(result.text)]
        try:
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
        except BrokenPipeError:  # `| head` read enough; Python would flush again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return result.exit_code


_SHARE = "Be the user who owns the run, or share a new run with your group: RUN_UMASK=027"

CommandType = TypeVar("CommandType", bound=Command)


def execute_command(kind: type[Command], prog: str, arguments: Sequence[str] | None = None) -> int:
    """Execute a command line, by default that of the process, and return the exit code.

    A PenstockError is printed on standard error and gives its exit code. A PermissionError about a file
    is treated as a ConfigError. Other errors are raised; if `arguments` is None, `_print_traceback`
    prints them at exit. SystemExit, as after --help, gives 0 with any code. A group without arguments
    prints its help.
    """
    if arguments is None:
        sys.excepthook = _print_traceback
        threading.excepthook = lambda found: _print_traceback(*found[:3])
    given = sys.argv[1:] if arguments is None else arguments
    default = ["--help"] if issubclass(kind, CommandGroup) else []
    if any(word.partition("=")[0] == "--redis-url" for word in given):
        print(f"{prog}: {_FLAG_SHOWN}", file=sys.stderr, flush=True)
    try:
        return load(kind, prog, given or default).execute()
    except SystemExit:  # after --help and --version; mistakes raise ConfigError
        return 0
    except PenstockError as error:
        print_error(prog, error)
        return error.exit_code
    except PermissionError as error:
        if error.filename is None:  # not about a file
            raise
        print_error(prog, ConfigError(f"{error.filename}: this user has no right to it. {_SHARE}"))
        return ConfigError.exit_code


def print_error(prog: str, error: PenstockError) -> None:
    """Print the line on standard error with which a command ends."""
    text = hide_passwords(f"{prog}: {type(error).__name__}: {error}")
    print(as_block(text), file=sys.stderr, flush=True)


def _print_traceback(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Print an uncaught error as Python does, but without passwords and a terminal's commands."""
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    print(as_block(hide_passwords(text)), file=sys.stderr, flush=True)


def load(kind: type[CommandType], prog: str, arguments: Sequence[str]) -> CommandType:
    """Return the command of a command line. Raise ConfigError with one line per mistake.

    --help and --version print and raise SystemExit.
    """
    parser, source = parser_of(kind, prog)
    parser.overview = kind.overview(prog)
    try:
        return build(kind, source(args=list(arguments))())
    except SettingsError as error:
        raise ConfigError(f"{error}; correct the value, see `{prog} --help`") from error


def parser_of(kind: type[Command], prog: str, **texts: str) -> tuple[Parser, CliSettingsSource[Any]]:
    """Return the parser of a command's flags and the source of values that reads its results.

    `texts` replace the usage, the description (by default the class docstring) or the epilog.
    """
    parser = Parser(**{"prog": prog, "description": kind.__doc__} | texts)
    shown = f"penstock {installed_version()}"
    parser.add_argument("--version", action="version", version=shown, help="print the version and end")
    return parser, CliSettingsSource(kind, root_parser=parser, formatter_class=HelpFormatter)


def build(kind: type[CommandType], values: Mapping[str, object]) -> CommandType:
    """Return a command of values, else variables, else defaults. Raise ConfigError for mistakes."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        skipped = int(issubclass(kind, CommandGroup))  # the command's name
        lines = [mistake(detail, detail["loc"][skipped:]) for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def mistake(detail: ErrorDetails, place: Sequence[int | str]) -> str:
    """Return a sentence for an error of pydantic; of a section's ValueError its text alone.

    `place` is the path to the value, a setting's or an option's: ("out",) gives "--out: ...".
    Example: ("learner", "max_steps") gives "LEARNER_MAX_STEPS: Input should be ..., found 'many'".
    """
    own_text = detail["type"] == "value_error"  # of a validator: that of a section names its settings
    if own_text and len(place) < 2:
        return str(detail["ctx"]["error"])
    name = "_".join(map(str, place[:2])).upper()
    if str(place[0]).upper() not in SECTIONS:
        name = f"--{place[0]}".replace("_", "-")
    found = "" if isinstance(detail["input"], dict) else f", found {detail['input']!r}"
    return f"{name}: {detail['ctx']['error'] if own_text else detail['msg']}{found}"
