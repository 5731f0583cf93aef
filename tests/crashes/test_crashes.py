"""Every place to die, and every rule taken out: whole runs, in processes of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crashes.matrix import COMMANDS, points
from tests.crashes.mutants import MUTANTS, ROOT

pytestmark = pytest.mark.e2e  # some minutes

_LIMIT_S = 600


def lines_of(module: str) -> list[Any]:
    """What a module prints, a JSON value per line."""
    result = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S,
        check=False,
    )  # fmt: skip
    assert result.stdout, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def matrix() -> tuple[dict[str, Any], dict[str, Any]]:
    """The places of a calm run by role, and what came of a death at each point."""
    calm, *results = lines_of("tests.crashes.matrix")
    return calm["calm"], {result["point"]: result for result in results}


@pytest.fixture(scope="module")
def mutants() -> dict[str, Any]:
    """What came of each rule taken out."""
    return {result["mutant"]: result for result in lines_of("tests.crashes.mutants")}


@pytest.mark.parametrize("point", [f"{role}:{place}" for role, place in points()])
def test_a_death_anywhere_changes_nothing(matrix, point):
    result = matrix[1][point]
    assert result["died"], result
    assert result["faults"] == []


def test_the_table_has_every_place_that_a_run_passes(matrix):
    for role, passed in matrix[0].items():
        assert set(passed) <= {place for at, place in points() if at == role}


def test_every_function_of_the_protocol_has_a_point_on_either_side():
    source = Path(ROOT / "common" / "functions.lua").read_text()
    functions = set(re.findall(r"register\('(\w+)'", source))
    assert len(functions) > 10
    assert functions <= {name for names in COMMANDS.values() for name in names}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_run_without_the_rule_ends_with_its_verdict(mutants, name):
    result = mutants[name]
    assert result["with_the_rule"]["kinds"] == []
    assert MUTANTS[name].verdict in result["without"]["kinds"]


def test_the_rules_that_matter_most_are_among_them():
    assert {1, 2, 5, 7, 9, 13} <= {mutant.rule for mutant in MUTANTS.values()}
