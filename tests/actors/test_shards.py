"""A version in several files: each is verified, fetched where it is missing, and none is left out."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.actors.engine import WeightsRejected, verify_weights
from penstock.actors.held_tickets import HeldTickets
from penstock.actors.weights.follower import WeightFollower
from penstock.actors.weights.source import WeightSource, find_weights
from penstock.common.broker.run_view import RunView
from penstock.common.config.settings import RunSettings
from penstock.common.files.hashing import hash_file
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.transfer.download import FetchFailed, Source, Wanted, download
from penstock.common.transfer.model_folder import ModelFetcher, shared_files
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import INDEX_FILE, Weights, WeightsFile
from penstock.learner.state.best_model import keep_if_best
from penstock.learner.state.deltas import OfferWithDeltas
from penstock.learner.state.file_server import FileServer
from penstock.learner.state.file_store import FileStore
from penstock.learner.state.versions import with_hashes, write_version
from tests.actors.conftest import Run
from tests.fake_engine import FakeEngine
from tests.sharded import ShardedPolicy

NAMES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


class Learner:
    """The learner's side of a run whose versions have three files."""

    def __init__(self, run: Run) -> None:
        self.folder = LearnerFolder(run.run_folder.path, 1)
        self.policy, self._parent = ShardedPolicy(), ""

    def publish(self, step: int) -> Weights:
        made = write_version(self.folder, self.policy, Version(1, step), self._parent)
        self._parent = made.hash
        return made


@pytest.fixture
def learner(a_run: Run) -> Learner:
    return Learner(a_run)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def announced_again(weights: Weights) -> Weights:
    """The announcement of what is in the version's folder now."""
    return with_hashes(replace(weights, shards=()))


def test_each_file_is_announced_with_its_size_and_hash(learner: Learner) -> None:
    weights = learner.publish(0)
    folder = Path(weights.path)
    assert [one.name for one in weights.shards] == [*NAMES, INDEX_FILE]
    assert [one.name for one in weights.tensor_files] == NAMES
    for one in weights.files:
        file = folder / one.name
        assert (one.size, one.hash) == (file.stat().st_size, hash_file(file))
    assert weights.size == sum((folder / one.name).stat().st_size for one in weights.files)
    assert learner.publish(1).hash != weights.hash
    assert decode(encode(weights), Weights) == weights
    assert verify_weights(weights) == folder


def test_a_version_of_one_file_is_announced_as_before(learner: Learner) -> None:
    learner.policy = ShardedPolicy(1)
    weights = learner.publish(0)
    file = Path(weights.path) / "model.safetensors"
    assert (weights.shards, weights.hash, weights.size) == ((), hash_file(file), file.stat().st_size)
    assert weights.files == (WeightsFile("model.safetensors", weights.size, weights.hash),)


def test_the_best_model_has_all_files(learner: Learner) -> None:
    weights = learner.publish(0)
    assert keep_if_best(learner.folder, weights.version, "accuracy", 0.5, 8)
    (kept,) = learner.folder.best.glob("*/model")
    assert names_in(kept) == ["config.json", *NAMES, INDEX_FILE]


def flip_a_byte(folder: Path) -> str:
    content = bytearray((folder / NAMES[1]).read_bytes())
    content[12_345] ^= 1
    (folder / NAMES[1]).write_bytes(content)
    return f"{NAMES[1]} is not of version 1.1"


def lose_a_file(folder: Path) -> str:
    (folder / NAMES[1]).unlink()
    return f"cannot be read: .*{NAMES[1]}"


def lose_the_index(folder: Path) -> str:
    (folder / INDEX_FILE).unlink()
    return f"cannot be read: .*{INDEX_FILE}"


def swap_files(folder: Path) -> str:
    (folder / NAMES[0]).rename(folder / "aside")
    (folder / NAMES[2]).rename(folder / NAMES[0])
    (folder / "aside").rename(folder / NAMES[2])
    return f"{NAMES[0]} is not of version 1.1"


