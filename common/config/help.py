"""Help screens of at most 100 columns, and mistakes in a command line as ConfigError."""

import re
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from inspect import cleandoc
from typing import Any, NoReturn

from penstock.common.config.other_names import same_here
from penstock.common.errors import ConfigError
from penstock.common.text import did_you_mean

_UNKNOWN_FLAGS = "unrecognized arguments: "
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_FEW_FLAGS = 5
_EMPTY_DEFAULT = re.compile(r" ?\(default: (None|\[\]|\{\}|)\)$")


class HelpFormatter(RawDescriptionHelpFormatter):
    """Layout of the help screen of `prog`, a command: 100 columns; an empty default is left out."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=100)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Add the line of usage, by default with "[FLAG ...]" for over five of the flags in `actions`.

        Flags that are required stay. The other arguments are those of argparse's formatter.
        """
        flags = [action for action in actions if action.option_strings and not action.required]
        if usage is None and len(flags) > _FEW_FLAGS:
            others = [action for action in actions if action not in flags]
            actions, groups = [Action(["FLAG ..."], "", nargs=0), *others], ()
        super().add_usage(usage, actions, groups, prefix)

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
    in_use = False

    def __init__(self, **options: Any) -> None:
        options["description"] = cleandoc(options.get("description") or "")
        super().__init__(**options | {"formatter_class": HelpFormatter, "allow_abbrev": False})

    def format_help(self) -> str:
        """Return the help screen: `overview` if it is set, else the list of all flags."""
        self._name_commands()
        return self.overview or super().format_help()

    def _name_commands(self) -> None:
        """Call all commands COMMAND in usage and errors: their list is below, and longer than a line."""
        for action in self._actions:
            if isinstance(action, _SubParsersAction):
                action.metavar = "COMMAND"

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with `message`, the mistake in the command line, and a hint.

        The hint is the nearest name of an unknown flag or command, what another system's setting is
        here, or --help.
        """
        words = (
            message.removeprefix(_UNKNOWN_FLAGS).split() if message.startswith(_UNKNOWN_FLAGS) else []
        )
        hints = [self._near(word.partition("=")[0]) for word in words if word.startswith("--")]
        if choice := _CHOICE.search(message):
            hints.append(did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2])))
        found = " ".join(dict.fromkeys(filter(None, hints)))
        end = f": {found} See" if found else "; see"
        raise ConfigError(f"{message}{end} `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return what ArgumentParser returns. `in_use` becomes True: its flags are the known ones."""
        self.in_use = True
        self._name_commands()
        return super().parse_known_args(args, namespace)

    def _near(self, flag: str) -> str:
        """Return a hint at what an unknown flag such as "--learner.temprature" means; "" without one.

        Flags of a command under this one are known if it was given.
        """
        name = flag.lstrip("-").rpartition(".")[2]
        if found := same_here(name):
            return found
        known = self._flags()
        same = [one for one in known if one.rpartition(".")[2] == name.replace("_", "-")]
        return f"did you mean {same[0]}?" if same else did_you_mean(flag, known)

    def _flags(self) -> list[str]:
        """Return the flags of this parser, and of those below it that were used."""
        found = list(self._option_string_actions)
        for action in self._actions:
            for parser in action.choices.values() if isinstance(action.choices, Mapping) else ():
                found += parser._flags() if isinstance(parser, Parser) and parser.in_use else []
        return found


def installed_version() -> str:
    """Return the version of the installed package, or "unknown" in a bare checkout."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
