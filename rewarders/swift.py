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
    """The base class of ms-swift's rewards, also under the name AsyncORM."""

    def __init__(self, args: object = None, **_: object) -> None:
        self.args = args


class _StandIn(dict[str, object]):
    """Anything else of ms-swift: it can be imported, derived from and given items, but not used."""

    def __init__(self, *_: object, **__: object) -> None:
        """Raise ConfigError for a class of ms-swift that is made; a registry is not."""
        self()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise ConfigError."""
        name = f"{type(self).__module__}.{type(self).__name__}"
        raise ConfigError(f"{name} is used, but ms-swift is not installed; install ms-swift here")


class _Module(ModuleType):
    """A module of ms-swift that has a stand-in for every name."""

    def __getattr__(self, name: str) -> Any:
        """Return a class, or for a name in lower case a registry. Raise AttributeError for `__x__`."""
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(name, (_StandIn,), {"__module__": self.__name__})
        return dict.__new__(kind) if name[0].islower() else kind


class _Finder(MetaPathFinder, Loader):
    """Finds modules of the package `swift` that nothing else has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in, None for a module of another package."""
        return ModuleSpec(name, self, is_package=True) if name.startswith("swift.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that has ORM, AsyncORM and orms where ms-swift has them."""
        module = _Module(spec.name)
        if spec.name in _CLASSES:
            vars(module).update(ORM=ORM, AsyncORM=ORM, orms=_ORMS)
        if spec.name == "swift.utils":
            vars(module)["get_logger"] = lambda *_, **__: logging.getLogger("swift")
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is made."""


_ORMS: dict[str, object] = {}


def offer_swift() -> None:
    """Make imports of ms-swift work where ms-swift is not installed, for its reward classes.

    ORM, AsyncORM, orms and get_logger can be used. Other names can be imported; their use raises.
    """
    if "swift" in sys.modules or importlib.util.find_spec("swift") is not None:
        return
    module = _Module("swift")
    module.__path__ = []  # a package; its modules are then searched for in no folder
    sys.modules["swift"] = module
    sys.meta_path.append(_Finder())
