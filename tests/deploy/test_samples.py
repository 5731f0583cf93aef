"""`penstock samples` shows what a run sampled, and nothing in a text commands the terminal."""

from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet

from penstock.common.config.command import load
from penstock.common.errors import ConfigError
from penstock.deploy.samples import Samples, select, shown

ROW = {
    "step": 1, "prompt": "1+1=", "completion": "2", "advantage": 0.5, "accuracy": 1.0, "reward": 1.0,
    "ticket": "train:0", "index": 0, "state": "trained", "failure": "", "completion_length": 2,
    "finish_reason": "stop", "staleness_mean": 0.0, "staleness_max": 0, "versions": "1.0:0-2",
    "actors": "",
    "solution": "2", "extra": "{}",
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "completions").mkdir()
    steps = {
        1: [
            ROW | {"completion": "good"},
            ROW | {"completion": "bad", "accuracy": 0.0, "reward": 0.0, "index": 1},
            ROW | {"completion": "cut", "reward": 0.5, "finish_reason": "length", "index": 2},
            ROW
            | {
                "completion": "same", "state": "filtered", "ticket": "train:1", "prompt": "hard?",
                "reward": 0.0, "failure": "no spread",
            },
            ROW | {"completion": "hung", "state": "failed", "failure": "took 30 s", "reward": None},
        ],
        2: [ROW | {"step": 2, "completion": "newer", "ticket": "train:2"}],
    }  # fmt: skip
    for step, rows in steps.items():
        path = tmp_path / "completions" / f"completions_{step:05d}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return tmp_path


def main(arguments):
    return load(Samples, "penstock samples", arguments).execute()


def told(capsys, run, *arguments):
    assert main([str(run), *arguments]) == 0
    return capsys.readouterr().out


def completions(text):
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("completion ")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["newer", "good", "bad", "cut", "same"]),
        (("--step", "1", "--count", "2"), ["good", "bad"]),
        (("--best",), ["newer", "good"]),  # one per group
        (("--worst",), ["bad", "newer"]),
        (("--truncated",), ["cut"]),
        (("--no-spread",), ["same"]),
        (("--failed",), ["hung"]),
        (("--compare", "1", "2"), ["good", "newer"]),
    ],
)
def test_what_is_asked_for_is_shown(run, capsys, arguments, expected):
    assert completions(told(capsys, run, *arguments)) == expected


def test_a_reason_is_shown(run, capsys):
    assert "why         took 30 s" in told(capsys, run, "--failed")


def test_difficulty_by_question(run, capsys):
    lines = told(capsys, run, "--difficulty").splitlines()
    assert lines[1].split() == ["0.000", "1", "1", "hard?"]
    assert lines[2].split() == ["0.750", "2", "0", "1+1="]


def test_json_holds_everything(run, capsys):
    rows = [json.loads(line) for line in told(capsys, run, "--json", "--best").splitlines()]
    assert rows[0]["completion"] == "newer"
    assert rows[0].keys() == ROW.keys()


def test_nothing_in_a_text_commands_the_terminal():
    assert shown("a\x1b[2J\rb\n\u202ec", 0) == "a\\x1b[2J\\rb\n            \\u202ec"
    assert shown("x" * 20, 5) == "xxxxx ... (15 more)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", "7"), "no completions of step 7: choose another from 1 to 2"),
        (("--evaluations",), "correct the folder, or wait for its learner"),
        (("--step", "2", "--truncated"), "none of 1 completions was cut at the longest length"),
    ],
)
def test_what_is_not_there_is_told(run, arguments, words):
    with pytest.raises(ConfigError, match=words):
        main([str(run), *arguments])


def test_a_folder_that_is_no_run_is_told(tmp_path):
    with pytest.raises(ConfigError, match="holds no completions"):
        main([str(tmp_path)])


def test_why_there_are_no_completions_is_told(tmp_path):
    (tmp_path / "evaluations.jsonl").touch()
    with pytest.raises(ConfigError, match="a run's folder, and has it a step yet"):
        main([str(tmp_path)])
    (tmp_path / "evaluations.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="nothing was trained yet; --evaluations shows"):
        main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="LEARNER_LOG_COMPLETIONS was off"):
        main([str(tmp_path)])


