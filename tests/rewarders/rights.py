"""Penstock installed in a folder of its own, and processes of fewer rights that run from there.

An ordinary user cannot reach an interpreter and a clone below root's home. `install` links both into a
folder that everybody can read, or, as the folder's mode says, root alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKER_MASK = 0xA80425FB
"""Capabilities of root in a container that Docker starts with its defaults."""
ORDINARY = 54321
"""An uid and gid without a name, without rights, and without other processes."""
COLUMNS = ("root", "Docker's mask", "ordinary user")
_DROP = 24  # PR_CAPBSET_DROP of prctl(2)
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "ensurepip", "tkinter", "lib2to3"}


def own_capabilities() -> int:
    """Return the mask of this process's effective capabilities."""
    found = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1), 16) if found else 0


def why_not(column: str) -> str:
    """Return the reason why this machine cannot start a process of a column's rights; "" if it can."""
    if os.geteuid() != 0 and column != "ordinary user":
        return f"{column}: the tests do not run as root"
    if column == "root" and own_capabilities() & ~DOCKER_MASK == 0:
        return "root: this container's root has no capability beyond Docker's mask"
    return ""


def start(column: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process with the rights of a column."""
    if column == "ordinary user" and os.geteuid() == 0:
        options |= {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
    if column == "Docker's mask":
        options["preexec_fn"] = partial(keep_capabilities, DOCKER_MASK)
    return subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **options)


def keep_capabilities(mask: int) -> None:
    """Take those not in `mask` out of the bounding set; the exec that follows takes the rest."""
    for number in range(64):
        if not mask >> number & 1:
            ctypes.CDLL(None).prctl(_DROP, number, 0, 0, 0)


def install(folder: Path, mode: int) -> Path:
    """Return a Python below `folder`, with all that a rewarder imports and a clone of Penstock."""
    folder.mkdir(parents=True)
    library = Path(sysconfig.get_path("stdlib"))
    home, site = folder / "python", folder / "venv" / "lib" / library.name / "site-packages"
    _link(library, _below(library), home / "lib" / library.name)
    base = Path(sys.base_prefix)
    _link(base, base.glob("lib/libpython*.so*"), home)
    interpreter = Path(sys.executable).resolve()
    _link(interpreter.parent, [interpreter], home / "bin")
    for package in _needed("penstock", {"rewarder"}).values():
        top = Path(str(package.locate_file("")))
        for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            _link(top, _below(top / name), site)
    clone = folder / "clone"
    for name in ("common", "rewarders", "learner", "penstock"):
        _link(ROOT, (ROOT / name).rglob("*"), clone)
    _link(ROOT, [ROOT / "tests/__init__.py", *(ROOT / "tests/rewarders").glob("*.py")], clone)
    for name in ("common", "rewarders", "learner"):
        (clone / "penstock" / name).symlink_to(f"../{name}")
    (site / "penstock-clone.pth").write_text(f"{clone}\n")
    (folder / "venv" / "bin").mkdir()
    (folder / "venv" / "pyvenv.cfg").write_text(f"home = {home / 'bin'}\n")
    python = folder / "venv" / "bin" / "python"
    python.symlink_to(home / "bin" / interpreter.name)
    folder.chmod(mode)
    return python


def environment(python: Path, **more: str) -> Mapping[str, str]:
    """Return the variables of a process that runs an installed interpreter."""
    library = python.parents[2] / "python" / "lib"
    return {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "LD_LIBRARY_PATH": str(library),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def _below(folder: Path) -> Iterator[Path]:
    """Yield a file, or the files below a folder without tests and the like."""
    if folder.is_file():
        yield folder
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(path) / name for name in files)


def _link(top: Path, files: Iterable[Path], target: Path) -> None:
    """Link files to the same place below `target`; copy what cannot be linked or read by everybody."""
    for file in files:
        place = target / file.relative_to(top)
        if place.exists() or not file.is_file():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            if file.stat().st_mode & 0o444 == 0o444:
                place.hardlink_to(file.resolve())
                continue
        shutil.copy2(file, place)
        place.chmod(place.stat().st_mode | 0o444)


def _needed(name: str, extras: set[str]) -> dict[str, Distribution]:
    """Return the installed packages that a package and its extras require, by name, but itself."""
    found: dict[str, Distribution] = {}
    todo = [(name, extras)]
    while todo:
        name, extras = todo.pop()
        for text in distribution(name).requires or []:
            asked = Requirement(text)
            wanted = asked.marker is None or any(
                asked.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            key = re.sub(r"[-_.]+", "-", asked.name).lower()
            if wanted and key not in found:
                found[key] = distribution(asked.name)
                todo.append((asked.name, set(asked.extras)))
    return found
