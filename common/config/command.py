"""Command lines: from flags and variables to a checked command, and from a command to an exit code.

Every console script is a Command, whose fields are its flags, or a group of Commands. Settings are
checked before anything heavy is imported: modules such as torch are imported by `execute` alone.
"""

import contextlib
import errno
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from types import TracebackType
from typing import IO, Any, TextIO, TypeVar

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
from penstock.common.errors import ConfigError, DiskFailed, DiskFull, PenstockError
from penstock.common.files.disk import failure_of, is_full
from penstock.common.text import as_block, hide_passwords, printable, short

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
        """Return the sources of a command's values, the stronger first: flags, then variables.

        `init_settings` has the flags. `settings_cls` and all other sources are not used. Variables
        are those of the process, then of the file of --env-file. A command without that flag has no
        variables, nor has `learner help SECTION`. Raise ConfigError for an unknown variable, or a
        REDIS_URL_FILE that cannot be read.
        """
        given = init_settings()
        if "env_file" not in cls.model_fields or given.get("words"):
            return (init_settings,)
        env_file = given.get("env_file")
        found = values_of(cls, read_environment(env_file), env_file)
        return init_settings, InitSettingsSource(cls, found)

    @classmethod
    def overview(cls, prog: str) -> str:
        """Return what --help prints for the command called `prog`. Here "": --help lists all flags."""
        return ""

    def execute(self) -> int:
        """Do the work and return the exit code. Raise PenstockError if the work fails. Abstract here."""
        raise NotImplementedError


class CommandGroup(Command):
    """Commands under one name, such as `queues status`. Every field is one of them."""

    def execute(self) -> int:
        """Execute the sub-command that was named on the command line; return its exit code.

        Raise what the sub-command raises, or SettingsError if none was named.
        """
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
        """Print `result` on standard output and return its exit code.

        With --json each of its rows is a line of JSON, else its text is printed, unprintable characters
        escaped. Raise BrokenPipeError if the reader has closed the pipe, as `head` does.
        """
        rows = (json.dumps(row, default=str) for row in result.rows)
        lines = rows if self.as_json else [printable(result.text)]
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        return result.exit_code


_READER_GONE = 128 + signal.SIGPIPE
"""Exit code that a shell gives for a program which wrote to a closed pipe."""

_NO_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_SHARE = "Be the user who owns the run, or share a new run with your group: RUN_UMASK=027"

CommandType = TypeVar("CommandType", bound=Command)


def execute_command(kind: type[Command], prog: str, arguments: Sequence[str] | None = None) -> int:
    """Execute a command line of the command class `kind`, called `prog`, and return the exit code.

    `arguments` are the words after the name; None: those of the process. A PenstockError is printed on
    standard error and gives its exit code. A PermissionError about a file is treated as a ConfigError,
    code 78, a full disk as DiskFull (of actors and rewarders as DiskFailed, after which they are
    started again), a broken one as DiskFailed. Other errors are raised. If
    `arguments` is None, `_print_traceback` prints uncaught errors of this process and its threads from
    now on. SystemExit, as after --help, gives 0 with any code. If the reader of standard output has
    closed it, as `head` does, the code is 141, as that of other programs, and what is printed to it from
    then on is dropped. Ctrl-C gives 130, and no traceback. What standard error cannot take is dropped.
    """
    if arguments is None:
        sys.excepthook = _print_traceback
        threading.excepthook = lambda found: _print_traceback(*found[:3])
    try:
        code = _execute(kind, prog, sys.argv[1:] if arguments is None else arguments)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # it is of another pipe
        drop_output(sys.stdout)
        return _READER_GONE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # Python would fail again at the exit, and change the exit code to 120
            drop_output(sys.stderr)


def _execute(kind: type[Command], prog: str, given: Sequence[str]) -> int:
    """Execute the command `kind`, called `prog`, with the words `given`, and return the exit code.

    A group without words prints its help. The flag --redis-url gives a warning: it shows a password.
    Errors are printed or raised, and exit codes returned, as `execute_command` describes.
    """
    default = ["--help"] if issubclass(kind, CommandGroup) else []
    if any(word.partition("=")[0] == "--redis-url" for word in given):
        _tell(f"{prog}: {_FLAG_SHOWN}")
    try:
        return load(kind, prog, given or default).execute()
    except SystemExit:  # after --help and --version; mistakes raise ConfigError
        return 0
    except (PenstockError, OSError) as error:
        if not (known := _meaning_of(error, prog)):
            raise
        print_error(prog, known)
        return known.exit_code


