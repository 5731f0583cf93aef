"""How a gold answer is read, in words, and why one cannot be read."""

from __future__ import annotations

import pytest

from penstock.rewarders.rewards.accuracy import read_gold
from penstock.rewarders.rewards.golds import describe_golds

READ = {
    "#### 72": "number 72",
    "1,000": "number 1,000",
    "12%": "number 12%",
    "$2k": "number 2 k",
    "1 1/2": "number 1 1/2",
    "1/3": "number 1/3",
    "6.6e-34": "number 6.6e-34",
    "3:2": "ratio or time 3:2",
    "12:30 p.m.": "ratio or time 12:30 p.m.",
    "10-20": "range 10-20",
    "2xy": "formula 2xy",
    "east": "words east",
    "x=5": "x = number 5",
    "(B) east": "choice B",
    r"\boxed{1} and \boxed{2}": "list 1, 2",
    r"$\{1,2\}$": "set {1,2}",
    7: "number 7",
    "10^400": "number 10^400",
}
UNREADABLE = {
    None: "null",
    float("nan"): "not a number (NaN)",
    "": "empty",
    " \n": "empty",
    "Five. ####": "empty",
    r"So \boxed{ }": "empty",
    "...": "has no letter or digit",
    r"\boxed{\frac{1}{0}}": "divides by zero",
    "The answer is 1/0.": "divides by zero",
    "He had five dogs. Then they took $1/0$.": "divides by zero",
    "Then he left us and the dog was sad.": "a sentence",
    r"\boxed{1} and \boxed{}": "one of its 2 boxes cannot be read",
    r"\frac{1": "no number, formula, choice or word that can be read",
}


@pytest.mark.parametrize("gold", READ)
def test_a_gold_that_is_read(gold):
    assert describe_golds([gold], False) == [(READ[gold], "")]


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_gold_that_cannot_be_read_has_a_reason(gold):
    assert read_gold(gold) is None
    assert describe_golds([gold], False) == [(None, UNREADABLE[gold])]


def test_compared_as_texts_only_an_empty_gold_cannot_be_read():
    found = describe_golds(["#### the dog", "a ####"], True)
    assert found == [("text the dog", ""), (None, "empty")]
