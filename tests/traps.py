"""Folders with the names of Penstock's own, whose modules raise: nothing of Penstock may import them."""

from __future__ import annotations

from pathlib import Path

NAMES = ("common", "learner", "actors", "rewarders", "deploy")
MODULES = ("__init__", "__main__", "errors", "guard", "loop", "helper")


def trap_folders(folder: Path, *names: str) -> Path:
    """Make the folders (all of NAMES, or these) with modules that raise on import; return `folder`."""
    for name in names or NAMES:
        (folder / name).mkdir(parents=True)
        for module in MODULES:
            (folder / name / f"{module}.py").write_text(
                f"raise ImportError('a trap was imported: {name}.{module} in {folder}')\n"
            )
    return folder
