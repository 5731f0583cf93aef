"""`penstock evaluate`: what it asks for, prints and refuses, around a run that is not made here."""

from __future__ import annotations

import json
import os

import pytest

from penstock.common.config.command import load
from penstock.common.errors import ConfigError
from penstock.deploy.evaluate import Evaluate, read_results
from penstock.deploy.up import Up


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
        "--model", "m", "--dataset", "held-out.jsonl", "--generations", "4", "--temperature", "1",
        *arguments,
    )  # fmt: skip


def test_the_figures_are_printed(folder, monkeypatch, capsys):
    assert asked(folder, monkeypatch, {"step": 0, "eval/pass@1": 0.25}) == 0
    assert os.environ["LEARNER_EVAL_NUM_GENERATIONS"] == "4"
    assert os.environ["LEARNER_EVALUATE_ONLY"] == "true"
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
    with pytest.raises(ConfigError, match="LEARNER_EVAL_DATASET"):
        evaluate("--model", "m")


@pytest.mark.parametrize("text", ["{", "[1]", '{"step": 1, "eval/avg@1": "x"}'])
def test_damaged_results_are_named(tmp_path, text):
    path = tmp_path / "eval_results.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"eval_results\.json: damaged"):
        read_results(path)
