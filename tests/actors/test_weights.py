"""Which weights an actor loads: the announced version's in the run's own folder, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from blake3 import blake3

from penstock.actors.engine import WeightsRejected, verify_weights
from penstock.actors.held_tickets import HeldTickets
from penstock.actors.weights.follower import WeightFollower
from penstock.common.broker.run_view import RunView
from penstock.common.wire.messages import Version, Weights
from tests.actors.conftest import Run
from tests.fake_engine import FakeEngine

EVIL = b"weights of somebody else"
EVIL_HASH = blake3(EVIL).hexdigest()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside of the run, with weights in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(EVIL)
    return folder


def follow(a_run: Run) -> tuple[FakeEngine, WeightFollower]:
    """An engine at version 1.0, and its follower."""
    engine = FakeEngine()
    view = RunView(a_run.connection, a_run.keys)
    a_run.announce(0)
    follower = WeightFollower(engine, view, HeldTickets(8), a_run.weight_source(), 60.0, 60.0)
    assert asyncio.run(follower.poll())
    return engine, follower


def elsewhere(a_run: Run, outside: Path) -> str:
    """No folder of that version in the run."""
    return EVIL_HASH


def of_the_real_version(a_run: Run, outside: Path) -> str:
    """The version is there, with other weights."""
    a_run.announce(1)
    return EVIL_HASH


def linked_folder(a_run: Run, outside: Path) -> str:
    """The version's folder is a link."""
    a_run.run_folder.version(1, 1).symlink_to(outside)
    return EVIL_HASH


def linked_file(a_run: Run, outside: Path) -> str:
    """The weights are a link."""
    a_run.run_folder.version(1, 1).mkdir()
    (a_run.run_folder.version(1, 1) / "model.safetensors").symlink_to(outside / "model.safetensors")
    return EVIL_HASH


def more_weights(a_run: Run, outside: Path) -> str:
    """Beside the announced weights are others, which an engine would load too."""
    a_run.announce(1)
    (a_run.run_folder.version(1, 1) / "model-2.safetensors").write_bytes(EVIL)
    return blake3(b"weights 1").hexdigest()


def pickled_weights(a_run: Run, outside: Path) -> str:
    """Beside the announced weights is a pickle."""
    a_run.announce(1)
    (a_run.run_folder.version(1, 1) / "pytorch_model.bin").write_bytes(EVIL)
    return blake3(b"weights 1").hexdigest()


@pytest.mark.parametrize(
    "prepare",
    [elsewhere, of_the_real_version, linked_folder, linked_file, more_weights, pickled_weights],
)
def test_weights_that_are_not_the_runs_own_are_refused_and_the_old_ones_stay(
    a_run: Run, outside: Path, prepare: Callable[[Run, Path], str]
) -> None:
    engine, follower = follow(a_run)
    digest = prepare(a_run, outside)
    a_run.queue.announce(Weights(Version(1, 1), str(outside), digest, ""))
    with structlog.testing.capture_logs() as logs:
        assert not asyncio.run(follower.poll())
        assert not asyncio.run(follower.poll())
    assert engine.taken == [Version(1, 0)]
    assert [log["event"] for log in logs] == ["Weights 1.1 are not loaded; the engine stays at 1.0."]
    assert str(a_run.run_folder.versions) in logs[0]["cause"]


def test_the_announced_path_does_not_matter(a_run: Run) -> None:
    engine, follower = follow(a_run)
    a_run.announce(1)
    digest = blake3(b"weights 1").hexdigest()
    a_run.queue.announce(Weights(Version(1, 1), "/another/mount/of/the/folder", digest, ""))
    assert asyncio.run(follower.poll())
    assert engine.taken == [Version(1, 0), Version(1, 1)]


def test_a_version_that_is_gone_is_told_from_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    for path, remedy in (
        (tmp_path / "1.5", "a newer version has replaced them"),
        (tmp_path / "nowhere" / "1.5", "set RUN_DIR to its parent folder"),
    ):
        with pytest.raises(WeightsRejected, match=f"version 1.5 cannot be read: .*{remedy}"):
            verify_weights(Weights(Version(1, 5), str(path), "ff" * 32, "", 10))
