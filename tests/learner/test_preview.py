"""The lines of `learner --dry-run --json`: the plan, rows as the model gets them, every gold answer."""

from __future__ import annotations

import json

import pytest

from penstock.common.config.command import build, execute_command
from penstock.common.config.role_command import LearnerCommand
from penstock.common.progress import with_progress
from penstock.learner.__main__ import Learner
from penstock.learner.data.plan import make_plan
from penstock.learner.report.run_record import describe_start
from tests.e2e.site import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def site(model, tmp_path, monkeypatch):
    """A folder with variables of a small run; the data set is `rows.jsonl`."""
    variables = {
        "LEARNER_MODEL": model, "LEARNER_DATASET": tmp_path / "rows.jsonl",
        "LEARNER_MAX_PROMPT_LENGTH": 20, "LEARNER_MAX_COMPLETION_LENGTH": 8,
        "LEARNER_GROUPS_PER_STEP": 1,
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def write(path, *golds):
    rows = ({"question": f"{n}+1=", "answer": gold, "raw": [n, None]} for n, gold in enumerate(golds))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(capsys, *flags):
    assert execute_command(Learner, "learner", ["--dry-run", "--json", *flags]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def golds_of(capsys):
    return [line["gold"][1] for line in lines_of(capsys)[1:]]


def test_the_lines_are_the_plan_some_rows_and_every_gold(site, capsys, monkeypatch):
    write(site / "rows.jsonl", "1", "2", "3", "4")
    monkeypatch.setenv("LEARNER_SYSTEM_PROMPT", "9=9")
    plan, *others = lines_of(capsys, "--rows", "2")
    assert plan["contract"]["figures"]["questions"] == 4
    assert [spec["name"] for spec in plan["contract"]["rewards"]] == ["accuracy"]
    place = f"{site / 'rows.jsonl'}, row"
    columns = {"question": "1+1=", "answer": "2", "raw": [1, None], "prompt": "1+1=", "solution": "2"}
    prompt = "9=9<pad>1+1="  # the tokenizer has no line end
    shown = {"where": f"{place} 2", "prompt": prompt, "tokens": 8, "columns": columns}
    assert others[1] == {"row": shown}
    assert others[2:] == [{"gold": [f"{place} {n}", str(n)]} for n in range(1, 5)]


def test_held_out_questions_are_there_and_each_question_once(site, capsys, monkeypatch):
    monkeypatch.setenv(
        "LEARNER_DATASET", f"{write(site / 'a.jsonl', *'012')},{write(site / 'b.jsonl', '8')}"
    )
    monkeypatch.setenv("LEARNER_DATASET_WEIGHTS", "1,5")
    monkeypatch.setenv("LEARNER_EVAL_DATASET", str(write(site / "held.jsonl", "9")))
    monkeypatch.setenv("LEARNER_EVAL_STEPS", "1")
    assert golds_of(capsys) == ["0", "1", "2", "8", "9"]


def test_a_run_that_only_evaluates_has_its_questions_once(site, capsys, monkeypatch):
    monkeypatch.delenv("LEARNER_DATASET")
    monkeypatch.setenv("LEARNER_EVAL_DATASET", str(write(site / "held.jsonl", "9")))
    monkeypatch.setenv("LEARNER_EVALUATE_ONLY", "true")
    assert golds_of(capsys) == ["9"]


def test_a_stream_is_read_to_its_limit(site, capsys, monkeypatch):
    monkeypatch.setattr("penstock.learner.data.preview.STREAM_ROWS", 2)
    monkeypatch.setenv("LEARNER_DATASET_STREAMING", "true")
    monkeypatch.setenv("LEARNER_DATASET_SHUFFLE", "false")
    monkeypatch.setenv("LEARNER_MAX_STEPS", "1")
    write(site / "rows.jsonl", *"01234")
    assert golds_of(capsys) == ["0", "1"]


def test_golds_come_only_if_a_built_in_reward_needs_them(site, capsys, monkeypatch):
    write(site / "rows.jsonl", "1")
    monkeypatch.setenv("LEARNER_REWARDS", "format")
    assert golds_of(capsys) == []


def test_a_long_loop_tells_how_far_it_is(capsys):
    assert list(with_progress("ab", "{x}.jsonl: rows read", 1200, every_s=1e-9)) == ["a", "b"]
    assert list(with_progress("a", "lines", every_s=1e-9)) == ["a"]
    said = capsys.readouterr().out
    assert "{x}.jsonl: rows read: 1 of 1,200." in said
    assert "lines: 0." in said


def test_another_run_of_the_name_is_refused_as_by_a_start(site, capsys, monkeypatch):
    monkeypatch.setenv("RUN_DIR", str(site / "runs"))
    write(site / "rows.jsonl", "1")
    assert golds_of(capsys) == ["1"]
    command = build(LearnerCommand, {})
    folder = command.run.folder
    folder.checkpoint(1, 5).mkdir(parents=True)
    folder.record.write_text(json.dumps(describe_start(command.learner, make_plan(command.learner))))
    assert golds_of(capsys) == ["1"]
    write(site / "rows.jsonl", "2")
    assert execute_command(Learner, "learner", ["--dry-run", "--json"]) == 78
    assert "another dataset" in capsys.readouterr().err
    monkeypatch.setenv("LEARNER_ACCEPT_CHANGED", "dataset")
    assert golds_of(capsys) == ["2"]
