"""The files a run leaves to read, whatever completions hold and whenever it was killed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pyarrow import parquet
from structlog.testing import capture_logs

from penstock.common.files.atomic import read_json_lines, read_row
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import ScoredGroup, Verdict, Version
from penstock.deploy.samples import as_lines, read_rows
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.metrics import group_metrics
from penstock.learner.report.recorder import Recorder
from penstock.learner.streams.evaluation import Answer, Evaluated
from penstock.learner.streams.intake import Arrivals
from tests.learner.builders import make_group, make_plan, make_settings


@pytest.fixture
def recorder(tmp_path):
    return Recorder(LearnerFolder(tmp_path, 1), [], "x")


def evaluated(step: int, *completions: str) -> Evaluated:
    answers = (
        Answer(index, (text,), (text,), ({},), (1,), ("stop",)) for index, text in enumerate(completions)
    )
    return Evaluated(Version(1, step), tuple(answers))


def test_a_resume_keeps_the_rows_up_to_its_step(recorder, tmp_path):
    for step in (1, 2, 3):
        recorder.metrics(step, {"reward": 0.5})
    recorder.cut_after(2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c"])
def test_line_separators_inside_a_completion_end_no_row(recorder, separator):
    recorder.evaluation(evaluated(0, f"a{separator}b"), [{}], {})
    recorder.cut_after(0)
    assert recorder.evaluated_steps() == {0}


def test_a_torn_row_hides_none_that_come_after_it(recorder, tmp_path):
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "ver')
    recorder.cut_after(0)
    recorder.evaluation(evaluated(4, "2"), [{}], {})
    assert recorder.evaluated_steps() == {4}


def test_half_an_evaluation_is_none(recorder, tmp_path):
    recorder.evaluation(evaluated(0, "1", "2"), [{}, {}], {})
    path = tmp_path / "evaluations.jsonl"
    path.write_text(path.read_text()[:-20])
    recorder.cut_after(0)
    assert recorder.evaluated_steps() == set()


def test_completions_are_tables_by_step_and_come_back_whole(recorder, tmp_path):
    settings = make_settings()
    plan = make_plan(settings)
    scored = make_group(plan.source.train(TicketId("train:0"), Version(1, 0)))
    batch = build_batch([scored], plan.reward_weights, 0, settings)
    filtered = Verdict(
        "train:1", "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (3, 3), {}, "1+1=", "3"
    )
    recorder.completions(1, lambda: completion_rows(1, [scored], [filtered], batch, plan.reward_weights))
    rows = parquet.read_table(RunFolder(tmp_path).completion_table(1)).to_pylist()
    assert [(row["ticket"], row["index"], row["state"]) for row in rows] == [
        ("train:0", 0, "trained"), ("train:0", 1, "trained"), ("train:1", 0, "filtered"),
    ]  # fmt: skip
    assert [row["accuracy"] for row in rows] == [1.0, 0.0, 0.0]
    assert rows[0]["advantage"] == -rows[1]["advantage"] > 0
    assert (rows[2]["prompt"], rows[2]["completion"]) == ("1+1=", "3")
    assert rows[0]["versions"] == "1.0:0-3"


def test_rows_and_metrics_name_the_actors_of_a_continued_rollout():
    settings = make_settings()
    plan = make_plan(settings)
    spans = [(0, 2), (1, 2), (1, 3)]  # the version changes, then the actor
    scored = make_group(plan.source.train(TicketId("train:0"), Version(1, 0)), spans=spans)
    one = scored.group.rollouts[0]
    first, second, third = one.spans
    named = (replace(first, actor="gone"), replace(second, actor="gone"), third)
    whole = replace(scored.group.rollouts[1], spans=(first, second, third))
    scored = replace(scored, group=replace(scored.group, rollouts=(replace(one, spans=named), whole)))
    batch = build_batch([scored], plan.reward_weights, 0, settings)
    rows = completion_rows(1, [scored], [], batch, plan.reward_weights)
    assert [row["actors"] for row in rows] == ["gone:0-4 actor:4-7", "actor:0-7"]
    metrics = group_metrics([scored], Arrivals(), plan.reward_weights)
    assert (metrics["continued/completions"], metrics["continued/tokens"]) == (1, 4)


VERDICTS = {
    "dead": Verdict("train:1", "dead", "failed"),
    "of an older contract": Verdict("train:1", "filtered", "no spread", {}, (3, 3)),
    "no reward applies": Verdict("train:1", "filtered", "none", {"accuracy": (None, None)}, (3, 5)),
    "one reward": Verdict("train:1", "filtered", "no spread", {"accuracy": (None, 1.0)}, (3, 5)),
    "without lengths": Verdict("train:1", "filtered", "no spread", {"accuracy": (None, 1.0)}),
    "largest": Verdict("train:1", "filtered", "x" * 2000, {"accuracy": (-1e9,)}, (2**31 - 1,)),
    "one completion": Verdict("train:1", "filtered", "no spread", {"accuracy": (1,)}, (1,)),
}


@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS)
def test_every_kind_of_verdict_and_of_column_can_be_shown(recorder, tmp_path, verdict):
    """Also beside each other in a step: of all kinds of values in one column of the table."""
    plan = make_plan(settings := make_settings())
    values = [1, "a", None, b"\xff", True, 2.5, {"a": [1, "b"]}, [None], 2**64 - 1, float("nan")]
    groups = []
    for number, value in enumerate(values):
        made = make_group(plan.source.train(TicketId(f"train:{number}"), Version(1, 0)))
        asked = replace(made.group.ticket, columns={"prompt": value, "solution": value, "a": value})
        made = replace(made, group=replace(made.group, ticket=asked), extra={"b": (value, "c")})
        groups.append(decode(encode(made), ScoredGroup))
    found = decode(encode(verdict), Verdict)
    group_metrics(groups, Arrivals(filtered=[found]), plan.reward_weights)
    batch = build_batch(groups, plan.reward_weights, 0, settings)
    with capture_logs() as logs:
        recorder.completions(1, lambda: completion_rows(1, groups, [found], batch, plan.reward_weights))
    assert logs == []
    assert len(read_rows(tmp_path)) == 2 * len(values) + bool(verdict.rewards)
    assert all(as_lines(row, 60) for row in read_rows(tmp_path))


def test_a_table_that_cannot_be_made_is_logged_and_the_run_goes_on(recorder, tmp_path):
    scored = make_group(make_plan(make_settings()).source.train(TicketId("train:0"), Version(1, 0)))
    for make_rows in (
        lambda: completion_rows(1, [scored], [], build_batch([], {}, 0, make_settings()), {}),
        lambda: [{"a": 1}, {"a": "text"}],
        lambda: [{"a": 2**70}],
    ):
        with capture_logs() as logs:
            recorder.completions(1, make_rows)
        assert [entry["log_level"] for entry in logs] == ["error"]
        assert logs[0]["file"].endswith("completions_00001.parquet")
    assert not RunFolder(tmp_path).completion_table(1).exists()


def test_what_rewards_logged_and_could_not_score_is_counted():
    settings = make_settings()
    plan = make_plan(settings)
    whole = make_group(plan.source.train(TicketId("train:0"), Version(1, 0)), rewards=(1.0, None))
    logged = replace(whole, metrics={"letters": 3.0}, failures=("", "it hung"))
    other = replace(
        make_group(plan.source.train(TicketId("train:1"), Version(1, 0))), metrics={"letters": 5.0}
    )
    metrics = group_metrics([logged, other], Arrivals(), plan.reward_weights)
    assert metrics["letters"] == 4.0
    assert metrics["rewards/unscored"] == 1
    assert metrics["rewards/accuracy/none"] == 0
    assert group_metrics([whole, other], Arrivals(), plan.reward_weights)["rewards/accuracy/none"] == 1


def test_extra_columns_that_are_no_json_are_kept_as_text():
    """A rewarder of ours sends none, but what is journalled is read again at every resume."""
    settings = make_settings()
    plan = make_plan(settings)
    scored = make_group(plan.source.train(TicketId("train:0"), Version(1, 0)))
    scored = replace(scored, extra={"raw": (b"1", {"2": b"3"})})
    batch = build_batch([scored], plan.reward_weights, 0, settings)
    rows = completion_rows(1, [scored], [], batch, plan.reward_weights)
    assert [json.loads(row["extra"])["raw"] for row in rows] == ["b'1'", {"2": "b'3'"}]


def test_groups_without_any_reward_leave_no_nan_behind():
    """A gold that cannot be read gives every rollout None; of one number there is no spread."""
    settings = make_settings()
    plan = make_plan(settings)
    none = make_group(plan.source.train(TicketId("train:0"), Version(1, 0)), rewards=(None, None))
    one = make_group(plan.source.train(TicketId("train:1"), Version(1, 0)), rewards=(0.5, None))
    both = make_group(plan.source.train(TicketId("train:2"), Version(1, 0)), rewards=(1.0, 0.0))
    metrics = group_metrics([none, one, both], Arrivals(dropped=[none]), plan.reward_weights)
    assert (metrics["reward"], metrics["trained/reward"]) == (0.5, 0.5)
    assert metrics["reward_std"] == pytest.approx(2**-0.5)
    assert metrics["frac_reward_zero_std"] == 0
    assert "dropped/reward" not in metrics
    assert "reward" not in group_metrics([none], Arrivals(), plan.reward_weights)


def test_a_reward_may_log_what_it_likes_but_not_the_step(recorder, tmp_path):
    recorder.metrics(3, {"step": 99.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3}


def test_a_torn_evaluation_is_gone_before_it_is_made_again(recorder, tmp_path):
    recorder.evaluation(evaluated(4, "1", "2"), [{}, {}], {})
    path = tmp_path / "evaluations.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0] + '{"st')
    recorder.cut_after(4)
    recorder.evaluation(evaluated(4, "1", "2"), [{}, {}], {})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1]


def test_the_final_figures_are_files(recorder, tmp_path):
    recorder.results("eval", {"step": 3, "eval/pass@1": 0.5})
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval/pass@1"] == 0.5


def test_a_damaged_row_takes_no_other_along(recorder, tmp_path):
    for step in (1, 2, 3):
        recorder.metrics(step, {"reward": 0.5})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 2', '"step: 2'))
    recorder.cut_after(3)
    assert [row["step"] for row in read_json_lines(path)] == [1, 3]


def test_the_time_of_each_step_is_recorded_by_what_the_learner_did(run):
    run.start(steps=3)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    phases = ("waiting_for_groups", "journalling_groups", "building_the_batch", "making_an_Update")
    for row in rows:
        found = [row[f"perf/learner/{phase}_s"] for phase in phases]
        assert all(seconds > 0 for seconds in found)
        assert all(row[f"perf/learner/{phase}_cpu_s"] >= 0 for phase in phases)
        assert row["perf/version_bytes"] == len("weights")
    assert "perf/learner/recording_the_step_s" in rows[1]


def test_a_resume_reads_no_more_of_a_long_run_than_its_end(recorder, tmp_path, monkeypatch):
    for step in range(300):
        recorder.metrics(step, {"reward": 0.5})
        recorder.evaluation(evaluated(step, "1", "2"), [{}, {}], {})
    half = (tmp_path / "evaluations.jsonl").read_bytes()[:-7]
    (tmp_path / "evaluations.jsonl").write_bytes(half)
    read = []
    monkeypatch.setattr(
        "penstock.learner.report.recorder.read_row",
        lambda line, **fields: read.append(line) or read_row(line, **fields),
    )
    recorder.cut_after(297)
    assert recorder.evaluated_steps() == {297, 298}
    assert len(read) < 20
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [*range(298)]
    assert len(read_json_lines(tmp_path / "evaluations.jsonl")) == 2 * 299
