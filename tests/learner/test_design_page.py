"""docs/design.md shows the learner's loop as it is, and every module of its packages."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
JOINING = {"__init__", "__main__"}


def loop_of(source: str) -> str:
    """The while statement of `Learner.train`, without its indentation."""
    learner = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Learner"
    )
    train = next(
        node for node in learner.body if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    (loop,) = (node for node in train.body if isinstance(node, ast.While))
    return textwrap.dedent("\n".join(source.splitlines()[loop.lineno - 1 : loop.end_lineno]))


def test_the_sketch_of_the_learners_loop_is_its_source():
    (sketch,) = re.findall(r"## The learner's loop\n.*?```python\n(.*?)\n```", PAGE, re.DOTALL)
    assert sketch == loop_of((ROOT / "learner" / "loop.py").read_text())


@pytest.mark.parametrize("package", ["learner", "common"])
def test_the_page_names_every_module(package):
    (table,) = re.findall(rf"\| {package}/ \| modules \|.*?\n\n", PAGE, re.DOTALL)
    named = set(
        re.findall(r"\w+", " ".join(row.split("|")[2] for row in table.strip().splitlines()[2:]))
    )
    found = {path.stem for path in (ROOT / package).rglob("*.py")} - JOINING
    assert named == found
