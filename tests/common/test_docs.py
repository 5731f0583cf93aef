"""The pages say what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

import penstock.common.errors
from penstock.common.errors import NEVER_RESTARTED, PenstockError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text()


def test_the_tables_of_variables_are_those_of_the_settings():
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    assert made["page"]() == PAGE, "run `python docs/make_tables.py`"


def test_every_exit_code_is_documented_with_whether_it_is_restarted():
    kinds = [
        kind
        for kind in vars(penstock.common.errors).values()
        if isinstance(kind, type) and issubclass(kind, PenstockError)
    ]
    for kind in kinds:
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {kind.exit_code} |")]
        assert ("| no |" in row) == (kind.exit_code in NEVER_RESTARTED), row