def add_a_file(folder: Path) -> str:
    (folder / "model-00004-of-00004.safetensors").write_bytes(b"more")
    return "holds model-00004-of-00004.safetensors beside"


def add_one_file_with_all(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"all")
    return "holds model.safetensors beside"


def add_another_index(folder: Path) -> str:
    (folder / "consolidated.safetensors.index.json").write_text("{}")
    return "holds consolidated.safetensors.index.json beside"


def lead_a_file_out(folder: Path) -> str:
    outside = folder.parents[2] / "outside"
    (folder / NAMES[1]).rename(outside)
    (folder / NAMES[1]).symlink_to(outside)
    return f"{NAMES[1]} leads out of"


def change_index(folder: Path, *files: str) -> None:
    tensors = {f"layers.{number}": name for number, name in enumerate(files)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": tensors}))


def index_that_leads_out(folder: Path) -> str:
    change_index(folder, *NAMES, "../../../outside.safetensors")
    return "does not name the 3 files of version 1.1 and no others"


def index_without_a_file(folder: Path) -> str:
    change_index(folder, *NAMES[:2])
    return "does not name the 3 files of version 1.1 and no others"


def index_of_numbers(folder: Path) -> str:
    (folder / INDEX_FILE).write_text('{"weight_map": {"layers.0": [1]}}')
    return f"{INDEX_FILE} cannot be read"


def no_index(folder: Path) -> str:
    (folder / INDEX_FILE).write_text("weights")
    return f"{INDEX_FILE} cannot be read"


CHANGES = [
    flip_a_byte, lose_a_file, lose_the_index, swap_files, add_a_file, add_one_file_with_all,
    add_another_index, lead_a_file_out,
]  # fmt: skip
FORGED = [index_that_leads_out, index_without_a_file, index_of_numbers, no_index]


@pytest.mark.parametrize("change", [*CHANGES, *FORGED])
def test_what_is_not_the_announced_version_is_refused_and_the_engine_stays(
    a_run: Run, learner: Learner, change: Callable[[Path], str]
) -> None:
    engine, view = FakeEngine(), RunView(a_run.connection, a_run.keys)
    follower = WeightFollower(engine, view, HeldTickets(8), a_run.weight_source("folder"), 60.0, 60.0)
    a_run.queue.announce(learner.publish(0))
    assert asyncio.run(follower.poll())
    weights = learner.publish(1)
    fault = change(Path(weights.path))
    if change in FORGED:  # by whoever announces too: the hashes are right
        weights = announced_again(weights)
    a_run.queue.announce(weights)
    assert not asyncio.run(follower.poll())
    assert engine.taken == [Version(1, 0)]
    with pytest.raises(WeightsRejected, match=fault):
        verify_weights(find_weights(weights, a_run.run_folder))


class FarActor:
    """An actor on another host, which sees no folder of the learner's."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run = run
        self.cache = run.run_folder.path.parent / "cache/run"
        self.fetched: list[str] = []
        monkeypatch.setattr("penstock.common.transfer.patching.download", self._download)
        monkeypatch.setattr("penstock.common.transfer.model_folder.download", self._download)

    def _download(self, source: Source, wanted: Wanted, target: Path) -> None:
        before = target.exists()
        download(source, wanted, target)
        if not before:
            self.fetched.append(wanted.path.removeprefix("versions/000001-000000"))

    def fetch(self, weights: Weights) -> list[str]:
        """Fetch a version, verify it, and return the names of the files that came."""
        self.fetched.clear()
        source: WeightSource = self._run.weight_source()
        source._folder = RunFolder(Path("/nowhere"))
        folder = verify_weights(source.find(weights))
        assert folder == self.cache / "versions" / weights.hash
        assert names_in(folder) == [*NAMES, INDEX_FILE]
        return list(self.fetched)


@pytest.fixture
def far(a_run: Run, monkeypatch: pytest.MonkeyPatch) -> FarActor:
    return FarActor(a_run, monkeypatch)


@pytest.fixture
def server(a_run: Run) -> Iterator[FileServer]:
    names = ["tokenizer.json"]
    with FileServer(a_run.run_folder.versions, a_run.folder, names, "127.0.0.1", 0) as server:
        server.url = f"http://127.0.0.1:{server.port}"
        yield server


def test_all_files_come_over_http_and_none_twice(
    learner: Learner, server: FileServer, far: FarActor
) -> None:
    weights = server.offer(learner.publish(0))
    assert far.fetch(weights) == [f"00/{name}" for name in (*NAMES, INDEX_FILE)]
    assert far.fetch(weights) == []
    assert server.is_used


def test_a_version_that_came_in_part_is_completed(
    learner: Learner, server: FileServer, far: FarActor
) -> None:
    weights = server.offer(learner.publish(0))
    file = Path(weights.path) / NAMES[1]
    content = file.read_bytes()
    for wrong in (content[:-1], content[:-1] + b"x", b""):
        file.write_bytes(wrong)
        with pytest.raises(FetchFailed, match=NAMES[1]):
            far.fetch(weights)
    file.unlink()
    with pytest.raises(FetchFailed, match="status 404"):
        far.fetch(weights)
    file.write_bytes(content)
    assert far.fetch(weights) == [f"00/{name}" for name in (*NAMES[1:], INDEX_FILE)]


def test_all_files_come_from_an_object_store(
    learner: Learner, far: FarActor, a_run: Run, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store/run"
    store = FileStore(url, a_run.folder, [], 0.0, threading.Event(), lambda: None)
    weights = store.offer(learner.publish(0))
    assert names_in(tmp_path / "store/run/versions/000001-00000000") == [*NAMES, INDEX_FILE]
    assert far.fetch(weights) == [f"00/{name}" for name in (*NAMES, INDEX_FILE)]


def test_what_changed_comes_as_one_delta_of_all_files(
    learner: Learner, server: FileServer, far: FarActor
) -> None:
    offer = OfferWithDeltas(server, always=True)
    far.fetch(offer.offer(learner.publish(0)))
    second = offer.offer(learner.publish(1))
    assert 0 < second.delta_bytes < second.size / 10
    assert far.fetch(second) == ["01/model.delta", f"01/{INDEX_FILE}"]
    offer.offer(learner.publish(2))
    fourth = offer.offer(learner.publish(3))
    assert far.fetch(fourth) == ["02/model.delta", "03/model.delta", f"03/{INDEX_FILE}"]


def test_a_damaged_file_here_makes_the_whole_version_come(
    learner: Learner, server: FileServer, far: FarActor
) -> None:
    offer = OfferWithDeltas(server, always=True)
    first, second = (offer.offer(learner.publish(step)) for step in (0, 1))
    far.fetch(first)
    flip_a_byte(far.cache / "versions" / first.hash)
    assert far.fetch(second) == ["01/model.delta", *(f"01/{name}" for name in (*NAMES, INDEX_FILE))]


def test_versions_of_other_shapes_have_no_delta_between_them(
    learner: Learner, server: FileServer, far: FarActor
) -> None:
    offer = OfferWithDeltas(server, always=True)
    offer.offer(learner.publish(0))
    learner.policy = ShardedPolicy(1)
    assert offer.offer(learner.publish(1)).deltas == ()


def test_the_folder_that_an_engine_starts_with_has_the_files_of_one_version(
    a_run: Run, learner: Learner, server: FileServer, tmp_path: Path
) -> None:
    """A learner that starts again may have another LEARNER_MAX_SHARD_SIZE."""
    contract = replace(a_run.contract, model="/nowhere/model", model_files=shared_files(a_run.folder))
    a_run.queue.publish_contract(encode(contract))
    settings = RunSettings(name="run", cache_dir=tmp_path / "mine")
    fetcher = ModelFetcher(RunView(a_run.connection, a_run.keys), settings, threading.Event())
    a_run.queue.source = server
    for step, count in enumerate((3, 1, 2, 3)):
        learner.policy = ShardedPolicy(count)
        weights = a_run.queue.announce(learner.publish(step))
        found = names_in(fetcher.with_weights(contract))
        assert found == sorted([*(one.name for one in weights.files), "tokenizer.json"])
