"""Sources of installed packages, read before the rights are given up, for what is imported lazily.

sympy and the standard library import parts of themselves in functions. Where the sandbox's user cannot
reach them, such as below root's home, their sources are read beforehand. Readable folders are left out.
"""

import contextlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.common.own_code import KEPT

_SKIPPED = {
    "test", "tests", "__pycache__", "site-packages", "dist-packages", "idlelib", "tkinter", "lib2to3",
    "ensurepip", "turtledemo", "pydoc_data",
}  # fmt: skip
_MOST_EXTENSIONS = 80
"""Compiled modules of one package that are imported beforehand: they cannot be loaded from a source."""

_done: set[str] = set()


def keep_standard_library() -> None:
    """Store the standard library's sources in KEPT, by path, and import its compiled modules.

    Nothing is done if everybody can search its folder and the folders around that. Its tests, tkinter,
    idlelib and the like are left out.
    """
    folder = sysconfig.get_path("stdlib")
    if _is_closed(folder):
        _keep_folder(folder)
        _import_extensions(os.path.join(folder, "lib-dynload"), "")


def keep_packages(names: Iterable[str], with_extensions: bool = False) -> None:
    """Store in KEPT the sources of the packages `names` whose folders not everybody can search.

    KEPT holds sources by path. Names that are not imported, or are no package, are ignored. Each folder
    is read once in this process. `with_extensions` imports the compiled modules of these packages too,
    but none of a folder with over 80.
    """
    for name in names:
        for folder in folders_of(sys.modules.get(name)):
            if folder not in _done and _is_closed(folder):
                _done.add(folder)
                _keep_folder(folder)
                if with_extensions:
                    _import_extensions(folder, f"{name}.")


def _is_closed(folder: str) -> bool:
    """Return True if others than owner and group may not search `folder` or a folder around it.

    Links are followed too. A folder that cannot be looked at, such as one within an archive, gives
    False.
    """
    path = Path(folder).absolute()
    real = path.resolve()
    try:
        return any(not part.stat().st_mode & 0o1 for part in (path, *path.parents, real, *real.parents))
    except OSError:  # an archive, or nothing
        return False


def folders_of(module: object) -> list[str]:
    """Return the folders of an imported package by its __path__; [] for another module or object.

    Nothing of the package runs.
    """
    try:
        return [str(folder) for folder in vars(module).get("__path__", ())]
    except Exception:  # packages may put anything into sys.modules
        return []


def _files(folder: str, suffix: str) -> Iterator[str]:
    """Yield the paths of all files below `folder` whose names end with `suffix`, such as ".py".

    Folders named test, tests, __pycache__, site-packages and others in _SKIPPED are left out.
    """
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (os.path.join(path, file) for file in files if file.endswith(suffix))


def _keep_folder(folder: str) -> None:
    """Store in KEPT, by path, the .py files below `folder`.

    Folders in _SKIPPED, such as tests, and unreadable files are left out.
    """
    for file in _files(folder, ".py"):
        with contextlib.suppress(OSError):
            KEPT[file] = Path(file).read_bytes()


def _import_extensions(folder: str, prefix: str) -> None:
    """Import the compiled modules (.so) below `folder`; none if there are more than 80.

    `prefix` comes before a module's name: "numpy." for a package, "" for the standard library. Modules
    for tests, and _tkinter, are left out, and a module that fails is ignored.
    """
    files = [os.path.relpath(file, folder) for file in _files(folder, ".so")]
    if len(files) > _MOST_EXTENSIONS:
        return
    for file in sorted(files):
        name = prefix + file.partition(".")[0].replace(os.sep, ".")
        if not name.rpartition(".")[2].startswith(("_test", "_ctypes_test", "xx", "_tkinter")):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
