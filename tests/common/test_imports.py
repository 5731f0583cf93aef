"""Who may import what: the ground floor stays light, the roles stay apart, one door per library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "learner", "actors", "rewarders", "deploy")
HEAVY = {"torch", "vllm", "transformers", "deepspeed", "math_verify", "datasets"}
ONE_DOOR = ("vllm", "deepspeed", "math_verify", "redis", "msgpack", "httpx")

LISTING = """
import runpy, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit as ending:
    assert ending.code in (0, None), ending.code
print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def imports_of(path: Path) -> Iterator[str]:
    """The modules a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@cache
def packages_imported_by(package: str) -> dict[str, set[str]]:
    """Per file, the folders of Penstock and the libraries it imports."""
    return {
        str(path.relative_to(ROOT)): {
            name.removeprefix("penstock.").partition(".")[0] for name in imports_of(path)
        }
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("penstock.learner", ["--help"]),
        ("penstock.actors", ["--help"]),
        ("penstock.rewarders", ["--help"]),
        ("penstock.common.queues", ["status", "--help"]),
        ("penstock.deploy", ["--help"]),
        ("penstock.deploy", ["up", "--help"]),
    ],
)
def test_help_loads_nothing_heavy(module: str, arguments: list[str]) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", LISTING, module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=ROOT,
    )
    loaded = answer.stdout.rpartition("LOADED")[2].split()
    assert "argparse" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_the_ground_floor_imports_nothing_heavy_and_no_role() -> None:
    forbidden = HEAVY | set(PACKAGES) - {"common"}
    for path, found in packages_imported_by("common").items():
        assert not found & forbidden, path


@pytest.mark.parametrize("role", ["learner", "actors", "rewarders"])
def test_roles_import_neither_each_other_nor_deploy(role: str) -> None:
    for path, found in packages_imported_by(role).items():
        assert not found & (set(PACKAGES) - {role, "common"}), path


def test_deploy_starts_roles_and_never_imports_them() -> None:
    for path, found in packages_imported_by("deploy").items():
        assert not found & {"learner", "actors", "rewarders"}, path


@pytest.mark.parametrize("library", ONE_DOOR)
def test_one_file_imports(library: str) -> None:
    doors = [
        path
        for package in PACKAGES
        for path, found in packages_imported_by(package).items()
        if library in found
    ]
    assert len(doors) <= 1, doors
