"""Rules of the protocol taken out, each in a run of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.crashes.lines import lines_of
from tests.crashes.mutants import MUTANTS

pytestmark = pytest.mark.e2e  # two minutes


@pytest.fixture(scope="module")
def mutants() -> dict[str, Any]:
    """What came of each rule taken out."""
    return {result["mutant"]: result for result in lines_of("tests.crashes.mutants")}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_run_without_the_rule_ends_with_its_verdict(mutants, name):
    result = mutants[name]
    assert result["with_the_rule"]["faults"] == []
    assert MUTANTS[name].verdict in result["without"]["kinds"]


def test_the_rules_that_matter_most_are_among_them():
    assert {1, 2, 5, 7, 9, 13} <= {mutant.rule for mutant in MUTANTS.values()}
