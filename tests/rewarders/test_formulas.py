"""Every reward by formula against values worked out by hand, and at its edges."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.common.wire.reward_spec import BUILT_IN, LANGUAGES
from penstock.rewarders.rewards import REWARDS
from penstock.rewarders.rewards.answers import final_answer, last_box
from penstock.rewarders.rewards.form import word_scripts
from penstock.rewarders.rewards.lengths import half_cosine, overlong_punishment, relative_lengths

RIGHT, WRONG = "<answer>72</answer>", "<answer>71</answer>"
STRUCTURED = "<think>48 + 24</think>\n<answer>72</answer>"


def score(name: str, *texts: str, lengths: tuple[int, ...] = (), gold: str = "72", **options: object):
    """Values of one reward; `lengths` in tokens, else one token a letter."""
    sizes = lengths or tuple(map(len, texts))
    return REWARDS[name](
        prompts=["q"] * len(texts),
        completions=list(texts),
        completion_ids=[[0] * size for size in sizes],
        solution=[gold] * len(texts),
        **options,
    )


def test_the_rewards_are_those_that_the_contract_knows():
    assert set(REWARDS) == set(BUILT_IN)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("accuracy", RIGHT, 1.0),
        ("accuracy", WRONG, 0.0),
        ("accuracy", "", 0.0),
        ("acc", r"so \boxed{72}", 1.0),
        ("acc", r"so \boxed{71}", -0.5),
        ("acc", r"\boxed{72} no, \boxed{71}", -0.5),
        ("acc", r"\boxed{\frac{144}{2}}", 1.0),
        ("acc", RIGHT, -1.0),
        ("acc", r"\boxed{5 <answer>72</answer>}", -0.5),
        ("acc", r"\boxed{72", -1.0),
        ("acc", "", -1.0),
        ("base_acc", STRUCTURED, 1.0),
        ("base_acc", STRUCTURED.replace("72", "71"), 0.0),
        ("base_acc", RIGHT, 0.0),
        ("base_acc", "", 0.0),
        ("format", STRUCTURED, 1.0),
        ("format", RIGHT, 0.0),
        ("strict_format", STRUCTURED, 0.0),
        ("strict_format", STRUCTURED.replace("\n", ""), 1.0),
        ("strict_format", STRUCTURED.replace("\n", "") + "\n", 0.0),
        ("strict_format", "<think>a\nb</think><answer>c\nd</answer>", 1.0),
        ("strict_format", "", 0.0),
        ("xml_tags", "<reasoning>\n.\n</reasoning>\n<answer>\n72\n</answer>", 0.8),
        ("xml_tags", RIGHT, 0.4),
        ("xml_tags", "</answer></answer>", 0.2),
        ("xml_tags", "", 0.0),
        ("correctness", RIGHT, 2.0),
        ("correctness", "<answer>\n72\n</answer>", 2.0),
        ("correctness", "<answer>72.0</answer>", 1.5),
        ("correctness", "<answer>it is $72</answer>", 1.5),
        ("correctness", "<answer>48+24=72</answer>", 1.5),
        ("correctness", "<answer>72 clips</answer>", 0.0),
        ("correctness", "<answer>5 72</answer>", 0.0),
        ("correctness", "<answer>...</answer>", 0.0),
        ("correctness", "<answer>72</answer> <answer>71</answer>", 0.0),
        ("correctness", "<answer>72</answer> <answer>71", 0.0),
        ("correctness", "72", 0.0),
        ("correctness", "", 0.0),
    ],
)
def test_answers_and_tags(name: str, text: str, value: float) -> None:
    assert score(name, text) == [pytest.approx(value)]


@pytest.mark.parametrize("name", ["accuracy", "acc", "base_acc", "cosine", "length"])
def test_a_gold_that_cannot_be_read_gives_none(name: str) -> None:
    options = {"cosine_max_len": 10} if name == "cosine" else {}
    assert score(name, RIGHT, WRONG, gold="it depends", **options) == [None, None]


def test_a_gold_without_a_text_gives_no_correctness() -> None:
    assert score("correctness", RIGHT, gold="####") == [None]


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        (0, 1.0, -0.5),
        (25, 0.9267766953, -0.4267766953),  # cos(pi / 4) = 0.7071067812
        (50, 0.75, -0.25),
        (75, 0.5732233047, -0.0732233047),
        (100, 0.5, 0.0),
        (101, 0.5, 0.0),
        (1000, 0.5, 0.0),
    ],
)
def test_cosine(length: int, right: float, wrong: float) -> None:
    values = score("cosine", RIGHT, WRONG, lengths=(length, length), cosine_max_len=100)
    assert values == pytest.approx([right, wrong])


def test_cosine_takes_the_older_guides_values_too() -> None:
    older = {"cosine_min_len_value_wrong": 0.0, "cosine_max_len_value_wrong": -0.5}
    assert score("cosine", WRONG, WRONG, lengths=(0, 4), cosine_max_len=4, **older) == [0.0, -0.5]
    assert half_cosine(50, 100, 0.0, -0.5) == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("text", "n", "value"),
    [
        ("", 3, 0.0),
        ("a", 3, 0.0),
        ("a b", 3, 0.0),
        ("a b c", 3, 0.0),
        ("a a a a", 3, -0.5),  # two trigrams, one of them distinct
        ("a a a a a", 3, -2 / 3),
        ("A a a A", 3, -0.5),
        ("a b c a b c", 3, -0.25),  # abc bca cab abc
        ("a b a b", 2, -1 / 3),  # ab ba ab
        ("a a", 1, -0.5),
        ("a\nb\tc  a b c", 3, -0.25),
    ],
)
def test_repetition(text: str, n: int, value: float) -> None:
    assert score("repetition", text, repetition_n_grams=n) == [pytest.approx(value)]


def test_repetition_has_a_largest_penalty() -> None:
    assert score("repetition", "a a a a", repetition_max_penalty=-0.1) == [pytest.approx(-0.05)]
    assert str(score("repetition", "a b c")) == "[0.0]"


@pytest.mark.parametrize(
    ("length", "value"),
    [
        (0, 0.0),
        (3277, 0.0),
        (3278, -1 / 819),
        (3686, -409 / 819),
        (4096, -1.0),
        (4097, -1.0),
        (9999, -1.0),
    ],
)
def test_soft_overlong_in_the_dapo_recipe(length: int, value: float) -> None:
    options = {"soft_max_length": 4096, "soft_cache_length": 819}
    assert score("soft_overlong", "text", lengths=(length,), **options) == [pytest.approx(value)]


def test_soft_overlong_counts_tokens_and_not_letters() -> None:
    options = {"soft_max_length": 10, "soft_cache_length": 5}
    assert score("soft_overlong", "x" * 100, lengths=(5,), **options) == [0.0]
    assert overlong_punishment(7, 10, 10) == pytest.approx(-0.7)


@pytest.mark.parametrize(
    ("lengths", "right", "values"),
    [
        ((10, 20, 30), (True, True, True), [0.5, 0.0, -0.5]),
        ((10, 20, 30), (False, False, False), [0.0, 0.0, -0.5]),
        ((30, 10), (True, False), [-0.5, 0.0]),
        ((10, 15, 20), (True, True, False), [0.5, 0.0, -0.5]),
        ((7, 7), (True, False), [0.0, 0.0]),
        ((0, 4), (True, True), [0.5, -0.5]),
        ((5,), (True,), [0.0]),
    ],
)
def test_length_within_a_group(lengths, right, values) -> None:
    assert relative_lengths(lengths, right) == values
    texts = [RIGHT if fine else WRONG for fine in right]
    assert score("length", *texts, lengths=lengths) == values


@pytest.mark.parametrize(
    ("language", "text", "value"),
    [
        ("en", "Four is the answer", 1.0),
        ("en", "The answer is 四", 0.75),
        ("en", "答案是四", 0.0),
        ("zh", "答案是四", 1.0),
        ("zh", "答案 is 四", 0.75),
        ("zh", "So 四", 0.5),
        ("ja", "答えは四です", 1.0),
        ("ko", "답은 four", 0.5),
        ("ru", "Ответ: four", 0.5),
        ("en", "", 0.0),
        ("en", "12 + 30 = 42", 0.0),
        ("en", "It costs $5 对的对的 and $6 ok", 4 / 8),
        ("en", r"<think>So $答 = \frac{1}{2}$</think>", 1.0),
        ("zh", r"答案是 \frac{x}{2}", 0.75),  # the bare x is a word, the command is not
    ],
)
def test_language_consistency(language: str, text: str, value: float) -> None:
    assert score("language_consistency", text, target_language=language) == [pytest.approx(value)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"a \(四\) b", 2), (r"a \[四 \(四\] b", 2), (r"a \(四\) b \(四", 3), (r"\[四 \(四\)", 1),
        (r"\\(四\) a", 1), (r"\)\(四", 1), (r"\(四\]", 1), ("a \\[四\n\\] b", 2), (r"<\(b>", 1),
    ],
)  # fmt: skip
def test_a_bracket_begins_a_formula_only_if_it_is_closed(text: str, words: int) -> None:
    assert len(word_scripts(text)) == words


def test_the_language_of_a_text_full_of_open_brackets_is_found_in_linear_time() -> None:
    """A search for the end of each bracket would take a day, and would be killed in each scoring."""
    program = (
        "from penstock.rewarders.rewards.form import word_scripts\n"
        "for piece in ('\\\\(', '\\\\[', '\\\\(\\\\[', '$', '$1', '<a', '\\\\]\\\\('):\n"
        "    word_scripts(piece * 1_000_000)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_every_language_has_its_script() -> None:
    assert all(LANGUAGES.values())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1 <answer>2</answer>", "2"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("#### 1 #### 2", " 2"),
        ("just 3", "just 3"),
        (r"\boxed{1}, no: \boxed{2}", r"\boxed{2}"),
        (r"\boxed{1} <answer>so \boxed{2}</answer>", r"\boxed{2}"),
    ],
)
def test_where_the_answer_is(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_environment() -> None:
    given = {"completions": ["a", "b"], "environment_reward": [0.5, None]}
    assert REWARDS["environment"](**given) == [0.5, None]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1}", "1"),
        (r"\fbox{1}", "1"),
        (r"\boxed {\frac{1}{2}} and \boxed{", r"\frac{1}{2}"),
        (r"\boxed{a{b}c} x", "a{b}c"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, inside: str | None) -> None:
    assert last_box(text) == inside


def test_the_answer_in_a_hostile_text_is_found_in_linear_time() -> None:
    """A search for the end of each mark would take hours, and would stop the rewarder's threads."""
    program = (
        "from penstock.rewarders.rewards.answers import final_answer\n"
        "for piece in ('<answer>', '\\\\boxed{', '{'):\n"
        "    assert final_answer(piece * 1_000_000) == piece * 1_000_000\n"
        "from penstock.rewarders.rewards.answers import correctness\n"
        "text = '<answer>=' + '1' * 1_000_000 + 'x</answer>'\n"
        "assert correctness([''], [text], ['1']) == [0.0]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        ("8" * 400, "9" * 400, 0.0),
        ("8" * 400, "= " + "8" * 400, 1.5),
        ("8" * 9000, "9" * 9000, 0.0),
        ("#### 1,234", "1234", 1.5),
        ("1234", "1,234", 1.5),
        ("234", "1,23", 0.0),
    ],
)
def test_correctness_compares_numbers_exactly(gold: str, answer: str, value: float) -> None:
    assert REWARDS["correctness"]([""], [f"<answer>{answer}</answer>"], solution=[gold]) == [value]