def _meaning_of(error: PenstockError | OSError, prog: str) -> PenstockError | None:
    """Return DiskFull, DiskFailed or ConfigError (no right, no such path) for a file's error, else None.

    A PenstockError means itself. A full disk of actors and rewarders holds no run: it has failed.
    """
    if isinstance(error, PenstockError):
        return error
    if is_full(error):
        kind = DiskFailed if prog in ("actor", "rewarder") else DiskFull
        return kind(f"{error}. Make room on the disk, then start again to resume")
    if isinstance(error, PermissionError) and error.filename is not None:
        return ConfigError(f"{error.filename}: this user has no right to it. {_SHARE}")
    if error.errno in _NO_PATH and error.filename is not None:
        return ConfigError(f"{short(error.filename)}: {error.strerror}. Name another path")
    return failure_of(error)


def _reader_is_gone() -> bool:
    """Return whether standard output leads to a pipe or terminal whose other end is closed."""
    poller = select.poll()
    with contextlib.suppress(AttributeError, ValueError):  # without standard output, or in a test
        poller.register(sys.stdout.fileno(), 0)
    return bool(poller.poll(0))


def escape_missing_characters(file: IO[str]) -> None:
    """Let `file` write characters that its encoding lacks as escapes, where printing would fail."""
    if isinstance(file, TextIOWrapper):
        file.reconfigure(errors="backslashreplace")


def drop_output(file: TextIO) -> None:
    """Let all that `file` has not written yet, and what is printed to it later, go to /dev/null.

    Python writes out standard output again at the exit, and would fail again.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def print_error(prog: str, error: PenstockError) -> None:
    """Print `PROG: CLASS: TEXT` for an error on standard error, as the last line of the command `prog`.

    Passwords are printed as ***, unprintable characters escaped, and all lines but the first indented.
    """
    _tell(as_block(hide_passwords(f"{prog}: {type(error).__name__}: {error}")))


def _tell(text: str) -> None:
    """Print a text on standard error. If that fails, as on a full disk, the text is lost."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _print_traceback(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Print an uncaught error on standard error: its class `kind`, its text, and the stack `trace`.

    The form is Python's, but passwords are ***, unprintable characters escaped, later lines indented.
    """
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    _tell(as_block(hide_passwords(text)))


def load(kind: type[CommandType], prog: str, arguments: Sequence[str]) -> CommandType:
    """Return the command `kind` with the values of a command line, then of variables, then the defaults.

    `arguments` are the words after the command's name `prog`. --help and --version print and raise
    SystemExit. Raise ConfigError for mistakes, with a line for each value that is wrong.
    """
    parser, source = parser_of(kind, prog)
    parser.overview = kind.overview(prog)
    try:
        return build(kind, source(args=list(arguments))())
    except SettingsError as error:
        raise ConfigError(f"{error}; correct the value, see `{prog} --help`") from error


def parser_of(kind: type[Command], prog: str, **texts: str) -> tuple[Parser, CliSettingsSource[Any]]:
    """Return the parser of the flags of the command `kind`, and the source of values that reads them.

    `prog` is the command's name on the help screen. `texts` replace the usage, the description (by
    default the class docstring) or the epilog: the keywords are those of ArgumentParser.
    """
    parser = Parser(**{"prog": prog, "description": kind.__doc__} | texts)
    shown = f"penstock {installed_version()}"
    parser.add_argument("--version", action="version", version=shown, help="print the version and end")
    return parser, CliSettingsSource(kind, root_parser=parser, formatter_class=HelpFormatter)


def build(kind: type[CommandType], values: Mapping[str, object]) -> CommandType:
    """Return the command `kind` with `values` by field name, else of variables, else the defaults.

    Raise ConfigError for mistakes, with one line for each wrong value.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        skipped = int(issubclass(kind, CommandGroup))  # the command's name
        lines = [mistake(detail, detail["loc"][skipped:]) for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def mistake(detail: ErrorDetails, place: Sequence[int | str]) -> str:
    """Return a sentence for `detail`, an error of pydantic: the value's name, the fault, what was found.

    `place` is the path to the value: ("out",) gives "--out: ..., found 'x'", and ("learner",
    "max_steps") "LEARNER_MAX_STEPS: Input should be ..., found 'many'". The fault is pydantic's message,
    or the text of a validator's ValueError. What was found is left out if it is a map. A ValueError of a
    validator of a whole command or section, or of a flag (`place` has under two parts), gives its text
    alone, as the text names the setting.
    """
    own_text = detail["type"] == "value_error"  # of a validator: that of a section names its settings
    if own_text and len(place) < 2:
        return str(detail["ctx"]["error"])
    name = "_".join(map(str, place[:2])).upper()
    if str(place[0]).upper() not in SECTIONS:
        name = f"--{place[0]}".replace("_", "-")
    found = "" if isinstance(detail["input"], dict) else f", found {detail['input']!r}"
    return f"{name}: {detail['ctx']['error'] if own_text else detail['msg']}{found}"
