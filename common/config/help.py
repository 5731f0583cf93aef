"""Help screens of at most 100 columns, and mistakes in a command line as ConfigError."""

import re
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from importlib.metadata import PackageNotFoundError, version
from inspect import cleandoc
from typing import Any, NoReturn

from penstock.common.errors import ConfigError

_EMPTY_DEFAULT = re.compile(r" ?\(default: (None|\[\]|\{\}|)\)$")


class HelpFormatter(RawDescriptionHelpFormatter):
    """Layout of the help screen of `prog`, a command: 100 columns; an empty default is left out."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=100)

    def _get_help_string(self, action: Action) -> str:
        """Return the help text of the flag `action` without an empty default; "" if it has no help.

        Removed are the endings "(default: X)" where X is None, [], {} or nothing.
        """
        return _EMPTY_DEFAULT.sub("", action.help or "")


class Parser(ArgumentParser):
    """Parser of every command line; `overview`, if set, is what --help prints.

    `options` are those of ArgumentParser. The layout is HelpFormatter's, the description loses its
    indentation, and flags cannot be abbreviated.
    """

    overview = ""

    def __init__(self, **options: Any) -> None:
        options["description"] = cleandoc(options.get("description") or "")
        super().__init__(**options | {"formatter_class": HelpFormatter, "allow_abbrev": False})

    def format_help(self) -> str:
        """Return the help screen: `overview` if it is set, else the list of all flags."""
        return self.overview or super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with `message`, the mistake in the command line, and a hint at --help."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def installed_version() -> str:
    """Return the version of the installed package, or "unknown" in a bare checkout."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
