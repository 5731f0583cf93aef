"""Rules of the protocol taken out, each in a run of its own: some of them, all with NIGHTLY=1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.crashes.lines import ROOT, lines_of
from tests.crashes.mutants import MUTANTS
from tests.helpers import NIGHTLY

pytestmark = pytest.mark.e2e  # a minute

RULES = {1, 2, 5, 7, 9, 13}
"""The rules that matter most."""

CHOSEN = [name for name in MUTANTS if MUTANTS[name].rule in RULES or NIGHTLY]


@pytest.fixture(scope="module")
def mutants() -> dict[str, Any]:
    """What came of each rule taken out."""
    return {result["mutant"]: result for result in lines_of("tests.crashes.mutants", *CHOSEN)}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_without_the_rule_ends_with_its_verdict(mutants, name):
    result = mutants[name]
    assert result["with_the_rule"]["faults"] == []
    assert MUTANTS[name].verdict in result["without"]["kinds"]


@pytest.mark.parametrize("name", MUTANTS)
def test_what_takes_a_rule_out_is_in_the_sources_once(name):
    for path, right, _ in MUTANTS[name].edits:
        assert (ROOT / path).read_text().count(right) == 1, f"{path}: {right}"


def test_the_rules_that_matter_most_are_among_them():
    assert {mutant.rule for mutant in MUTANTS.values()} >= RULES
