"""The whole learner with a policy that learns nothing, killed, stopped and started with changes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from penstock.common.broker.run_view import RunView
from penstock.common.errors import ConfigError, NoSignal, NotFinite, RunTaken
from penstock.common.failpoint import Armed, arm
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import read_chain
from penstock.common.wire import codec
from penstock.learner import loop
from penstock.learner.state import checkpoint
from penstock.learner.state.best_model import read_best
from penstock.learner.state.checkpoint import newest_checkpoint
from penstock.learner.streams.evaluation import Evaluator
from tests.judge import judge
from tests.learner.builders import claim_next
from tests.learner.whole import Killed


class Dying(Armed):
    """Dies by an exception, which nobody in the learner catches."""

    def pass_by(self, name: str) -> None:
        if name == self.name:
            raise Killed


@pytest.mark.parametrize("dies_in", [0, 1, 3])
def test_a_kill_in_an_update_loses_neither_groups_nor_evaluations(run, dies_in):
    with pytest.raises(Killed):
        run.start(steps=4, dies_in=dies_in)
    run.start(steps=4)
    assert run.evaluated() == [0, 4]
    run.check()


def test_a_start_with_no_step_left_says_so(run, capsys):
    run.start(steps=2)
    assert "nothing is trained now" not in capsys.readouterr().out
    run.start(steps=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "All 2 steps were made by an earlier start: nothing is trained now." in said
    assert "LEARNER_MAX_STEPS" in said
    run.check()


def test_what_was_filtered_is_still_shown_after_a_kill(run):
    run.worker.filtered = 3
    with pytest.raises(Killed):
        run.start(steps=6, dies_in=3)
    shown = run.sampled()
    assert {state for *_, state in shown} == {"trained", "filtered"}
    run.start(steps=6)
    assert run.sampled()[: len(shown)] == shown
    run.check()


def test_groups_without_spread_that_end_a_run_are_shown(run):
    run.worker.filtered = 1
    with pytest.raises(NoSignal):
        run.start(steps=2, max_resample_times=0, max_empty_updates=2)
    assert {(step, state) for step, _, state in run.sampled()} == {(1, "filtered")}


def test_a_kill_while_the_best_model_is_kept_loses_no_evaluation(run):
    arm(Dying("best.synced"))
    try:
        with pytest.raises(Killed):
            run.start(steps=2)
    finally:
        arm(None)
    assert run.evaluated() == []
    run.start(steps=2)
    assert run.evaluated() == [0, 2]
    assert read_best(run.run_folder)["step"] == 0
    assert json.loads((run.folder / "eval_results.json").read_text())["step"] == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"metric": "x", "value": 1.0}', "[" * 5000])
def test_a_damaged_note_of_the_best_model_is_named(tmp_path, text):
    (tmp_path / "best" / "00000001").mkdir(parents=True)
    (tmp_path / "best" / "00000001" / "best.json").write_text(text)
    with pytest.raises(ConfigError, match=r"best\.json: damaged"):
        read_best(RunFolder(tmp_path))


@pytest.mark.parametrize("release", ["the same release", "another"])
def test_a_stop_in_an_evaluation_keeps_the_answers_that_came(run, monkeypatch, release):
    stopping, take = threading.Event(), Evaluator._take

    def take_first(evaluator, ticket, payload):
        if evaluator._version.step < 2:
            take(evaluator, ticket, payload)
        elif ticket.number == 0:
            take(evaluator, ticket, payload)
            stopping.set()

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_take", take_first)
        run.start(steps=2, stopping=stopping)
    assert run.newest_checkpoint().step == 2
    assert run.evaluated() == [0]
    if release == "another":
        monkeypatch.setattr(codec, "SCHEMA", codec.SCHEMA + 1)
    run.start(steps=2)
    assert run.evaluated() == [0, 2]
    records = [record for _, record in read_chain(run.run_folder, claim_next(run.folder))]
    asked = [record["asked"] for record in records if record["kind"] == "evaluation"]
    assert asked == [[0, 1], [0, 1], [0, 1] if release == "another" else [1]]
    run.check()


def test_evaluations_and_checkpoints_come_as_often_as_asked(run):
    run.start(steps=5, eval_steps=2, save_steps=1, save_total_limit=3)
    assert run.evaluated() == [0, 2, 4, 5]
    kept = sorted(path.name for path in (run.folder / "checkpoints").glob("[0-9]*"))
    assert [int(name.rpartition("-")[2]) for name in kept] == [3, 4, 5]
    assert json.loads((run.folder / "eval_results.json").read_text())["step"] == 5
    results = json.loads((run.folder / "train_results.json").read_text())
    assert (results["step"], results["reward"]) == (5, 0.5)


def test_a_learner_killed_more_often_than_it_saves_makes_checkpoints_all_the_same(run):
    for dies_in, step in ((3, None), (6, 5)):  # the second one retrains four steps first
        with pytest.raises(Killed):
            run.start(steps=20, dies_in=dies_in, save_steps=4)
        newest = run.newest_checkpoint()
        assert (newest and newest.step) == step


def test_a_stop_after_retraining_saves_what_was_retrained(run):
    with pytest.raises(Killed):
        run.start(steps=9, dies_in=3)
    stopping = threading.Event()
    stopping.set()
    run.start(steps=9, stopping=stopping)
    assert run.newest_checkpoint().step == 4


def test_a_finished_run_started_again_just_ends(run):
    run.start(steps=2)
    run.start(steps=2)
    run.check()


def test_a_finished_run_goes_on_with_more_steps_and_larger_batches(run):
    run.start(steps=2)
    run.start(steps=5, groups_per_step=3)
    assert judge(run.folder)["steps"] == 5
    run.check()


def test_a_run_that_has_more_steps_than_asked_for_ends(run):
    run.start(steps=4)
    run.start(steps=3)
    assert RunView(run.connection, run.keys).ended()
    run.check()


def test_a_damaged_checkpoint_does_not_count_among_those_kept(run):
    run.start(steps=2, save_steps=1)
    newest = max((run.folder / "checkpoints").glob("[0-9]*"))
    (newest / "state.json").write_text("{")
    run.start(steps=3, save_steps=5)
    claim = claim_next(run.folder)
    kept = sorted((run.folder / "checkpoints").glob("[0-9]*"))
    assert len(kept) == 2
    for folder in reversed(kept):
        assert newest_checkpoint(LearnerFolder(run.folder, claim.incarnation), claim).folder == folder
        (folder / "manifest.json").unlink()


def test_updates_that_are_not_finite_are_kept_and_end_the_run_when_there_are_too_many(run):
    with pytest.raises(NotFinite, match="2 Updates in a row"):
        run.start(steps=6, skips=(1, 3, 4), max_nonfinite_steps=2)
    kept = sorted(path.name for path in (run.folder / "not_finite").iterdir())
    assert kept == ["00000001.msgpack", "00000003.msgpack", "00000004.msgpack"]
    run.start(steps=6)
    run.check()


def test_a_run_without_optimizer_state_in_its_checkpoints_goes_on(run):
    run.start(steps=2, save_steps=1, save_only_model=True)
    newest = run.newest_checkpoint()
    assert newest.bare_weights == newest.model
    run.start(steps=4, save_only_model=True)
    assert judge(run.folder)["steps"] == 4
    run.check()


@pytest.mark.parametrize(("module", "moment"), [(loop, "retrain_tail"), (checkpoint, "_find_damage")])
def test_a_learner_superseded_while_it_starts_changes_nothing_of_its_successors(
    run, monkeypatch, module, moment
):
    """It is stopped at `moment`, the successor makes the whole run, then it goes on."""
    run.start(steps=2, save_steps=1)
    original, files = getattr(module, moment), {}

    def succeed(*arguments, **others):
        if not files:
            monkeypatch.setattr(module, moment, original)
            run.start(steps=6, save_steps=2)
            files.update(contents(run.folder))
        return original(*arguments, **others)

    monkeypatch.setattr(module, moment, succeed)
    with pytest.raises(RunTaken, match="superseded"):
        run.start(steps=6, save_steps=2)
    assert contents(run.folder) == files
    run.check()


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
