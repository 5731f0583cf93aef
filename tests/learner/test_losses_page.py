"""docs/losses.md names every choice the loss has, its default, and a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from penstock.common.config.learner_settings import EntropySettings, LearnerSettings, LossSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "losses.md").read_text()
CHOICES = (
    "loss_type",
    "importance_sampling_level",
    "advantage_estimator",
    "scale_rewards",
    "multi_objective_aggregation",
    "importance_sampling_correction",
    "importance_sampling_mode",
    "kl_estimator",
)
FIELDS = LearnerSettings.model_fields


def rows() -> list[dict[str, str]]:
    """The rows of all tables, by the names of their columns, without the back-quotes."""
    found, header = [], []
    for line in PAGE.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif not set(line) <= set("|- "):
            found.append(dict(zip(header, cells, strict=True)))
    return found


ROWS = rows()
SELECTED = [row for row in ROWS if row["variable"]]


def named(row: dict[str, str]) -> tuple[str, str]:
    """The setting's name and the value that a row selects; empty where it is a number."""
    name, _, value = row["variable"].removeprefix("LEARNER_").partition("=")
    return name.lower(), value


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_has_exactly_one_row(name):
    described = [value for field, value in map(named, SELECTED) if field == name]
    assert sorted(described) == sorted(get_args(FIELDS[name].annotation))


def test_every_setting_of_the_loss_has_a_row():
    fields = LossSettings.model_fields | EntropySettings.model_fields
    assert fields.keys() <= {named(row)[0] for row in SELECTED}


@pytest.mark.parametrize("row", SELECTED, ids=lambda row: row["variable"])
def test_the_named_default_is_the_settings(row):
    default = FIELDS[named(row)[0]].default
    assert row["default"] == (str(default).lower() if isinstance(default, bool) else str(default))


@pytest.mark.parametrize("node", sorted(set(re.findall(r"tests/[^`]*::[^`]*", PAGE))))
def test_the_named_test_exists(node):
    path, _, name = node.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}


def test_every_row_names_a_test():
    assert all("::test_" in row["test"] for row in ROWS)


def test_every_variable_on_the_page_exists():
    names = set(re.findall(r"LEARNER_([A-Z_]+)", PAGE))
    assert names
    assert {name.lower() for name in names} <= FIELDS.keys()
