"""LEARNER_JOURNAL_RETENTION: what of the journal, and which checkpoints, are kept."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.common.errors import ConfigError
from penstock.common.journal.segments import list_segments
from penstock.learner.replay import replay
from tests.learner.builders import claim_next
from tests.learner.trained import Run, same, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(tmp_path, model_folder):
    """Every record in a file of its own."""
    return Run(tmp_path, model_folder, segment_bytes=1)


def train(trained: Run, steps: range, retention: str = "resume"):
    """One Update and one checkpoint per step; returns the positions."""
    positions = []
    for step in steps:
        positions.append(trained.step(step))
        trained.checkpoint(step + 1, positions[-1], journal_retention=retention)
    return positions


def starts(trained: Run, incarnation: int = 1) -> list[int]:
    return [segment.start for segment in list_segments(trained.run_folder, incarnation)]


def kept(trained: Run) -> list[str]:
    return sorted(path.name for path in (trained.folder / "checkpoints").glob("[0-9]*"))


def test_all_keeps_all(trained):
    positions = train(trained, range(5), "all")
    assert starts(trained) == [0, *(position.offset for position in positions[:-1])]


def test_with_one_checkpoint_nothing_is_deleted(trained):
    trained.step(0)
    train(trained, range(1, 2))
    assert len(starts(trained)) == 2


def test_resume_keeps_what_comes_after_the_older_checkpoint(trained):
    positions = train(trained, range(5))
    assert kept(trained) == ["000001-00000004", "000001-00000005"]
    assert starts(trained) == [positions[3].offset]


@pytest.mark.parametrize(("damaged", "retrained"), [(0, 2), (1, 3)])
def test_a_trimmed_run_resumes_from_either_checkpoint_bit_for_bit(
    trained, model_folder, damaged, retrained
):
    train(trained, range(5))
    for step in (5, 6):
        trained.step(step)
    for name in kept(trained)[::-1][:damaged]:
        (trained.folder / "checkpoints" / name / "manifest.json").unlink()
    past, policy = trained.resume(model_folder)
    assert (past.step, past.retrained) == (7, retrained)
    assert same(weights_of(policy), weights_of(trained.policy))


def test_a_damaged_older_checkpoint_keeps_the_journal(trained):
    train(trained, range(2), "all")
    older = trained.folder / "checkpoints" / "000001-00000002" / "model" / "config.json"
    before = starts(trained)
    older.write_bytes(b"")
    with capture_logs() as logs:
        train(trained, range(2, 3))
    (entry,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert entry["folder"] == str(older.parents[1])
    assert starts(trained)[: len(before)] == before


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_not_deleted_before_newer_ones_replace_it(trained, name):
    train(trained, range(2), "all")
    damaged = trained.folder / "checkpoints" / "000001-00000002"
    (damaged / name).write_bytes(b"")
    with capture_logs() as logs:
        train(trained, range(2, 3), "all")
    assert kept(trained) == ["000001-00000001", "000001-00000002", "000001-00000003"]
    (entry,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert entry["folder"] == str(damaged)
    train(trained, range(3, 4), "all")
    assert kept(trained) == ["000001-00000003", "000001-00000004"]


def test_where_all_older_checkpoints_are_damaged_none_is_deleted(trained):
    train(trained, range(2), "all")
    for name in kept(trained):
        (trained.folder / "checkpoints" / name / "state.json").write_bytes(b"")
    train(trained, range(2, 3), "all")
    assert len(kept(trained)) == 3
    train(trained, range(3, 4), "all")
    assert kept(trained) == ["000001-00000003", "000001-00000004"]


def test_older_incarnations_go_too_and_only_when_both_checkpoints_are_past_them(trained, model_folder):
    train(trained, range(3))
    successor = Run(trained.folder, model_folder, segment_bytes=1)
    successor.policy = trained.policy
    train(successor, range(3, 4))
    assert starts(trained) != []
    train(successor, range(4, 5))
    assert starts(trained) == []
    _, policy = successor.resume(model_folder)
    assert same(weights_of(policy), weights_of(trained.policy))


def test_a_superseded_learner_deletes_nothing(trained):
    train(trained, range(3), "all")
    before = kept(trained), starts(trained)
    claim_next(trained.folder)
    position = trained.step(3)
    zombie = trained.checkpoint(4, position, checked=False, journal_retention="resume")
    assert (sorted({*kept(trained)} - {zombie.folder.name}), starts(trained)[:-1]) == before


def test_a_superseded_learners_checkpoint_does_not_count_among_those_kept(trained, model_folder):
    train(trained, range(2), "all")
    successor = Run(trained.folder, model_folder, segment_bytes=1)
    for step in (2, 3):
        trained.checkpoint(step + 1, trained.step(step), checked=False)  # the zombie's, off the chain
    successor.policy.load(trained.folder / "checkpoints" / "000001-00000002" / "trainer")
    train(successor, range(2, 3))
    assert kept(successor) == ["000001-00000002", "000002-00000003"]


def test_a_trimmed_run_cannot_be_replayed_and_says_what_is_missing(trained, tmp_path):
    positions = train(trained, range(4))
    with pytest.raises(ConfigError, match="LEARNER_JOURNAL_RETENTION=all") as raised:
        replay(trained.folder, tmp_path / "out", {})
    assert "needed from offset 0" in str(raised.value)
    assert f"begins at offset {positions[2].offset}" in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_damaged_journal_is_not_replayed_as_if_it_were_shorter(trained, tmp_path):
    train(trained, range(3), "all")
    path = list_segments(trained.run_folder, 1)[1].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{path.name}: damaged or cut off at byte 0"):
        replay(trained.folder, tmp_path / "out", {})


def test_a_whole_learner_that_trims_its_journal_is_resumed(run):
    settings = {"save_steps": 1, "journal_segment_mib": 0.002, "journal_retention": "resume"}
    run.start(steps=6, **settings)
    (first, *_) = list_segments(run.run_folder, 1)
    assert first.start > 0
    newest = max((run.folder / "checkpoints").glob("[0-9]*"))
    (newest / "manifest.json").unlink()
    run.start(steps=9, **settings)
    rows = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 9
    assert run.newest_checkpoint().step == 9
