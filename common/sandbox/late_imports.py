"""Imports after the rights are given up: from sources that were read before, or refused with a remedy.

Without its rights a process may be unable to read Python's own packages, such as those of a virtual
environment in root's home. Python would then report a module as not installed, and code that treats it
as optional would compute other rewards. Such a refusal is therefore remembered and ends the call.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from types import ModuleType

from penstock.common.own_code import KeptLoader
from penstock.common.sandbox.sources import read_source

_refused: list[str] = []


def refusal() -> str:
    """Return why an import was refused in this process; "" if none was."""
    return _refused[0] if _refused else ""


def read_beforehand(source: str, user: str) -> None:
    """Read the user's code `source`, unless empty, and note what can be imported now but not later.

    `user` is the name of the user that this process becomes, "" for none. Later imports of this process
    are served by a LateImports.
    """
    modules: dict[str, ModuleSpec] = {}
    folders = [*sys.path]
    if source:
        found = read_source(source)
        found.import_installed()
        modules = found.modules
        folders.append(os.path.dirname(os.path.abspath(source)))
        for spec in modules.values():
            folders += spec.submodule_search_locations or ()
    names = _names_in(folders) if user else {}
    if user:
        for module in list(sys.modules.values()):
            names |= _names_in(getattr(module, "__path__", ()))
    position = sys.meta_path.index(PathFinder)  # type: ignore[arg-type]
    sys.meta_path.insert(position, LateImports(modules, names, user))


def _names_in(folders: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return, per folder that can be listed now, the names of the modules in it."""
    found = {}
    for folder in folders:
        try:
            files = os.listdir(folder or ".")
        except PermissionError:
            continue
        except OSError:  # no folder
            files = []
        found[folder] = frozenset(file.partition(".")[0] for file in files)
    return found


class LateImports(MetaPathFinder):
    """Finds kept sources, then as PathFinder does; refuses what only the rights of before could read."""

    def __init__(
        self, modules: dict[str, ModuleSpec], names: dict[str, frozenset[str]], user: str
    ) -> None:
        self._modules = modules
        self._names = names
        self._user = user or "this user"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, None if it is not installed. Raise ImportError if refused."""
        if (kept := self._modules.get(name)) is not None:
            return _kept_spec(name, kept)
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.origin is not None and not os.access(found.origin, os.R_OK):
            self._refuse(name, found.origin)
        if found is None:
            last = name.rpartition(".")[2]
            for folder in sys.path if path is None else path:
                if not os.access(folder or ".", os.R_OK | os.X_OK) and self._has(folder, last):
                    self._refuse(name, os.path.join(folder, last))
        return found

    def _has(self, folder: str, name: str) -> bool:
        """Return whether an unreadable folder has a module; if it cannot be known, whether it exists."""
        if folder in self._names:
            return name in self._names[folder]
        try:
            os.stat(folder)
        except PermissionError:
            return True
        except OSError:
            return False
        return True

    def _refuse(self, name: str, file: str) -> None:
        """Remember a refused import, and raise ImportError."""
        text = (
            f"the import of {name} was refused: {self._user} cannot read {file}. Copy it to where "
            f"{self._user} can read it, give it more rights (chmod), or import {name} at the top of the "
            "reward's own module"
        )
        _refused.append(text)
        raise ImportError(text, name=name, path=file)


def _kept_spec(name: str, kept: ModuleSpec) -> ModuleSpec | None:
    """Return a spec that loads a kept source; for a folder without source, one of its submodules."""
    locations = kept.submodule_search_locations
    if kept.origin is None:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = list(locations or ())
        return spec
    return spec_from_file_location(
        name, kept.origin, loader=KeptLoader(name, kept.origin),
        submodule_search_locations=list(locations) if locations is not None else None,
    )  # fmt: skip
