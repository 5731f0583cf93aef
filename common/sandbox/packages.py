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
    """Read the standard library and import its compiled modules, if not everybody can read it."""
    folder = sysconfig.get_path("stdlib")
    if _is_closed(folder):
        _keep_folder(folder)
        _import_extensions(os.path.join(folder, "lib-dynload"), "")


def keep_packages(names: Iterable[str], with_extensions: bool = False) -> None:
    """Read the sources of imported packages that not everybody can read, each once in this process.

    Of `names`, those that are not imported are ignored. With `with_extensions` import compiled modules
    too.
    """
    for name in names:
        for folder in folders_of(sys.modules.get(name)):
            if folder not in _done and _is_closed(folder):
                _done.add(folder)
                _keep_folder(folder)
                if with_extensions:
                    _import_extensions(folder, f"{name}.")


def _is_closed(folder: str) -> bool:
    """Return whether somebody may not search this folder, which exists, or one around it."""
    path = Path(folder).absolute()
    real = path.resolve()
    try:
        return any(not part.stat().st_mode & 0o1 for part in (path, *path.parents, real, *real.parents))
    except OSError:  # an archive, or nothing
        return False


def folders_of(module: object) -> list[str]:
    """Return the folders of a package; none for a module. Nothing of the package runs."""
    try:
        return [str(folder) for folder in vars(module).get("__path__", ())]
    except Exception:  # packages may put anything into sys.modules
        return []


def _files(folder: str, suffix: str) -> Iterator[str]:
    """Yield the paths of the files with this suffix below a folder, tests and the like left out."""
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (os.path.join(path, file) for file in files if file.endswith(suffix))


def _keep_folder(folder: str) -> None:
    """Store in KEPT the bytes of all readable .py files below a folder, by their paths."""
    for file in _files(folder, ".py"):
        with contextlib.suppress(OSError):
            KEPT[file] = Path(file).read_bytes()


def _import_extensions(folder: str, prefix: str) -> None:
    """Import the compiled modules below `folder`, ignoring what fails; none if there are more than 80.

    `prefix` comes before a module's name: "numpy." for a package, "" for the standard library.
    """
    files = [os.path.relpath(file, folder) for file in _files(folder, ".so")]
    if len(files) > _MOST_EXTENSIONS:
        return
    for file in sorted(files):
        name = prefix + file.partition(".")[0].replace(os.sep, ".")
        if not name.rpartition(".")[2].startswith(("_test", "_ctypes_test", "xx", "_tkinter")):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
