"""The demo's task and its report."""

from __future__ import annotations

import json

import pytest

from penstock.deploy.demo.report import accuracy_by_step, draw_curve
from penstock.deploy.demo.task import (
    TaskError,
    TaskFiles,
    check_task,
    operand_pair,
    read_problems,
    write_task,
)
from penstock.deploy.demo.tiny_llama import make_tokenizer


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> TaskFiles:
    return write_task(tmp_path_factory.mktemp("task"), seed=1)


def rewrite(task: TaskFiles, folder, **changes) -> TaskFiles:
    """The task with the rows of a split replaced."""
    paths = {}
    for split in ("pretrain", "train", "heldout"):
        path = folder / f"{split}.jsonl"
        text = getattr(task, split).read_text()
        path.write_text(changes[split](text) if split in changes else text)
        paths[split] = path
    return TaskFiles(**paths)


def test_the_same_seed_writes_the_same_task(task, tmp_path):
    again = write_task(tmp_path, seed=1)
    assert again.train.read_bytes() == task.train.read_bytes()
    assert write_task(tmp_path, seed=2).train.read_bytes() != task.train.read_bytes()


def test_no_operand_pair_of_the_held_out_questions_occurs_anywhere_else(task):
    def pairs(path):
        return {operand_pair(problem.question) for problem in read_problems(path)}

    heldout = pairs(task.heldout)
    assert len(heldout) >= 500
    assert not heldout & (pairs(task.pretrain) | pairs(task.train))


def test_every_label_is_right(task):
    for path in (task.pretrain, task.train, task.heldout):
        for problem in read_problems(path):
            left, right = problem.question.rstrip("=").split("+")
            assert int(left) + int(right) == int(problem.answer)


def test_a_wrong_label_is_found_and_told(task, tmp_path):
    def spoil(text: str) -> str:
        first, rest = text.split("\n", 1)
        row = json.loads(first)
        row["answer"] = str(int(row["answer"]) + 1)
        return json.dumps(row) + "\n" + rest

    with pytest.raises(TaskError, match="is labelled"):
        check_task(rewrite(task, tmp_path, pretrain=spoil))


def test_a_pair_in_two_splits_is_found_and_told(task, tmp_path):
    leak = task.heldout.read_text().splitlines()[0] + "\n"
    with pytest.raises(TaskError, match="occur in"):
        check_task(rewrite(task, tmp_path, train=lambda text: text + leak))


def test_the_tokenizer_reads_characters_and_adds_nothing():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("37+45=")
    assert len(ids) == 6
    assert tokenizer.decode(tokenizer.encode("82")) == "82"


def test_the_curve_is_drawn_from_the_runs_own_rows(tmp_path):
    answers = [{"step": step, "rewards": [{"accuracy": float(step > 0)}]} for step in (0, 0, 5, 5)]
    accuracy = accuracy_by_step(answers)
    assert accuracy == {0: 0.0, 5: 1.0}
    draw_curve([{"step": 1, "reward": 0.5}], accuracy, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
