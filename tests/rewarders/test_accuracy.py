"""The reward `accuracy`, answer by answer."""

from __future__ import annotations

import math

import mpmath
import pytest
from sympy import Integer, Sum, Symbol

from penstock.rewarders.rewards import formulas
from penstock.rewarders.rewards.accuracy import accuracy, read_gold


def score(gold: object, *completions: str) -> list[float | None]:
    size = len(completions)
    return accuracy([""] * size, list(completions), solution=[gold] * size, other=[1] * size)


@pytest.mark.parametrize(
    "completion",
    [
        "72",
        "The answer is $72$.",
        r"So we get \boxed{72}",
        "<think>70?</think><answer>72</answer>",
        "<answer> 72 </answer>",
        "<answer>71</answer> no: <answer>72</answer>",
        "48 + 24\n#### 72",
        r"<answer>\frac{144}{2}</answer>",
        "72.0",
        "**72**",
        "*72*",
        "`72`",
        '"72"',
        "\u201c72\u201d",
        "<answer>**72**</answer>",
        r"\boxed{7.2e1}",
    ],
)
def test_a_right_answer_scores_one(completion: str) -> None:
    assert score("Natalia sold 48/2 = <<48/2=24>>24 clips\n#### 72", completion) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "71",
        "",
        "no number at all",
        "72 <answer>71</answer>",
        "72\n#### 71",
        "<answer></answer>",
        "-0733",
        "=",
        "$",
    ],
)
def test_a_wrong_or_missing_answer_scores_zero(completion: str) -> None:
    assert score("72", completion) == [0.0]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("72", "72", "27"),
        ("1,000", "1000", "1"),
        ("-3", "-3", "3"),
        ("-3", "\u22123", "3"),
        ("-3", "it is \u22123", "3"),
        ("3.50", "3.5", "3"),
        ("1/2", "0.5", "2"),
        (r"\frac{1}{2}", "1/2", "2"),
        (r"$\frac{1}{2}$", "0.5", "1"),
        (r"We find $x = 5$, so \boxed{5}", "5", "6"),
        ("2x+1", "1+2x", "2"),
        ("x^2", r"\boxed{x^2}", "2"),
        (7, "7", "8"),
    ],
)
def test_golds_may_be_plain_or_latex(gold: object, right: str, wrong: str) -> None:
    assert score(gold, right, wrong) == [1.0, 0.0]


@pytest.mark.parametrize("gold", ["", "it depends", None])
def test_a_gold_that_cannot_be_read_sets_the_whole_group_aside(gold: object) -> None:
    assert score(gold, "1", "2") == [None, None]


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (["$72$"], "72", 1.0), (["72"], "71", 0.0), ([72], "72", 1.0), ((7, 8), "8, 7", 1.0),
        ([7, 8], "7", 0.0), ({"answer": "72"}, "72", None), (b"72", "72", None), ([], "72", None),
        ([["1"], ["2"]], "1", None),
        ([math.nan, 1], "1", None),
        (["1/(2-2)", "3"], "3", None),
        ([r"so \boxed{3}", "#### 4"], "4, 3", 1.0),
    ],
)  # fmt: skip
def test_a_gold_of_another_type_is_a_list_of_values_or_set_aside(gold, answer, expected):
    assert accuracy([""], [rf"\boxed{{{answer}}}"], [gold]) == [expected]
    assert (read_gold(gold) is None) == (expected is None)


@pytest.mark.parametrize(
    "hostile",
    [
        "{" * 5000,
        "(" * 1000 + "1" + ")" * 1000,
        "-" * 3000 + "1",
        "a " * 5000,
        r"\frac{1}{" * 300 + "2" + "}" * 300,
        "1 111" * 15_000,
        "$0." + "1" * 200_000 + "$",
        "A. " * 1000,
        "(1," * 300,
        r"\(" * 4000,
        r"1}\text{m}" + r"}\text{m}" * 2500 + "x",
    ],
    ids=[
        "braces",
        "brackets",
        "signs",
        "letters",
        "fractions",
        "groups",
        "digits",
        "choices",
        "tuples",
        "parentheses",
        "units",
    ],
)
def test_what_no_formula_looks_like_never_reaches_the_parser(hostile, monkeypatch):
    parsed = []
    monkeypatch.setattr(formulas, "parse", lambda text, *_, **__: parsed.append(text))
    assert accuracy([""], [rf"\boxed{{{hostile}}}"], ["5"]) == [0.0]
    assert accuracy([""], ["5"], [hostile]) in ([0.0], [None])
    assert parsed == []
    formulas.expression("y+1")
    assert parsed == ["$y+1$"]


def test_a_name_that_is_python_text_is_no_formula() -> None:
    before = mpmath.mp.dps
    for gold in ("x^2+1", "6"):
        assert score(gold, r"\boxed{\sum_{\text  {mp.dps}=7}^{9} 2}") == [0.0]
    assert mpmath.mp.dps == before


def test_no_name_of_a_symbol_is_run() -> None:
    before = mpmath.mp.dps
    hostile = Sum(2, (Symbol("mp.dps"), 7, 9))
    assert not formulas._differ(hostile, Integer(6))
    assert formulas._differ(hostile, Integer(7))
    assert mpmath.mp.dps == before
