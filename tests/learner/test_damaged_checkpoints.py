"""Every file of a checkpoint, damaged in every way: noticed, said, and the one before it is used."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.common.errors import DiskFailed
from penstock.learner.state import checkpoint as module
from tests.learner.trained import Run, same, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = (
    "manifest.json", "state.json", "model/config.json", "model/generation_config.json",
    "model/model.safetensors", "model/tokenizer.json", "model/tokenizer_config.json",
    "trainer/trainer/mp_rank_00_model_states.pt",
)  # fmt: skip


def flip(place: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    """Leave this share of the file."""
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * (path.stat().st_size - 1))])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first bit flipped": flip(0),
    "bit in the middle flipped": flip(0.5),
    "last bit flipped": flip(1),
    "last byte cut off": cut(1),
    "torn in the middle": cut(0.5),
    "empty": cut(0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": Path.unlink,
}


@pytest.fixture
def run(tmp_path, model_folder):
    run = Run(tmp_path, model_folder)
    run.checkpoint(1, run.step(0))
    return run


def test_the_table_names_every_file_of_a_checkpoint(run):
    folder = run.checkpoint(2, run.step(1)).folder
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == set(FILES)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_the_one_before_is_used_and_the_weights_are_those_of_a_whole_run(
    run, model_folder, name, damage
):
    newest = run.checkpoint(2, run.step(1)).folder
    run.step(2)
    DAMAGE[damage](newest / name)
    with capture_logs() as logs:
        past, policy = run.resume(model_folder)
    (error,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert error["folder"] == str(newest)
    assert error["problem"]
    assert (past.step, past.retrained) == (3, 2)
    assert same(weights_of(policy), weights_of(run.policy))


def test_a_disk_that_broke_leaves_a_checkpoint_where_it_is(run, model_folder, monkeypatch):
    newest = run.checkpoint(2, run.step(1)).folder

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")  # without a name, as of a read

    with monkeypatch.context() as broken:
        broken.setattr(module, "has_hash", fail)
        with pytest.raises(DiskFailed, match=f"{newest} cannot be read.*If only this folder"):
            run.resume(model_folder)
    past, _ = run.resume(model_folder)
    assert (past.step, past.retrained) == (2, 0)


def test_an_old_checkpoint_that_cannot_be_read_keeps_no_new_one_from_being_written(run, monkeypatch):
    old = run.checkpoint(2, run.step(1)).folder

    def fail(path, *_):
        if old in path.parents:
            raise OSError(errno.EIO, "Input/output error")
        return True

    monkeypatch.setattr(module, "has_hash", fail)
    assert run.checkpoint(3, run.step(2)).step == 3
    assert old.is_dir()


def test_without_damage_the_newest_is_used(run, model_folder):
    run.checkpoint(2, run.step(1))
    run.step(2)
    past, policy = run.resume(model_folder)
    assert (past.step, past.retrained) == (3, 1)
    assert same(weights_of(policy), weights_of(run.policy))


def test_when_none_is_whole_the_journal_makes_up_for_all(run, model_folder):
    for checkpoint in (
        run.checkpoint(2, run.step(1)).folder,
        run.folder / "checkpoints/000001-00000001",
    ):
        (checkpoint / "state.json").write_bytes(b"")
    past, policy = run.resume(model_folder)
    assert (past.step, past.retrained) == (2, 2)
    assert same(weights_of(policy), weights_of(run.policy))


def test_a_place_in_the_journal_that_was_flipped_is_not_gone_on_from(run, model_folder):
    """It is valid JSON, and would have the journal read from the middle of a record."""
    newest = run.checkpoint(2, run.step(1))
    path = newest.folder / "state.json"
    place = f'"offset": {newest.position.offset}'
    wrong = f'"offset": {newest.position.offset - 1}'
    assert place in path.read_text()
    path.write_text(path.read_text().replace(place, wrong))
    run.step(2)
    past, policy = run.resume(model_folder)
    assert (past.step, past.retrained) == (3, 2)
    assert same(weights_of(policy), weights_of(run.policy))
    assert run.newest_checkpoint().step == 1
