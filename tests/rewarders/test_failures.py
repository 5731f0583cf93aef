"""What a person learns of a reward that fails: the cause, the file and the line, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import RewarderSettings
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.rewarders.failures import Failures, cause_of
from penstock.rewarders.scoring import make_scorer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.rewarders.stand_ins import make_contract, make_group, make_model_folder

FAULTY = {
    "int('x')": "ValueError: invalid literal",
    "{}['score']": "KeyError: 'score'",
    "[][3]": "IndexError",
    "1 / 0": "ZeroDivisionError",
    "None.group(1)": "AttributeError",
    "'1' + 1": "TypeError",
    "[int(text) for text in completions]": "ValueError: invalid literal",
    "__import__('json').loads('{')": "JSONDecodeError",
    "deeper(0)": "RecursionError",
    "exit(3)": "SystemExit: 3",
    "open('/no/such/file')": "FileNotFoundError",
    "undefined_name": "NameError",
}
"""By the text of the faulty line: the begin of what is said."""

RETURNED = {
    "None": "expected a list of 2 values, found None",
    "[1.0]": "expected a list of 2 values",
    "['a', 'b']": "expected finite numbers or None",
    "[float('nan')] * 2": "expected finite numbers or None",
}
"""By what a reward returns: what is said."""


@pytest.fixture(scope="module")
def pool():
    with ScoringPool(RewarderSettings(workers=1, timeout_s=4.0, memory_gib=1)) as pool:
        yield pool


def failure_of(pool: ScoringPool, folder: Path, body: str) -> str:
    """Why a group is not scored by a reward whose function has this body, from line 4 on."""
    model = make_model_folder(folder / "model")
    (folder / "own.py").write_text(
        "def deeper(level):\n    return deeper(level + 1)\ndef own(completions, **_):\n" + body
    )
    settings = LearnerSettings(rewards=f"{folder}/own.py:own")
    rewards = resolve_rewards(settings, {"columns": ["answer"], "max_steps": 1, "completions": "text"})
    contract = make_contract(model, {})
    scorer = make_scorer(replace(contract, rewards=rewards), pool, "rewarder-1")
    with pytest.raises(ScoringFailed) as found:
        scorer.score_group(make_group(contract, "train:0", "a", "b"))
    return str(found.value)


@pytest.mark.parametrize("fault", FAULTY)
def test_a_reward_that_raises_is_named_with_file_and_line(pool, tmp_path, fault):
    said = failure_of(pool, tmp_path, f"    found = {fault}\n    return [1.0] * len(completions)\n")
    assert f"reward own: {FAULTY[fault]}" in said, said
    line = "line 2, in deeper" if fault.startswith("deeper") else f"line 4, in own: `found = {fault}`"
    assert f"(own.py, {line}" in said, said


@pytest.mark.parametrize("returned", RETURNED)
def test_a_reward_that_returns_nonsense_is_named_with_its_file(pool, tmp_path, returned):
    said = failure_of(pool, tmp_path, f"    return {returned}\n")
    assert said.startswith(f"reward own: ValueError: {RETURNED[returned]}"), said
    assert ", in own.py, line 3" in said


def test_a_slow_reward_is_named_with_the_setting(pool, tmp_path):
    said = failure_of(pool, tmp_path, "    __import__('time').sleep(1000)\n")
    assert said.startswith("reward own: took more than 4 s (REWARDER_TIMEOUT_S: make the reward faster")
    assert ", in own.py, line 3" in said


def test_a_slow_reward_is_told_before_it_is_tried_again(pool, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Failures, "tell", lambda _, reason, *rest: told.append(reason))
    failure_of(
        pool, tmp_path, "    if len(completions) > 1: __import__('time').sleep(1000)\n    1 / 0\n"
    )
    assert "took more than 4 s" in told[0]


def test_the_place_survives_a_long_message(pool, tmp_path):
    said = failure_of(pool, tmp_path, "    raise ValueError('x' * 5000)\n")
    assert "own.py, line 4, in own: `raise ValueError('x' * 5000)`" in said
    assert len(said) < 1500


def test_the_place_survives_letters_that_are_escaped(pool, tmp_path):
    said = failure_of(pool, tmp_path, "    raise ValueError('\\x1b\\u200b' * 220)\n")
    assert "own.py, line 4, in own: `raise" in said
    assert len(said) < 1500


REASON = "reward own: ValueError: no {!r} in {} characters (own.py, line {}, in own: `int(text)`)"


@pytest.mark.parametrize(
    "error",
    [
        "type('E', (Exception,), {'__traceback__': property(lambda self: 1 / 0)})()",
        "type('E' * 600, (Exception,), {'__str__': lambda self: 1 / 0})()",
    ],
)
def test_an_exception_that_hides_its_place_is_told_all_the_same(pool, tmp_path, error):
    said = failure_of(pool, tmp_path, f"    raise {error}\n")
    assert said.startswith("reward own: E"), said
    assert "own.py" in said
    assert len(said) < 1500


def test_a_line_is_that_of_the_file_whatever_letters_it_has(pool, tmp_path):
    said = failure_of(
        pool, tmp_path, "    text = '\x0c \x1c \u2028'\n    raise ValueError('this one')\n"
    )
    assert "own.py, line 5, in own: `raise ValueError('this one')`" in said


def test_a_cause_is_told_once_and_then_counted():
    failures = Failures()
    with structlog.testing.capture_logs() as logs:
        for number in range(1000):
            what = f"the group of train:{number} was not scored and is retried"
            failures.tell(REASON.format(f"a{number}", number, 4), what, "I think\nit is 4")
        failures.tell(REASON.format("b", 1, 9), "the group of train:2 was not scored and is retried")
    said = [entry["event"] for entry in logs]
    assert len(said) == 5, "the first, at 10, 100 and 1,000, and the other place"
    assert "own.py, line 4" in said[0]
    assert "The group of train:0 was not scored" in said[0]
    assert "I think" in said[0]
    assert said[1].startswith("10 failures so far of this cause, the newest: reward own: ValueError")
    assert said[3].startswith("1000 failures")
    assert "own.py, line 9" in said[4]


def test_wrong_values_are_one_cause_whatever_they_are():
    failures = Failures()
    with structlog.testing.capture_logs() as logs:
        for number in range(100):
            value = f"I think {chr(97 + number % 26)} is 0.{number + 100}"
            failures.tell(
                f"reward own: ValueError: expected finite numbers, found {value} (str)", "again"
            )
    assert len(logs) == 3


def test_a_reward_whose_errors_never_repeat_does_not_flood_the_log():
    failures = Failures()
    with structlog.testing.capture_logs() as logs:
        for number in range(5000):
            letters = "".join(chr(97 + int(digit)) for digit in str(number))
            failures.tell(f"reward own: ValueError: {letters}, in own.py", "it is retried")
    assert len(logs) == 100 + 4, "a hundred causes, then the first, 10th, 100th and 1,000th of others"
    assert len(failures._counts) == 101


def test_causes_without_a_place_differ_by_what_does_not_vary():
    assert cause_of("reward a: took more than 30 s") == cause_of("reward a: took more than 31 s")
    assert cause_of("reward a: took more than 30 s") != cause_of("reward b: took more than 30 s")
    assert cause_of(REASON.format("a", 1, 4)) == cause_of(REASON.format("it's: so", 22, 4))
    assert cause_of(REASON.format("a", 1, 4)) != cause_of(REASON.format("a", 1, 5))
    assert cause_of("judge j: status 401") != cause_of("judge j: status 500")
    alone = REASON.format("a", 1, 4) + "; and for the completion `0` alone: {}"
    assert cause_of(alone.format("one text")) == cause_of(alone.format("another"))
    few = "{} of 8 completions have no reward, which leaves too few; correct what failed first: "
    assert cause_of(few.format(7) + REASON.format("a", 1, 4)) == cause_of(
        few.format(8) + REASON.format("b", 2, 4)
    )
