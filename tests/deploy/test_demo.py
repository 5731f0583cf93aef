"""The demo's task and its report."""

from __future__ import annotations

import json
import os
import signal

import pyarrow
import pytest
from pyarrow import parquet

from penstock.common.config.command import drop_output
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor.snapshot import Audit
from penstock.deploy.child import Report
from penstock.deploy.demo.report import (
    WIDTH,
    print_answers,
    print_audit,
    print_table,
    right_by_step,
    trained_twice,
    verdict,
)
from penstock.deploy.demo.run import Demo, DemoFailed, DemoStopped, Progress, _train, announce
from penstock.deploy.demo.task import (
    TaskError,
    TaskFiles,
    check_task,
    operand_pair,
    read_problems,
    write_task,
)
from penstock.deploy.demo.tiny_llama import make_tokenizer
from penstock.deploy.report.picture import draw_curve
from penstock.deploy.up import Up


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


def answer(step: int, index: int, text: str, accuracy: float) -> dict:
    columns = {"question": f"{index}0+45=", "answer": f"{index}55"}
    return {
        "step": step, "index": index, "completions": [text], "rewards": [{"accuracy": accuracy}],
        "columns": columns,
    }  # fmt: skip


ANSWERS = [answer(step, index, f"{index}5{step}", float(step == 5 or not index)) for step in (0, 5)
           for index in range(10)]  # fmt: skip
METRICS = [
    {
        "step": step, "reward": 0.41 + step / 100, "entropy": 0.5, "groups/filtered": 12,
        "sample/staleness_mean": 0.93, "sampling/sampling_logp_difference/mean": 1.3e-7,
    }
    for step in range(1, 6)
]  # fmt: skip
AUDIT = Audit("demo", 7_001, {"trained": 320, "filtered": 81, "stale": 0, "evaluated": 6_600}, 0, ())


def assert_readable(out: str) -> None:
    """A screen of WIDTH columns shows every line whole, and no line warns."""
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "warning" not in out.lower()


def test_the_report_says_what_each_figure_means_on_one_screens_width(capsys):
    right = right_by_step(ANSWERS)
    print_table(METRICS, right)
    print_answers(ANSWERS)
    print_audit(AUDIT, 0)
    print(verdict(right))
    out = capsys.readouterr().out
    assert_readable(out)
    assert "held-out sums solved       10.0%  100.0%" in out
    assert "00+45= 055              050  right              055  right" in out
    assert "10+45= 155              150  wrong              155  right" in out
    assert len([line for line in out.splitlines() if "+45=" in line]) == 8
    assert "7001 groups: 320 trained, 81 filtered, 6600 evaluated, 0 in flight; 0 lost, 0 twice" in out
    assert "of 10 held-out sums the model solved 1 before training and 10 after (+90.0 points)" in out


def test_the_audit_counts_what_is_lost_and_what_is_there_twice(capsys, tmp_path):
    (tmp_path / "completions").mkdir()
    row = {
        "prompt": "1+1=", "completion": "2", "advantage": 0.5, "accuracy": 1.0, "reward": 1.0,
        "state": "trained", "failure": "", "completion_length": 2, "finish_reason": "stop",
        "staleness_mean": 0.0, "staleness_max": 0, "versions": "1.0:0-2", "actors": "",
        "solution": "2", "extra": "{}",
    }  # fmt: skip
    for step, tickets in ((1, ["train:0", "train:1"]), (2, ["train:1", "train:2"])):
        rows = [row | {"step": step, "ticket": ticket, "index": i} for ticket in tickets for i in (0, 1)]
        path = tmp_path / "completions" / f"completions_{step:05d}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert trained_twice(tmp_path) == 1
    print_audit(Audit("demo", 6, {"trained": 4}, 0, ()), 1)
    out = capsys.readouterr().out
    assert "2 lost, 1 twice" in out
    assert "Fault: 6 tickets were issued, but 4 ended and 0 are in flight: 2 missing." in out


def test_progress_shows_the_runs_own_figures_and_no_line_of_other_libraries(capsys, tmp_path):
    run = RunFolder(tmp_path)
    announce(5, run.log.relative_to(tmp_path))
    with run.log.open("w") as log:
        progress = Progress(run, 5, log)
        progress(Report("actor.1", "output", "WARNING 11-22 vllm: " + "x" * 200))
        run.results("eval").write_text(json.dumps({"step": 0, "eval/rewards/accuracy/mean": 0.387}))
        progress(Report("learner.1", "output", "08:41:02 [warning  ] The learner waits for groups."))
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in METRICS) + '{"step": 6, "rew')
        progress(Report("learner.1", "output", "08:41:09 [info     ] step 5/5"))
        progress(Report("actor.1", "ended", "Killed by SIGKILL after 3.1 s. " + "y" * 200))
        progress(Report("rewarder.1", "ended", "Ended with exit code 0."))
    out = capsys.readouterr().out
    assert_readable(out)
    shown = [line.split(" s  ", 1)[1] for line in out.splitlines() if " s  " in line]
    assert shown[0] == "before training: 38.7% of the held-out sums solved"
    assert shown[1] == "step   1 of 5   reward 0.42   staleness 0.93   entropy 0.50"
    assert shown[2].startswith("step   5 of 5")
    assert shown[3].startswith("actor.1: Killed by SIGKILL")
    assert len(shown) == 4
    assert "actor.1 | WARNING" in run.log.read_text()


def test_a_demo_that_nobody_reads_ends_its_run(monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    stops: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: stops.append(number))
    try:
        with os.fdopen(writer, "w") as unread, (tmp_path / "log").open("w") as log:
            monkeypatch.setattr("sys.stdout", unread)
            progress = Progress(RunFolder(tmp_path), 5, log)
            progress(Report("actor.1", "ended", "Killed by SIGKILL."))
            monkeypatch.undo()
            drop_output(unread)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stops, progress.unread) == ([signal.SIGINT], True)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (0, DemoStopped, "was stopped before its last step"),
        (1, DemoFailed, "exit code 1. The end of its log"),
    ],
)
def test_a_demo_that_is_stopped_has_not_failed(code, error, words, task, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(Up, "run", lambda *_, **__: code)
    with pytest.raises(error, match=words):
        _train(tmp_path, tmp_path, task, Demo.model_construct(seed=1, steps=1, plain=True))


def test_the_curve_is_drawn_from_the_runs_own_rows(tmp_path):
    right = right_by_step(ANSWERS)
    assert {step: sum(found) for step, found in right.items()} == {0: 1, 5: 10}
    heldout = {step: sum(found) / len(found) for step, found in right.items()}
    draw_curve({1: 0.5}, heldout, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
