"""Reading the source of a user's code before the rights are given up.

The user's file and the modules beside it that its import statements name are read, and what those name
in turn. Installed packages that they name are imported, because they are trusted. No code of the user
runs here.
"""

import ast
import contextlib
import importlib
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from penstock.common.own_code import KEPT, find_module, name_of_file

_MOST_FILES = 2000
_PROGRAMS = {"antigravity", "idlelib", "test", "this"}
"""Modules that, as any __main__, do something on import, and must not do it with the rights of root."""
_MOST_BYTES = 2**24
"""Most bytes of a source that is read beforehand."""


class SourceReader:
    """Follows import statements from a module or file on, without running code.

    `search` are the folders where top modules are looked for. The package `own` ("" for none) is the
    user's, also if it is installed. At first nothing is found. `installed` gets the names of the trusted
    modules that were found, `modules` the specs of the user's modules by name. Sources of the latter are
    stored in own_code.KEPT, by path.
    """

    def __init__(self, search: Sequence[str], own: str) -> None:
        self.modules: dict[str, ModuleSpec] = {}
        self.installed: set[str] = set()
        self._search = search
        self._own = own
        self._waiting: list[tuple[str, Path, bool]] = []

    def read(self, name: str, path: Path) -> None:
        """Store the source of the file `path`, the module `name`, in KEPT, and follow its imports.

        KEPT holds sources by path. Modules that are imported, by these modules too, are added as by
        `follow`; those that are not found or readable are left out. Raise OSError if this file is
        unreadable.
        """
        KEPT[str(path)] = path.read_bytes()
        self._waiting.append((name, path, path.name == "__init__.py"))
        self.follow_all()

    def follow_all(self) -> None:
        """Call `follow` for all that the sources found until now import, and for what that imports.

        Return when no source is left, or KEPT, the sources by path, has 2000 or more. A second call
        finds nothing to do unless sources were added.
        """
        while self._waiting and len(KEPT) < _MOST_FILES:
            for found in imports_of(*self._waiting.pop()):
                self.follow(found)

    def follow(self, name: str) -> None:
        """Find the packages around the module `name` ("a" for "a.b") and the module; run none of them.

        The name of an installed one is added to `installed`; a user's one is added to `modules`, and its
        source to KEPT, by path. Its imports are not followed here. A part not found ends the search.
        """
        locations = [*self._search]
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            part = ".".join(parts[:count])
            spec = self.modules.get(part) or find_module(part, locations, [PathFinder])
            if spec is None:
                return
            if parts[0] != self._own and is_installed(spec):
                self.installed.add(part)
            elif part not in self.modules:
                self._add(part, spec)
            if spec.submodule_search_locations is None:
                return
            locations = list(spec.submodule_search_locations)

    def _add(self, name: str, spec: ModuleSpec) -> None:
        """Add the user's module `name` with its `spec` to `modules`, and store its .py source in KEPT.

        KEPT holds sources by path. The module's imports are followed later, by `follow_all`. A compiled
        module, and one whose source cannot be read or is outside the folders of the code, are not added.
        A folder without __init__.py has no source, and is added to `modules` alone.
        """
        if spec.origin is not None and spec.origin.endswith(".py"):
            try:
                KEPT[spec.origin] = self._read_own(spec.origin)
            except OSError:
                return
            is_package = spec.submodule_search_locations is not None
            self._waiting.append((name, Path(spec.origin), is_package))
        elif spec.origin is not None:
            return  # a compiled module, which only its file can be loaded from
        self.modules[name] = spec

    def _read_own(self, path: str) -> bytes:
        """Return the first 16 MiB of the file `path`, a source of the user.

        Raise PermissionError if the file is not a regular one below the folders that are searched, links
        followed, another OSError if it cannot be read. The rights of this process apply, so a link must
        not lead to files that the user cannot read. A link may change: the kernel names what was opened.
        """
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would wait
            name = f"/proc/self/fd/{file.fileno()}"
            opened = os.readlink(name) if os.path.exists(name) else os.path.realpath(path)
            folders = [os.path.realpath(folder) for folder in self._search]
            inside = any(os.path.commonpath([folder, opened]) == folder for folder in folders)
            if not (inside and stat.S_ISREG(os.fstat(file.fileno()).st_mode)):
                remedy = "copy the file into these folders"
                raise PermissionError(
                    f"{path} is {opened}, not within the folders of the code: {remedy}"
                )
            return file.read(_MOST_BYTES)

    def import_installed(self) -> None:
        """Import the modules named in `installed`, with the rights that this process still has.

        Meanwhile sys.path has only installed folders: no file of the user may take a package's place. A
        module that fails is ignored; the user's code imports it again, and has the error then. Left out
        are modules that do something on import: antigravity, idlelib, test, this, and any __main__.
        """
        before = sys.path[:]
        sys.path[:] = [folder for folder in sys.path if _is_installed_path(folder)]
        try:
            for name in sorted(self.installed):
                if name.partition(".")[0] in _PROGRAMS or name.endswith(".__main__"):
                    continue
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(name)
        finally:
            sys.path[:] = before


