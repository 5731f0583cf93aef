"""Reading questions: what is wrong is named by line and column."""

from __future__ import annotations

import json

import numpy as np
import pytest

from common.errors import DataError
from common.messages import Version
from learner.dataset import load_questions, map_columns
from learner.plan import count_steps
from learner.tickets import TicketSource
from tests.learner.builders import make_plan, make_settings


class CharTokenizer:
    chat_template = None

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})()


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def load(source, **settings):
    return load_questions(source, "train", make_settings(**settings), CharTokenizer())


ROW = json.dumps({"question": "1+1=", "answer": "2"})


def test_columns_are_recognised_and_the_rest_rides_along(tmp_path):
    row = json.dumps({"question": "1+1=", "answer": "2", "level": 3})
    questions, mapping = load(write(tmp_path / "q.jsonl", row))
    assert (mapping.prompt, mapping.solution) == ("question", "answer")
    assert questions[0].columns == {"answer": "2", "level": 3}
    assert questions[0].prompt_ids.tolist() == [ord(letter) for letter in "1+1="]


def test_an_unreadable_line_is_named_by_its_number(tmp_path):
    with pytest.raises(DataError, match="line 3: not readable as JSON"):
        load(write(tmp_path / "q.jsonl", ROW, ROW, '{"question": "1+'))


def test_a_line_that_lacks_a_column_is_named(tmp_path):
    with pytest.raises(DataError, match="line 2: lacks answer"):
        load(write(tmp_path / "q.jsonl", ROW, '{"question": "1+1="}'))


def test_a_missing_column_is_told_with_those_that_are_there(tmp_path):
    source = write(tmp_path / "q.jsonl", ROW)
    with pytest.raises(DataError, match=r"column 'task' is missing; it has question, answer"):
        load(source, prompt_column="task")
    with pytest.raises(DataError, match="none of the columns prompt, question"):
        map_columns(["text", "answer"], source, make_settings())


def test_a_missing_or_empty_file_is_told(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(DataError, match="is empty"):
        load(write(tmp_path / "q.jsonl"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": None, "answer": "2"}, "row 2: question is None"),
        ({"question": " ", "answer": "2"}, "row 2: question is ' '"),
        ({"question": "1+1=", "answer": None}, "row 2: answer is null"),
    ],
)
def test_a_row_without_question_or_answer_is_named(tmp_path, row, words):
    with pytest.raises(DataError, match=words):
        load(write(tmp_path / "q.jsonl", ROW, json.dumps(row)))


def test_prompts_over_the_limit_are_left_out(tmp_path):
    long = json.dumps({"question": "1" * 30, "answer": "2"})
    questions, _ = load(write(tmp_path / "q.jsonl", ROW, long), max_prompt_length=10)
    assert len(questions) == 1


def test_a_ticket_made_again_is_the_same_ticket():
    source = make_plan(make_settings()).source
    first, again = (source.train("train:17", Version(1, 0)) for _ in range(2))
    assert first.columns == again.columns
    assert first.sampling == again.sampling
    assert np.array_equal(first.prompt_ids, again.prompt_ids)


def test_an_epoch_asks_every_question_once_and_the_next_in_another_order():
    plan = make_plan(make_settings())
    source: TicketSource = plan.source
    size = len(source.questions)
    epochs = [
        [source.train(f"train:{e * size + i}", Version(1, 0)).columns["answer"] for i in range(size)]
        for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(str(n) for n in range(size))
    assert epochs[0] != epochs[1]


def test_a_ticket_is_not_sampled_by_a_version_older_than_itself():
    assert make_plan(make_settings()).source.train("train:0", Version(1, 4)).min_step == 4


def test_steps_are_counted_by_epochs_unless_given():
    assert count_steps(make_settings(groups_per_step=4, num_train_epochs=2), 10) == 5
    assert count_steps(make_settings(max_steps=7), 10) == 7
