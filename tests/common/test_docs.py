"""The pages say what the code does."""

from __future__ import annotations

import doctest
import importlib
import runpy
from pathlib import Path

import pytest

import penstock.common.errors
from penstock.common.errors import NEVER_RESTARTED, PenstockError
from tests.size import ROOT, product_files

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text()


def test_the_tables_of_variables_are_those_of_the_settings():
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    assert made["page"]() == PAGE, "run `python docs/make_tables.py`"
    names = (DOCS / "coming-from.md").read_text()
    assert made["names_page"]() == names, "run `python docs/make_tables.py`"
    assert names.count("\n| verl | ") > 20


def examples() -> list[str]:
    """The modules with an example in a docstring."""
    files = [path for path in product_files() if path.suffix == ".py" and ">>> " in path.read_text()]
    return [".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]


@pytest.mark.parametrize("module", examples())
def test_the_examples_of_docstrings_are_true(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_every_exit_code_is_documented_with_whether_it_is_restarted():
    kinds = [
        kind
        for kind in vars(penstock.common.errors).values()
        if isinstance(kind, type) and issubclass(kind, PenstockError)
    ]
    operations = (DOCS / "operations.md").read_text()
    for kind in kinds:
        (row,) = [line for line in operations.splitlines() if line.startswith(f"| {kind.exit_code} |")]
        assert ("| no |" in row) == (kind.exit_code in NEVER_RESTARTED), row
