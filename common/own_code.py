"""The user's code that a setting names as `file.py:function` or `package.module.function`."""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.common.errors import ConfigError

KEPT: dict[str, bytes] = {}
"""Sources by path that were read beforehand, where their files can no longer be read."""


class KeptLoader(SourceFileLoader):
    """Loads a module from KEPT, or from its file if the source is not there."""

    def get_data(self, path: str) -> bytes:
        """Return the bytes of the file `path`: from KEPT (sources read beforehand), else from the disk.

        Raise OSError if the path is not in KEPT and the file cannot be read.
        """
        return KEPT[path] if path in KEPT else super().get_data(path)

    def path_stats(self, path: str) -> dict[str, float]:
        """Return {"mtime": seconds, "size": bytes} of the file `path`, for Python's import.

        Raise OSError if the file cannot be found, or its source is in KEPT, the sources read beforehand:
        Python then looks for no compiled file.
        """
        if path in KEPT:
            raise OSError(f"{path} was read beforehand, expected a file on the disk: call get_data")
        return dict(super().path_stats(path))


def split_source(asked: str) -> tuple[str, str]:
    """Return the source and the name of the function that a setting names by the text `asked`.

    The source is a file or a module, or "" for a name that comes with Penstock.
    Example:
        >>> split_source("accuracy"), split_source("my/rewards.py:short"), split_source("pkg.mod.short")
        (('', 'accuracy'), ('my/rewards.py', 'short'), ('pkg.mod', 'short'))
    """
    source, _, name = asked.rpartition(":" if ":" in asked else ".")
    return source, name


def find_code(source: str, setting: str) -> ModuleSpec:
    """Return where the code of `source` is: of a file *.py, or of a module that can be imported here.

    No code is run, not even that of the packages around a module. A source in KEPT needs no file.
    `setting`, such as "LEARNER_REWARDS=short.py:short", begins errors. Raise ConfigError if the file or
    module is not there, or is a package without code of its own.
    """
    found: ModuleSpec | None = None
    if source.endswith(".py"):
        path = Path(source).absolute()
        name = name_of_file(path)
        found = importlib.util.spec_from_file_location(name, path, loader=KeptLoader(name, str(path)))
        hint = f"there is no file {path}; copy the file there, or correct its name"
    else:
        folders: list[str] | None = None
        for name in accumulate(source.split("."), "{}.{}".format):
            found = find_module(name, folders, sys.meta_path)
            folders = [] if found is None else [*(found.submodule_search_locations or ())]
        remedy = "name a file (file.py:function), or put the folder it is in on PYTHONPATH"
        hint = f"there is no module {source} here; {remedy}"
    if found is None or found.loader is None or not _is_there(path_of(found)):
        raise ConfigError(f"{setting}: {hint}")
    return found


def find_module(name: str, folders: list[str] | None, finders: Sequence[Any]) -> ModuleSpec | None:
    """Return where the module `name`, such as "pkg.mod", is, without importing anything.

    The search is in `folders`, None: where imports search. Each of `finders`, for example sys.meta_path,
    is asked in turn. If none knows the module, or one fails, the folders called "mod" in `folders` are
    returned for a name with a dot, as a package without loader. Return None if nothing is found.
    """
    try:
        found = next(filter(None, (finder.find_spec(name, folders) for finder in finders)), None)
    except Exception:  # a finder that a package has installed may raise anything
        found = None
    if found is None and "." in name:  # Python finds a folder without source only in imported packages
        places = [os.path.join(folder, name.rpartition(".")[2]) for folder in folders or ()]
        if spaces := [place for place in places if os.path.isdir(place)]:
            found = ModuleSpec(name, None, is_package=True)
            found.submodule_search_locations = spaces
    return found


def name_of_file(path: Path) -> str:
    """Return the name of the module made of the file `path`: penstock_own_ and 12 hexadecimal digits.

    The digits are those of the path's SHA-256, so the same path gives the same name.
    """
    return f"penstock_own_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _is_there(path: Path) -> bool:
    """Return whether `path` is in KEPT, the sources read beforehand, or is a file for this process."""
    return str(path) in KEPT or os.path.isfile(path)


def path_of(code: ModuleSpec) -> Path:
    """Return the path of the file that holds `code`, which `find_code` or `find_module` returned.

    A module without a file, such as one built into Python, gives a path that does not exist.
    """
    return Path(str(code.origin))


def digest_of(code: ModuleSpec) -> str:
    """Return the SHA-256, in hexadecimal, of the source of `code`: of its bytes in KEPT, else its file.

    Raise OSError if the file cannot be read.
    """
    path = path_of(code)
    return hashlib.sha256(KEPT.get(str(path)) or path.read_bytes()).hexdigest()


def import_code(code: ModuleSpec) -> ModuleType:
    """Run `code`, after the packages around it, and return its module. Raise what they raise.

    The code runs at each call. Its module is put into sys.modules before, and stays after an error. For
    code in a file, the folder is put first in sys.path and stays there, as when Python runs the file
    itself: `common` in `from common import helper` is the folder beside the file. If the code has put
    another module into sys.modules under its name, that module is returned.
    """
    folder = str(path_of(code).parent)
    if code.name.startswith("penstock_own_") and folder not in sys.path:
        sys.path.insert(0, folder)
    if package := code.name.rpartition(".")[0]:
        importlib.import_module(package)
    module = importlib.util.module_from_spec(code)
    sys.modules[code.name] = module
    assert code.loader is not None, "find_code returns no module without a loader"
    code.loader.exec_module(module)
    return sys.modules.get(code.name, module)  # the code may have put another module in its place


def public_names(module: ModuleType) -> str:
    """Return a module's names without a leading underscore, sorted, separated by commas; "" for none."""
    return ", ".join(name for name in dir(module) if not name.startswith("_"))
