"""What the tests of deploy/ share: places, programs, and a copy of files with a planted error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


def program(name: str) -> str:
    """The path of a program of this environment or of PATH; the test is skipped without it."""
    found = shutil.which(name, path=str(BIN)) or shutil.which(name)
    return found or pytest.skip(f"{name} is not installed")


def run(*command: object, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with its output; only `variables` and PATH are its environment."""
    path = variables.pop("PATH", "/usr/bin:/bin")
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env={"PATH": path, **variables},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def planted(source: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of a file in `folder`, where `old`, which it has, is `new`."""
    text = source.read_text()
    assert old in text, f"{source.name} has no {old!r} to replace"
    copy = folder / source.name
    copy.write_text(text.replace(old, new, 1))
    return copy
