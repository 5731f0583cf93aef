"""What reward functions import from ms-swift, for machines where ms-swift is not installed."""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from penstock.common.errors import ConfigError

_CLASSES = ("swift.rewards", "swift.rewards.orm", "swift.plugin", "swift.plugin.orm")
"""Modules that have ORM, AsyncORM and orms: of ms-swift 4, and of ms-swift 3."""


class ORM:
    """The base class of ms-swift's rewards, also under the name AsyncORM.

    Creating an instance stores `args` as an attribute and ignores other keyword arguments.
    """

    def __init__(self, args: object = None, **_: object) -> None:
        self.args = args


class _StandIn(dict[str, object]):
    """Anything else of ms-swift: it can be imported, derived from and given items, but not used.

    Creating an instance, with any arguments, calls the instance, which raises ConfigError.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Raise ConfigError, by calling the instance. Registries are made without this function."""
        self()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise ConfigError, whatever the arguments: ms-swift is not installed."""
        name = f"{type(self).__module__}.{type(self).__name__}"
        raise ConfigError(
            f"the reward's code uses {name}, and ms-swift, which has this name, is not installed here: "
            "install ms-swift for the rewarders, or remove the name from that code"
        )


class _Module(ModuleType):
    """A module of ms-swift that has a stand-in for every name."""

    def __getattr__(self, name: str) -> Any:
        """Return a new stand-in for `name`, which this module lacks. The module does not store it.

        A name that begins with a small letter is a registry, an empty dict; any other name is a class.
        Raise AttributeError for a name that begins with two underscores.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(name, (_StandIn,), {"__module__": self.__name__})
        return dict.__new__(kind) if name[0].islower() else kind


class _Finder(MetaPathFinder, Loader):
    """Finds modules of the package `swift` that nothing else has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in if `name` begins with "swift.", None for any other module.

        `path` and `target`, which Python's import passes, are ignored.
        """
        return ModuleSpec(name, self, is_package=True) if name.startswith("swift.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a new stand-in for the module `spec.name`, any name of which can be imported.

        swift.rewards, swift.plugin and their `orm` get ORM, AsyncORM, and the dict `orms`, which they
        share. swift.utils gets get_logger, which returns the logger "swift".
        """
        module = _Module(spec.name)
        if spec.name in _CLASSES:
            vars(module).update(ORM=ORM, AsyncORM=ORM, orms=_ORMS)
        if spec.name == "swift.utils":
            vars(module)["get_logger"] = lambda *_, **__: logging.getLogger("swift")
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `create_module` has filled `module` already."""


_ORMS: dict[str, object] = {}


def offer_swift() -> None:
    """Make imports of ms-swift, the package `swift`, work where ms-swift is not installed.

    A stand-in goes to sys.modules, a finder of its modules to the end of sys.meta_path. ORM, AsyncORM,
    orms and get_logger can be used. Other names can be imported; calling them raises ConfigError.
    Nothing is changed if ms-swift is installed or `swift` is imported already.
    """
    if "swift" in sys.modules or importlib.util.find_spec("swift") is not None:
        return
    module = _Module("swift")
    module.__path__ = []  # a package; its modules are then searched for in no folder
    sys.modules["swift"] = module
    sys.meta_path.append(_Finder())
