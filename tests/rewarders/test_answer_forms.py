"""Answers in all the forms that models and data sets write."""

from __future__ import annotations

import pytest

from penstock.rewarders.rewards.accuracy import accuracy
from tests.rewarders.answer_forms import FAILURES, FORMS


def test_there_are_enough_forms_and_few_fail():
    assert len(set(FORMS)) == len(FORMS) >= 60
    assert len(FORMS) - len(FAILURES) >= 57
    assert len(FAILURES) <= len(FORMS) / 20


@pytest.mark.parametrize(("gold", "answer", "equal"), FORMS, ids=lambda value: str(value)[:30])
def test_a_form_has_its_verdict(gold: str, answer: str, equal: bool) -> None:
    holds = accuracy([""], [answer], [gold]) == [float(equal)]
    assert holds != ((gold, answer) in FAILURES), FAILURES.get((gold, answer), "not a known failure")