def is_installed(spec: ModuleSpec) -> bool:
    """Return True if a module is Penstock's, of the standard library, or in site-packages or the like.

    False for any other module, and for one without a file or folder.
    """
    if spec.name.partition(".")[0] == "penstock":
        return True
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return _is_installed_path(origin)


def _is_installed_path(path: str) -> bool:
    """Return True if `path` is within the standard library or installed packages; "" is not."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [sysconfig.get_path(name) for name in names] + [*site.getsitepackages()]
    folders = {*map(Path, paths), Path(site.getusersitepackages())} if path else set()
    found = Path(path)
    return any(folder == found or folder in found.parents for folder in folders)


def imports_of(name: str, path: Path, is_package: bool) -> Iterator[str]:
    """Yield the full names that a source in KEPT imports, in functions too; none if it cannot be parsed.

    `path` is the source's key in KEPT, a map by path, `name` its module, for relative imports;
    `is_package` says that it is an __init__.py. `from a import b` yields a and a.b, since b may be a
    module; with * only a. Imports below `if TYPE_CHECKING` are left out. A name may come twice.
    """
    try:
        tree = ast.parse(KEPT[str(path)])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = name if is_package else name.rpartition(".")[0]
    for node in _running_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, package)
            if base is not None:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _base_of(node: ast.ImportFrom, package: str) -> str | None:
    """Return the full name of the module that the `from` statement `node` in `package` names.

    In the package a.b, `from ..c import d` gives "a.c". More dots than the package has parts give None,
    and so does a dot without a package ("").
    """
    if node.level == 0:
        return node.module
    parts = package.split(".")
    if not package or node.level > len(parts):
        return None
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of `tree`, in no order, but those in the test and body of `if TYPE_CHECKING:`.

    The nodes of its `else` are yielded. `if not TYPE_CHECKING:` is an `if` as any other.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        plain = isinstance(node, ast.If) and isinstance(node.test, (ast.Name, ast.Attribute))
        if isinstance(node, ast.If) and plain and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def read_source(source: str) -> SourceReader:
    """Store the user's code `source`, and the user's modules that it imports, in KEPT by their paths.

    `source` is a .py file or a dotted module name. Return the reader, with the specs of the user's
    modules and the names of installed ones, which are neither stored nor imported here. Code that is not
    found or unreadable is left out. A file's imports are searched in its folder first.
    """
    if not source.endswith(".py"):
        reader = SourceReader(sys.path, source.partition(".")[0])
        reader.follow(source)
    else:
        path = Path(source).absolute()
        reader = SourceReader([str(path.parent), *sys.path], "")
        with contextlib.suppress(OSError):  # find_code then raises an error
            reader.read(name_of_file(path), path)
            return reader
    reader.follow_all()
    return reader
