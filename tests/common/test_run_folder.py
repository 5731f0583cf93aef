"""The paths of a run: fixed, because a run of an older version is resumed from them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.common.errors import DiskFull, RunTaken
from penstock.common.files.disk import Disk
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from tests.small_disk import Meanwhile

PATHS = {
    "learner_lock": "learner.lock",
    "up_lock": "up.lock",
    "device_locks": "device",
    "nonce": "nonce",
    "begun_from": "begun_from",
    "record": "run.json",
    "settings": "settings.env",
    "latest": "latest",
    "final": "final",
    "claims": "claims",
    "journal": "journal",
    "checkpoints": "checkpoints",
    "versions": "versions",
    "uploads": "uploads",
    "best": "best",
    "best_link": "best/model",
    "not_finite": "not_finite",
    "metrics": "metrics.jsonl",
    "evaluations": "evaluations.jsonl",
    "completions": "completions",
    "tensorboard": "tensorboard",
    "learning_curve": "learning_curve.png",
    "report": "report.html",
    "logs": "logs",
    "log": "log.txt",
    "replay": "replay",
    "server": "queue",
    "server_url": "queue/url",
    "server_configuration": "queue/server.conf",
    "server_users": "queue/users.acl",
    "server_log": "queue/server.log",
}


def test_every_path_is_where_earlier_versions_put_it() -> None:
    folder = RunFolder(Path("run"))
    found = {name: str(path) for name, path in vars(folder).items() if name != "path"}
    assert found == {name: f"run/{path}" for name, path in PATHS.items()}


def test_numbered_paths_are_where_earlier_versions_put_them() -> None:
    folder = RunFolder(Path("run"))
    assert [
        str(path)
        for path in (
            folder.claim(2), folder.segment(2, 900), folder.checkpoint(2, 40), folder.best_model(40),
            folder.completion_table(40), folder.results("eval"),
        )
    ] == [
        "run/claims/000002.json", "run/journal/000002-000000000900.journal",
        "run/checkpoints/000002-00000040", "run/best/00000040",
        "run/completions/completions_00040.parquet", "run/eval_results.json",
    ]  # fmt: skip
    assert folder.version(2, 40) == Path("run/versions/000002-00000040").absolute()


def test_the_newest_incarnation_is_read_from_the_names_of_the_claims(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_incarnation() == 0
    folder.claims.mkdir()
    for name in ("000001.json", "000012.json", "000013.4711"):
        (folder.claims / name).touch()
    (folder.claims / "13 copy.json").touch()
    assert folder.newest_incarnation() == 12


def claim(folder: RunFolder, incarnation: int) -> None:
    folder.claims.mkdir(exist_ok=True)
    folder.claim(incarnation).touch()


def test_a_superseded_learner_writes_nothing(tmp_path: Path) -> None:
    folder = LearnerFolder(tmp_path, 2)
    claim(folder, 2)
    folder.write_file(folder.metrics, b"mine")
    claim(folder, 3)
    writes: tuple[Callable[[], None], ...] = (
        lambda: folder.write_file(folder.metrics, b"late"),
        lambda: folder.write_folder("a checkpoint", folder.checkpoint(2, 1), lambda _aside: None),
        folder.remove_asides,
    )
    for write in writes:
        with pytest.raises(RunTaken, match="incarnation 3 of the learner holds the run's folder"):
            write()
    assert folder.metrics.read_bytes() == b"mine"
    assert not folder.checkpoints.exists()


def test_a_learner_superseded_while_it_waits_for_room_writes_nothing(tmp_path: Path) -> None:
    stopping = Meanwhile(lambda: claim(folder, 3))
    folder = LearnerFolder(tmp_path, 2, Disk(600, stopping))
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(RunTaken, match="superseded"):
        folder.write("the record", folder.metrics, fail, None)
    assert (stopping.waits, len(attempts)) == (1, 1)


def test_a_folder_is_retried_when_there_is_room_for_the_newest_beside_it(tmp_path: Path) -> None:
    folder = LearnerFolder(tmp_path, 1)
    folder.write_folder("a version", folder.version(1, 0), lambda aside: fill(aside, 7))
    with pytest.raises(DiskFull, match="needed bytes 7"):
        folder.write_folder("a version", folder.version(1, 1), run_out)
    assert [path.name for path in folder.versions.iterdir()] == ["000001-00000000"]


def test_a_write_that_must_not_wait_raises_at_once(tmp_path: Path) -> None:
    stopping = Meanwhile(lambda: None)
    folder = LearnerFolder(tmp_path, 1, Disk(600, stopping))
    with pytest.raises(DiskFull):
        folder.write_folder("a checkpoint", folder.checkpoint(1, 1), run_out, waits=False)
    assert stopping.waits == 0


def fill(aside: Path, size: int) -> None:
    (aside / "file").write_bytes(bytes(size))


def run_out(_aside: Path) -> None:
    raise OSError(errno.ENOSPC, "full")
