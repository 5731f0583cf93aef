"""`penstock evaluate`: what it asks for, prints and refuses, around a run that is not made here."""

from __future__ import annotations

import json
import os

import pytest

from penstock.common.config.command import execute_command, load
from penstock.common.errors import ConfigError
from penstock.deploy.evaluate import Evaluate, context_of, fitting_lengths, read_results
from penstock.deploy.up import Up
from penstock.learner.__main__ import Learner
from tests.e2e.site import make_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The run's folder; nothing of what main() puts into the environment stays."""
    monkeypatch.setattr(os, "environ", os.environ | {"RUN_DIR": str(tmp_path)})
    return tmp_path / "evaluate"


def evaluate(*arguments):
    return load(Evaluate, "penstock evaluate", list(arguments)).execute()


def asked(folder, monkeypatch, results, *arguments):
    """The exit code, where the run leaves these results, or none."""

    def run(_up, _report):
        folder.mkdir()
        if results:
            (folder / "eval_results.json").write_text(json.dumps(results))
        return 0

    monkeypatch.setattr(Up, "run", run)
    return evaluate(
        "--model", str(folder.parent), "--dataset", "held-out.jsonl", "--generations", "4",
        "--temperature", "1", *arguments,
    )  # fmt: skip


def test_the_figures_are_printed(folder, monkeypatch, capsys):
    assert asked(folder, monkeypatch, {"step": 0, "eval/pass@1": 0.25}) == 0
    assert os.environ["LEARNER_EVAL_NUM_GENERATIONS"] == "4"
    assert os.environ["LEARNER_EVALUATE_ONLY"] == "true"
    assert os.environ["LEARNER_RESUME"] == "auto", "a run's settings may name a checkpoint"
    said = capsys.readouterr().out
    assert "pass@1                                0.2500" in said
    assert f"penstock samples {folder} --evaluations" in said


def test_the_figures_are_printed_as_json(folder, monkeypatch, capsys):
    assert asked(folder, monkeypatch, {"step": 0, "eval/pass@1": 0.25}, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"pass@1": 0.25}


def test_one_that_was_told_to_stop_has_none_and_says_so(folder, monkeypatch, capsys):
    assert asked(folder, monkeypatch, None) == 1
    assert "Stopped before all answers were there" in capsys.readouterr().out


def test_a_run_that_is_there_is_not_touched(folder, monkeypatch):
    (folder / "journal").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists already: choose another --name"):
        asked(folder, monkeypatch, None)


def test_without_questions_nothing_is_started(folder):
    with pytest.raises(ConfigError, match="--dataset is missing: name the questions"):
        evaluate("--model", str(folder.parent))


def test_other_rewards_take_no_weights_of_the_training_run(folder, monkeypatch, tmp_path):
    env = tmp_path / "run.env"
    env.write_text(
        "LEARNER_REWARDS=accuracy,format\nLEARNER_REWARD_WEIGHTS=1,2\nLEARNER_EVAL_DATASET=a.jsonl\n"
        "LEARNER_METRIC_FOR_BEST_MODEL=eval/reward/format/mean\n"
    )
    monkeypatch.setattr(Up, "run", lambda *_: 3)
    assert evaluate("--model", str(tmp_path), "--env-file", str(env), "--rewards", "accuracy") == 3


@pytest.mark.parametrize("text", ["{", "[1]", '{"step": 1, "eval/avg@1": "x"}'])
def test_damaged_results_are_named(tmp_path, text):
    path = tmp_path / "eval_results.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"eval_results\.json: damaged"):
        read_results(path)


PROMPT, COMPLETION = "LEARNER_MAX_PROMPT_LENGTH", "LEARNER_MAX_COMPLETION_LENGTH"


@pytest.mark.parametrize(
    ("context", "given", "fitting"),
    [
        (128, {}, {PROMPT: 64, COMPLETION: 64}),
        (1023, {}, {PROMPT: 511, COMPLETION: 511}),
        (1024, {}, {}),
        (32768, {}, {}),
        (128, {PROMPT: 100}, {COMPLETION: 28}),
        (128, {COMPLETION: 100}, {PROMPT: 28}),
        (1000, {PROMPT: 100}, {}),
        (1000, {PROMPT: 100, COMPLETION: 2000}, {}),
        (128, {PROMPT: 128}, {}),  # which the learner refuses
        (128, {PROMPT: "many"}, {}),
        (None, {}, {}),
    ],
)
def test_lengths_that_are_not_set_fit_the_model(tmp_path, context, given, fitting):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    variables = {name: str(value) for name, value in given.items()}
    assert fitting_lengths({"LEARNER_MODEL": str(tmp_path), **variables}) == fitting


@pytest.mark.parametrize("text", [None, "{", "[]", '{"max_position_embeddings": "x"}'])
def test_a_model_that_cannot_be_read_is_left_to_the_learner(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    assert fitting_lengths({"LEARNER_MODEL": str(tmp_path)}) == {}


def test_a_context_may_be_that_of_the_language_model_within(tmp_path):
    config = {"text_config": {"max_position_embeddings": 300}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_of(str(tmp_path), None) == 300


def test_a_small_model_is_evaluated_without_a_training_set(folder, monkeypatch, tmp_path, capsys):
    """The settings of a training run, whose data are elsewhere, are the variables."""
    model = make_model(tmp_path / "model")
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    os.environ.update({
        "LEARNER_DATASET": "not/here.jsonl,nor/here.jsonl", "LEARNER_DATASET_WEIGHTS": "1,2",
        "LEARNER_EVAL_HOLDOUT": "0.5", "LEARNER_DATASET_STREAMING": "true",
    })  # fmt: skip
    said = []
    monkeypatch.setattr(Up, "run", lambda *_: said.append(execute_command(Learner, "l", ["--dry-run"])))
    assert evaluate("--model", str(model), "--dataset", str(held_out)) == 1
    assert said == [0]
    printed = capsys.readouterr().out
    assert "LEARNER_MAX_PROMPT_LENGTH=64, LEARNER_MAX_COMPLETION_LENGTH=64" in printed
    assert "# held-out questions: 1\n" in printed
    assert "# steps: 0\n" in printed


def test_questions_may_be_held_out_of_the_training_set(folder, monkeypatch):
    os.environ.update({"LEARNER_DATASET": "sums.jsonl", "LEARNER_EVAL_HOLDOUT": "0.5"})
    monkeypatch.setattr(Up, "run", lambda *_: 3)
    assert evaluate("--model", str(folder.parent)) == 3
    assert os.environ["LEARNER_DATASET"] == "sums.jsonl"
    assert os.environ["LEARNER_EVAL_HOLDOUT"] == "0.5"
