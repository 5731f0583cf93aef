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
    """Return the text of the first ImportError by which this process refused an import; "" if none."""
    return _refused[0] if _refused else ""


def read_beforehand(sources: Sequence[str], user: str) -> None:
    """Store the user's code of each source in KEPT, and install the finder of all later imports.

    Each of `sources` is a .py file or a dotted module name. KEPT holds sources by path; the user's
    modules that the code imports are stored too. Installed packages that the code names are imported,
    and stored if not everybody can search their folders. The finder, a LateImports in sys.meta_path,
    takes modules from KEPT, or refuses those that this process can no longer read. `user` is the name of
    the user that this process becomes, for errors ("": "this user").
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
    """Return, by folder, the names of its files up to the first dot: "numpy" for numpy.py and numpy/.

    Folders that may not be listed are left out. One that does not exist gives an empty set. "" is the
    working directory.
    """
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
    """Finds modules by their sources in KEPT, else as PathFinder does; refuses those it cannot read.

    KEPT holds the sources, by path, that were read before this process gave up its rights.
    `spaces` are the folders of the user's packages without an __init__.py. `names` are the modules in
    each folder that was listed beforehand. `user` is the name of the present user, for errors; "" for
    unknown.
    """

    def __init__(self, spaces: set[str], names: dict[str, frozenset[str]], user: str) -> None:
        self._spaces = spaces
        self._names = names
        self._user = user or "this user"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of module `name`; None if the module is not found.

        In each folder, KEPT (the sources read beforehand) is searched first, then the folder itself.
        `path` has the folders to search, None: sys.path; `target` is for PathFinder. Raise ImportError
        if this user cannot read the module's file, or a folder that may hold it.
        """
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

        `place` is the module's path without a suffix. Return if the folder was listed beforehand without
        the module, or does not exist. A refusal is remembered for `refusal`.
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
        """Raise ImportError: module `name` is refused because this user cannot read `file`.

        The text is stored for `refusal`. If `folder`, where the module was searched, was not listed
        beforehand, because the user's code has put it on sys.path, the text also advises PYTHONPATH.
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
    """Return a spec that loads module `name` from its source in KEPT; None if no source is there.

    KEPT holds sources by path. `place` is the module's path without a suffix: the source is
    PLACE/__init__.py or else PLACE.py.
    """
    if (file := os.path.join(place, "__init__.py")) in KEPT:
        return spec_from_file_location(
            name, file, loader=KeptLoader(name, file), submodule_search_locations=[place]
        )
    if (file := f"{place}.py") in KEPT:
        return spec_from_file_location(name, file, loader=KeptLoader(name, file))
    return None


def _space_spec(name: str, place: str) -> ModuleSpec:
    """Return a new spec of the package `name` that is the folder `place`, without an __init__.py."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [place]
    return spec
