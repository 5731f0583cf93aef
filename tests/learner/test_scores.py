"""What an evaluation says, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.wire.messages import Version
from penstock.learner.report.eval_metrics import judge, majority, pass_at_k, summarise
from penstock.learner.state.best_model import keep_if_best, read_best
from penstock.learner.streams.evaluation import Answer


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            choices = list(combinations([place < right for place in range(n)], k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("answers", "right", "verdict"),
    [
        (("72", "72", "71"), (True, True, False), True),
        (("71", "71", "72"), (False, False, True), False),
        (("1,000", "$1000", "7"), (True, True, False), True),
        (("72", "71"), (True, False), True),
        (("71", "72"), (False, True), False),
        (("", "", "72"), (False, False, True), True),
        (("", ""), (False, False), False),
        (("3,4", "34", "7", "34"), (True, False, False, False), False),
        (("(1,2)", "(12)", "9"), (False, True, True), False),
    ],
)
def test_the_majority(answers, right, verdict):
    assert majority(answers, right) is verdict


def answer(index, *values, reward="accuracy", texts=None):
    return Answer(
        index,
        tuple(texts or ("x" for _ in values)),
        tuple(texts or ("x" for _ in values)),
        tuple({reward: value} for value in values),
        tuple(10 + place for place in range(len(values))),
        tuple("length" if place == 0 else "stop" for place in range(len(values))),
    )


def test_the_figures_of_an_evaluation():
    answers = [
        answer(0, 1.0, 1.0, 0.0, 0.0, texts=("a", "a", "b", "c")),
        answer(1, 0.0, 0.0, 0.0, 1.0, texts=("a", "a", "b", "c")),
        answer(2, 0.0, 0.0, 0.0, 0.0),
        Answer(3, reason="the engine died of it"),
    ]
    assert summarise(answers, "accuracy") == pytest.approx(
        {
            "eval/questions": 4,
            "eval/unanswered": 1,
            "eval/unscored": 0,
            "eval/rewards/accuracy/mean": 3 / 12,
            "eval/completions/mean_length": 11.5,
            "eval/completions/clipped_ratio": 0.25,
            "eval/avg@4": 3 / 12,
            "eval/pass@1": 3 / 12,
            "eval/pass@2": (5 / 6 + 1 / 2) / 3,
            "eval/pass@4": 2 / 3,
            "eval/maj@4": 1 / 3,
        }
    )


@pytest.mark.parametrize(
    ("rewards", "values", "name", "right_from"),
    [
        (["accuracy"], {}, "accuracy", 1.0),
        (["format", "correctness"], {}, "correctness", 1.0),
        (["cosine", "acc", "accuracy"], {}, "acc", 1.0),
        (["own.py:own", "accuracy"], {}, "accuracy", 1.0),
        (["own.py:own"], {}, "own", 1.0),
        (["own.py:own"], {"eval_threshold": 0.2}, "own", 0.2),
        (["own.py:accuracy", "format"], {}, "accuracy", 1.0),
        (["cosine"], {}, "cosine", None),
        (["format", "repetition"], {}, "format", None),
        (["cosine"], {"eval_threshold": 0.4}, "cosine", 0.4),
        (["accuracy", "format"], {"metric_for_best_model": "format"}, "format", None),
        (["model:helpful=rm"], {}, "helpful", None),
        (["judge:clear=j.toml"], {"eval_threshold": 7}, "clear", 7.0),
    ],
)
def test_the_reward_of_accuracys_kind_or_a_threshold_tells_what_is_right(
    rewards, values, name, right_from
):
    settings = LearnerSettings(rewards=rewards, **values)
    assert settings.main_reward == name
    assert settings.right_from == right_from


def test_a_shaped_reward_above_0_is_not_right():
    answers = [
        answer(0, 0.5, 0.9, 1.0, -0.5, reward="own"),
        answer(1, 0.1, 0.1, 0.1, None, reward="own"),
    ]
    assert summarise(answers, "own")["eval/avg@4"] == 1 / 8
    assert summarise(answers, "own", 0.5)["eval/avg@4"] == 3 / 8
    found = summarise(answers, "own", None)
    assert not any("@" in name for name in found), "nobody knows what is right"
    assert found["eval/rewards/own/mean"] == pytest.approx(2.2 / 7)
    assert judge(answers[0], "own", 1.0) == [False, False, True, False]
    assert judge(answers[1], "own", 0.1) == [True, True, True, None]
    assert judge(answers[0], "own", None) == judge(answers[0], "other", 1.0) == [None] * 4
    failed = replace(answers[0], failures=("", "", "hung", ""))
    assert judge(failed, "own", 1.0) == [False, False, None, False]


def test_questions_without_a_gold_count_neither_way():
    found = summarise([answer(0, 1.0), answer(1, None)], "accuracy")
    assert found["eval/pass@1"] == 1.0
    assert "eval/maj@1" not in found


def test_nothing_but_dead_tickets():
    assert summarise([Answer(0, reason="dead")], "accuracy") == {
        "eval/questions": 1,
        "eval/unanswered": 1,
        "eval/unscored": 0,
    }


def test_what_could_not_be_scored_is_no_wrong_answer():
    partly = replace(answer(0, 1.0, None, 0.0, None), failures=("", "hung", "", "hung"))
    found = summarise([partly, answer(1, 0.0, 0.0, 0.0, 0.0)], "accuracy")
    assert found["eval/unscored"] == 2
    assert found["eval/avg@4"] == (1 / 2 + 0) / 2
    assert found["eval/pass@2"] == (1 + 0) / 2
    assert found["eval/pass@4"] == 0.0  # of the second alone: the first has no four answers
    assert found["eval/rewards/accuracy/mean"] == 1 / 6
    nothing = replace(answer(0, None, None), failures=("hung", "hung"))
    assert summarise([nothing], "accuracy")["eval/unanswered"] == 1


def test_the_best_model_is_kept_and_a_worse_one_is_not(tmp_path):
    def evaluate(step, value, answered=8):
        folder = LearnerFolder(tmp_path, 1)
        model = folder.version(1, step)
        model.mkdir(parents=True)
        (model / "model.safetensors").write_text(f"weights {step}")
        return keep_if_best(folder, Version(1, step), "accuracy", value, answered)

    assert [evaluate(step, value) for step, value in ((0, 0.3), (5, 0.5), (10, 0.4), (15, 0.5))] == [
        True, True, False, False,
    ]  # fmt: skip
    assert read_best(RunFolder(tmp_path)) == {
        "step": 5,
        "version": "1.5",
        "metric": "accuracy",
        "value": 0.5,
        "answered": 8,
    }
    assert not evaluate(20, 1.0, answered=1)  # the questions that are left may be the easy ones
    (kept,) = (tmp_path / "best").glob("[0-9]*")
    assert RunFolder(tmp_path).best_link.resolve() == kept / "model"
    (tmp_path / "best" / ".model").symlink_to("left by a killed learner")
    LearnerFolder(tmp_path, 1).remove_asides()
    assert not (tmp_path / "best" / ".model").is_symlink()
    assert (kept / "model" / "model.safetensors").read_text() == "weights 5"
    assert json.loads((kept / "best.json").read_text())["step"] == 5
