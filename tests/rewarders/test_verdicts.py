"""The rules by which answers are read and compared, form by form."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.rewarders.rewards.accuracy import acc, accuracy
from tests.rewarders import further_verdicts, hard_verdicts
from tests.rewarders.verdicts import FAILURES, FORMS, RULES


@pytest.mark.parametrize(("gold", "answer", "equal"), FORMS, ids=lambda value: str(value)[:30])
def test_a_rule_has_its_verdicts(gold: str, answer: str, equal: bool) -> None:
    holds = accuracy([""], [answer], [gold]) == [float(equal)]
    assert holds != ((gold, answer) in FAILURES), FAILURES.get((gold, answer), "not a known failure")


def forms(kind: str) -> list[tuple[str, str, bool]]:
    """Return the gold, answer and verdict of each form of a kind."""
    is_further = kind in further_verdicts.KINDS
    return [
        (gold, answer, equal)
        for gold, right, wrong in (further_verdicts if is_further else hard_verdicts).KINDS[kind]
        for answers, equal in ((right, True), (wrong, False))
        for answer in answers.split(" | " if is_further else " ~ ")
    ]


@pytest.mark.parametrize("kind", [*further_verdicts.KINDS, *hard_verdicts.KINDS])
def test_further_forms_have_their_verdicts(kind: str) -> None:
    known = further_verdicts.FAILURES
    for gold, answer, equal in forms(kind):
        holds = accuracy([""], [answer], [gold]) == [float(equal)]
        assert holds != ((gold, answer) in known), (gold, answer)


def test_few_verdicts_fail():
    further = [form for kind in further_verdicts.KINDS for form in forms(kind)]
    assert len(set(further) - set(FORMS)) >= 1000
    assert len(FAILURES) == 0
    assert len(further_verdicts.FAILURES) <= 20


@pytest.mark.parametrize(
    "gold",
    [
        r"\boxed{\frac{1}{0}}",
        r"\frac{1}{2-2}",
        "1/(3-3)",
        "5/0",
        "it depends",
        "=",
        "$",
        "",
        r"\frac{1}{0}",
        "NaN is it",
    ],
)
def test_a_gold_without_a_value_sets_the_group_aside(gold: str) -> None:
    assert accuracy(["", ""], ["1", r"\boxed{0}"], [gold]) == [None, None]


@pytest.mark.parametrize("gold", sorted({gold for gold, _, _ in FORMS if "boxed" not in gold}))
def test_a_gold_equals_itself_however_it_is_marked(gold: str) -> None:
    answers = [rf"\boxed{{{gold}}}", f"<answer>{gold}</answer>", f"so\n#### {gold}"]
    if "$" not in gold and "\\(" not in gold and "\\[" not in gold and ". " not in gold:
        answers.append(f"${gold}$")
    else:
        answers = answers[1:]
    assert accuracy([""] * len(answers), answers, [gold] * len(answers)) == [1.0] * len(answers)


def test_a_box_is_read_as_a_list_by_acc_too():
    assert acc(["", ""], [r"\boxed{1,2}", r"\boxed{1.2}"], ["1,2"] * 2) == [1.0, -0.5]


def test_each_rule_is_a_row_of_the_documentation():
    table = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert [name for name in RULES if f"\n| {name} |" not in table] == []