def test_answers_to_held_out_questions(run, capsys):
    rows = [
        {
            "step": step, "version": f"1.{step}", "questions": 1, "index": 0,
            "completions": [f"a{step}"], "answers": ["a"], "rewards": [{"accuracy": 1.0}],
            "lengths": [1], "finish_reasons": ["length"], "reason": "",
            "failures": [],
            "columns": {"prompt": "1+1=", "solution": "2"},
        }
        for step in (0, 5)
    ]  # fmt: skip
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = told(capsys, run, "--evaluations")
    assert "--- question 0, step 0" in text
    assert "answer      a5   (accuracy 1.0, 1 tokens, truncated)" in text
    assert "a0" not in told(capsys, run, "--evaluations", "--step", "5")
    rows[1] |= {"rewards": [{"accuracy": None}], "failures": ["it \x1b[2Jhung"]}
    rows.append({**rows[1], "index": 1, "completions": [], "reason": "dead of \x1b[2J"})
    torn = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "ver'
    (run / "evaluations.jsonl").write_text(torn)
    text = told(capsys, run, "--evaluations", "--step", "5")
    assert "not scored: it \\x1b[2Jhung" in text
    assert "no answer   dead of \\x1b[2J" in text


def test_difficulty_knows_a_question_by_what_a_filtered_group_keeps_of_it(run, capsys):
    long = "q" * 3000
    rows = [
        ROW | {"prompt": long, "ticket": "train:5"},
        ROW | {"prompt": long[:2000], "ticket": "train:6", "state": "filtered", "reward": 0.0},
    ]
    path = run / "completions" / "completions_00003.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (only,) = told(capsys, run, "--difficulty", "--step", "3", "--json").splitlines()
    found = json.loads(only)
    assert (found["mean_reward"], found["asked"], found["no_spread"]) == (0.5, 2, 1)


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_file_that_cannot_be_read_is_named(run, damage):
    path = run / "completions" / "completions_00002.parquet"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        parquet.write_table(pyarrow.Table.from_pylist([{"a": 1}]), path)
    with pytest.raises(ConfigError, match=r"completions_00002\.parquet"):
        main([str(run)])
    assert main([str(run), "--step", "1"]) == 0


@pytest.mark.parametrize("arguments", [("--count", "0"), ("--count", "-1"), ("--width", "-5")])
def test_a_number_that_makes_no_sense_is_refused(run, arguments):
    with pytest.raises(ConfigError, match=arguments[0]):
        main([str(run), *arguments])


@pytest.mark.parametrize(
    "changes", [{"advantage": "x"}, {"prompt": 7}, {"extra": "[1]"}, {"extra": "{"}]
)
def test_a_table_with_values_of_another_kind_is_named(run, changes):
    path = run / "completions" / "completions_00002.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([ROW | changes]), path)
    with pytest.raises(ConfigError, match=r"00002\.parquet: damaged"):
        main([str(run)])


def test_answers_are_called_right_where_the_learner_knows_it(run, capsys):
    row = {
        "step": 0, "version": "1.0", "questions": 1, "index": 0, "completions": ["a", "b", "c"],
        "answers": ["a"] * 3, "rewards": [{"own": 0.5}, {"own": 1.0}, {"own": None}],
        "lengths": [1] * 3, "finish_reasons": ["stop"] * 3, "reason": "", "failures": [],
        "right": [False, True, None], "columns": {"prompt": "1+1=", "solution": "2"},
    }  # fmt: skip
    (run / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    text = told(capsys, run, "--evaluations")
    assert "(wrong, own 0.5, 1 tokens)" in text
    assert "(right, own 1.0, 1 tokens)" in text
    assert "(own None, 1 tokens)" in text


def test_evaluations_of_another_form_are_named(run):
    row = {"step": 0, "index": 0, "columns": {}, "completions": [1], "reason": ""}
    (run / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"evaluations\.jsonl: damaged"):
        main([str(run), "--evaluations"])


def test_a_filtered_group_with_completions_that_failed_is_among_the_failed():
    reason = "no spread; 1 of 4 completions could not be scored, the first: reward own: TypeError"
    partly = ROW | {"state": "filtered", "failure": reason}
    rows = [ROW, ROW | {"state": "filtered", "failure": "no spread"}, partly]
    assert select(rows, "failed") == [partly]
