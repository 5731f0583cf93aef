"""The files a run leaves to read, whatever completions hold and whenever it was killed."""

from __future__ import annotations

import json

import pytest

from common.messages import Version
from learner.evaluation import Answer, Evaluated
from learner.record import Recorder


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path, [], "x")


def evaluated(step: int, *completions: str) -> Evaluated:
    answers = (Answer(index, text, 1, "stop", {}) for index, text in enumerate(completions))
    return Evaluated(Version(1, step), tuple(answers))


def test_a_resume_keeps_the_rows_up_to_its_step(recorder, tmp_path):
    for step in (1, 2, 3):
        recorder.metrics(step, {"reward": 0.5})
    recorder.cut_after(2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c"])
def test_line_separators_inside_a_completion_end_no_row(recorder, separator):
    recorder.evaluation(evaluated(0, f"a{separator}b"), [{}])
    recorder.cut_after(0)
    assert recorder.evaluated_steps() == {0}


def test_a_torn_row_hides_none_that_come_after_it(recorder, tmp_path):
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "ver')
    recorder.cut_after(0)
    recorder.evaluation(evaluated(4, "2"), [{}])
    assert recorder.evaluated_steps() == {4}


def test_half_an_evaluation_is_none(recorder, tmp_path):
    recorder.evaluation(evaluated(0, "1", "2"), [{}, {}])
    path = tmp_path / "evaluations.jsonl"
    path.write_text(path.read_text()[:-20])
    recorder.cut_after(0)
    assert recorder.evaluated_steps() == set()
