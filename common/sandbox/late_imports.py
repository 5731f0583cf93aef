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

from penstock.common.own_code import KEPT, KeptLoader
from penstock.common.sandbox.packages import folders_of, keep_packages
from penstock.common.sandbox.sources import read_source

_refused: list[str] = []


def refusal() -> str:
    """Return why this process first refused an import; "" if it refused none."""
    return _refused[0] if _refused else ""


def read_beforehand(sources: Sequence[str], user: str) -> None:
    """Read the user's code of each source, and note what can be imported now but not later.

    Each of `sources` is a .py file or a dotted module name. `user`, the user that this process becomes,
    is for errors. Installed packages that the code names are imported. A LateImports serves later
    imports.
    """
    spaces: set[str] = set()
    folders = [*sys.path]
    for source in sources:
        found = read_source(source)
        found.import_installed()
        keep_packages({name.partition(".")[0] for name in found.installed}, with_extensions=True)
        folders.append(os.path.dirname(os.path.abspath(source)))
        for spec in found.modules.values():
            locations = spec.submodule_search_locations or ()
            folders += locations
            spaces.update(locations if spec.origin is None else ())
    for module in list(sys.modules.values()):
        folders += folders_of(module)
    position = sys.meta_path.index(PathFinder)
    sys.meta_path.insert(position, LateImports(spaces, _names_in(folders), user))


def _names_in(folders: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return, per folder, the names of the modules in it; leave out folders that may not be listed."""
    found = {}
    for folder in set(folders):
        try:
            files = os.listdir(folder or ".")
        except PermissionError:
            continue
        except OSError:  # no folder
            files = []
        found[folder] = frozenset(file.partition(".")[0] for file in files)
    return found


class LateImports(MetaPathFinder):
    """Finds kept sources, then as PathFinder does; refuses what only the rights of before could read.

    `spaces` are folders of the user's packages without an __init__.py, `names` the modules per folder.
    """

    def __init__(self, spaces: set[str], names: dict[str, frozenset[str]], user: str) -> None:
        self._spaces = spaces
        self._names = names
        self._user = user or "this user"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where module `name` is, None if not installed. Raise ImportError if it is refused."""
        for folder in sys.path if path is None else path:
            place = os.path.join(folder or os.getcwd(), name.rpartition(".")[2])
            if (kept := _kept_spec(name, place)) is not None:
                return kept
            found = PathFinder.find_spec(name, [folder], target)
            if found is not None and found.origin is not None:
                if not os.access(found.origin, os.R_OK):
                    self._refuse(name, found.origin, folder)
                return found
            if place in self._spaces:
                return _space_spec(name, place)
            if found is None and not os.access(folder or ".", os.R_OK | os.X_OK):
                self._refuse_unless_missing(name, folder, place)
        return PathFinder.find_spec(name, path, target)  # a package in several folders

    def _refuse_unless_missing(self, name: str, folder: str, place: str) -> None:
        """Raise ImportError if the unreadable `folder` has module `name`, or if that cannot be known.

        `place` is the module's path without a suffix. Nothing is raised if the folder was listed
        beforehand without that module, or does not exist.
        """
        if folder in self._names:
            if os.path.basename(place) in self._names[folder]:
                self._refuse(name, place, folder)
            return
        try:
            os.stat(folder)
        except PermissionError:
            self._refuse(name, place, folder)
        except OSError:
            return
        self._refuse(name, place, folder)

    def _refuse(self, name: str, file: str, folder: str) -> None:
        """Remember the refused import of module `name` for `refusal`, and raise ImportError.

        The error names the `file` that cannot be read. If `folder` was not searched beforehand, because
        the user's code has put it on sys.path, the error says so by its remedy: PYTHONPATH.
        """
        place = "" if folder in self._names else f"put {folder} on PYTHONPATH and "
        text = (
            f"the import of {name} was refused: {self._user} cannot read {file}. Copy it to where "
            f"{self._user} can read it, give it more rights (chmod), or {place}import {name} at the top "
            "of your module"
        )
        _refused.append(text)
        raise ImportError(text, name=name, path=file)


def _kept_spec(name: str, place: str) -> ModuleSpec | None:
    """Return a spec that loads the kept source of a package or module at `place`; None without one."""
    if (file := os.path.join(place, "__init__.py")) in KEPT:
        return spec_from_file_location(
            name, file, loader=KeptLoader(name, file), submodule_search_locations=[place]
        )
    if (file := f"{place}.py") in KEPT:
        return spec_from_file_location(name, file, loader=KeptLoader(name, file))
    return None


def _space_spec(name: str, place: str) -> ModuleSpec:
    """Return the spec of the package `name` without an __init__.py, in the folder `place`."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [place]
    return spec
