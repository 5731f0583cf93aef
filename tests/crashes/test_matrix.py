"""Every place to die; a run has two deaths of the learner and one of each other role."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.crashes.lines import ROOT, lines_of
from tests.crashes.matrix import COMMANDS, points

pytestmark = pytest.mark.e2e  # some minutes


@pytest.fixture(scope="module")
def matrix() -> tuple[dict[str, Any], dict[str, Any]]:
    """The places of a calm run by role, and what came of a death at each point."""
    calm, *results = lines_of("tests.crashes.matrix")
    return calm["calm"], {result["point"]: result for result in results}


@pytest.mark.parametrize("point", [f"{role}:{place}" for role, place in points()])
def test_a_death_anywhere_changes_nothing(matrix, point):
    result = matrix[1][point]
    assert result["died"], result
    assert result["faults"] == []


def test_the_table_has_every_place_that_a_run_passes(matrix):
    assert matrix[0].keys() == {role for role, _ in points()}
    for role, passed in matrix[0].items():
        assert passed
        assert set(passed) <= {place for at, place in points() if at == role}


def test_every_function_of_the_protocol_has_a_point_on_either_side():
    source = Path(ROOT / "common/broker/functions.lua").read_text()
    functions = set(re.findall(r"register\('(\w+)'", source))
    assert len(functions) > 10
    reads_only = {"audit", "held"}  # by people and in a long wait; after a lost reply
    assert functions - reads_only <= {name for names in COMMANDS.values() for name in names}
