"""What reward functions import from ms-swift, for machines where ms-swift is not installed."""

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

_CLASSES = ("swift.rewards", "swift.rewards.orm", "swift.plugin", "swift.plugin.orm")
"""Modules that have ORM, AsyncORM and orms: of ms-swift 4, and of ms-swift 3."""


class ORM:
    """The base class of ms-swift's rewards, also under the name AsyncORM."""

    def __init__(self, args: object = None, **_: object) -> None:
        self.args = args


def offer_swift() -> None:
    """Make `from swift.rewards import ORM, AsyncORM, orms` work where ms-swift is not installed.

    The same names are in swift.plugin, as in ms-swift 3, and swift.utils has get_logger.
    """
    if "swift" in sys.modules or importlib.util.find_spec("swift") is not None:
        return
    names: dict[str, Any] = {"ORM": ORM, "AsyncORM": type("AsyncORM", (ORM,), {}), "orms": {}}
    modules = {name: ModuleType(name) for name in ("swift", *_CLASSES, "swift.utils")}
    for name, module in modules.items():
        module.__path__ = []  # a package, so that other modules of it are reported by their names
        package, _, last = name.rpartition(".")
        if package:
            setattr(modules[package], last, module)
        if name in _CLASSES:
            vars(module).update(names)
    vars(modules["swift.utils"])["get_logger"] = logging.getLogger
    sys.modules |= modules
