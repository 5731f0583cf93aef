"""An actor on another host fetches what changed, and the whole file where that does not do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from penstock.common.errors import NotPermitted
from penstock.common.files.hashing import hash_file
from penstock.common.files.run_folder import RunFolder
from penstock.common.transfer import patching
from penstock.common.transfer.download import FetchFailed, Source, Wanted, download
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import DELTA_FILE, Weights
from penstock.learner.state.deltas import OfferWithDeltas
from penstock.learner.state.file_server import FileServer
from penstock.learner.state.queued_deltas import QueuedDeltas
from tests.actors.conftest import Run


class FarActor:
    """What an actor on another host fetches of a run whose versions have 20,000 words."""

    def __init__(self, run: Run, offer: OfferWithDeltas, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.offer = run, offer
        self.fetched: list[str] = []
        self._words = np.random.default_rng(0).integers(0, 0xFFFF, 20_000).astype("<u2")
        self._parent = ""
        self.take("http")
        self.cache = run.run_folder.path.parent / "cache/run"
        monkeypatch.setattr(patching, "download", self._download)
        monkeypatch.setattr("penstock.common.transfer.model_folder.download", self._download)

    def _download(self, source: Source, wanted: Wanted, target: Path) -> None:
        self.fetched.append(wanted.path)
        download(source, wanted, target)

    def take(self, way: Literal["auto", "queue", "http"]) -> None:
        """Find weights this way, on a host without the run's folder."""
        self._source = self.run.weight_source(way)
        self._source._folder = RunFolder(Path("/nowhere"))

    def publish(self, step: int) -> Weights:
        """Write a version in which one word in fifty changed, and return its announcement."""
        changed = np.random.default_rng(step).random(len(self._words)) < 0.02
        self._words = self._words + changed.astype("<u2")
        folder = self.run.run_folder.version(1, step)
        folder.mkdir(parents=True)
        file = folder / "model.safetensors"
        file.write_bytes(self._words.tobytes())
        made = Weights(Version(1, step), str(folder), hash_file(file), self._parent, file.stat().st_size)
        self._parent = made.hash
        return self.offer.offer(made)

    def fetch(self, weights: Weights) -> list[str]:
        """Fetch a version, check it, and return the names of the files that were asked for."""
        self.fetched.clear()
        found = Path(self._source.find(weights).path) / "model.safetensors"
        assert hash_file(found) == weights.hash
        return [path.removeprefix("versions/000001-000000") for path in self.fetched]


@pytest.fixture
def far(a_run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarActor]:
    with FileServer(a_run.run_folder.versions, a_run.folder, [], "127.0.0.1", 0) as server:
        server.url = f"http://127.0.0.1:{server.port}"
        yield FarActor(a_run, OfferWithDeltas(server, always=True), monkeypatch)


def test_the_first_version_comes_whole_and_then_what_changed(far: FarActor) -> None:
    first, second = far.publish(0), far.publish(1)
    assert far.fetch(first) == ["00/model.safetensors"]
    assert far.fetch(second) == ["01/model.delta"]
    assert 0 < second.delta_bytes < second.size / 10


def test_there_are_none_before_somebody_fetches(far: FarActor) -> None:
    far.offer._always = False
    first, second = far.publish(0), far.publish(1)
    assert (first.deltas, second.deltas) == ((), ())
    assert far.fetch(second) == ["01/model.safetensors"]
    assert far.fetch(far.publish(2)) == ["02/model.delta"]


def test_an_actor_that_fell_behind_fetches_several_deltas_at_once(far: FarActor) -> None:
    assert far.fetch(far.publish(0)) == ["00/model.safetensors"]
    *_, last = [far.publish(step) for step in range(1, 4)]
    assert far.fetch(last) == ["01/model.delta", "02/model.delta", "03/model.delta"]
    assert far.fetch(last) == ["03/model.safetensors"]  # it is there: nothing is sent


def test_one_that_slept_for_long_fetches_the_whole_file(far: FarActor) -> None:
    far.fetch(far.publish(0))
    *_, last = [far.publish(step) for step in range(1, 21)]
    assert len(last.deltas) == 4
    assert far.fetch(last) == ["20/model.safetensors"]


def test_one_that_joins_late_fetches_one_whole_file(far: FarActor) -> None:
    *_, last = [far.publish(step) for step in range(21)]
    assert far.fetch(last) == ["20/model.safetensors"]


def test_deltas_as_large_as_the_file_are_not_fetched(far: FarActor) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)
    large = replace(second.deltas[0], size=second.size)
    assert far.fetch(replace(second, deltas=(large,))) == ["01/model.safetensors"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_delta_that_is_gone_or_damaged_costs_the_whole_file(far: FarActor, kept: bool) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)
    file = far.run.run_folder.version(1, 1) / DELTA_FILE
    if kept:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        file.unlink()
    assert far.fetch(second) == ["01/model.delta", "01/model.safetensors"]


def test_a_delta_with_the_right_hash_that_is_none_costs_the_whole_file(far: FarActor) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)
    file = far.run.run_folder.version(1, 1) / DELTA_FILE
    file.write_bytes(b"PSTK-D1\n and nonsense")
    forged = replace(second.deltas[0], hash=hash_file(file), size=file.stat().st_size)
    assert far.fetch(replace(second, deltas=(forged,))) == ["01/model.delta", "01/model.safetensors"]


def test_a_delta_on_the_wrong_parent_is_noticed(far: FarActor) -> None:
    """The actor's copy of the earlier version is another file, of the same size."""
    first, second = far.publish(0), far.publish(1)
    far.fetch(first)
    file = far.cache / "versions" / first.hash / "model.safetensors"
    file.write_bytes(b"\0" * first.size)
    assert far.fetch(second) == ["01/model.delta", "01/model.safetensors"]


@pytest.mark.parametrize("size", [0, 1, 3, 10**14])
def test_an_announcement_cannot_choose_how_much_is_read(far: FarActor, size: int) -> None:
    """The version that is here has another size, or none, or an odd one."""
    first, second = far.publish(0), far.publish(1)
    far.fetch(first)
    forged = replace(second.deltas[0], size=max(1, size - 1))
    with pytest.raises(FetchFailed):
        far.fetch(replace(second, size=size, deltas=(forged,)))
    file = far.cache / "versions" / first.hash / "model.safetensors"
    file.write_bytes(b"x" * min(size, 3))
    assert far.fetch(second) == ["01/model.safetensors"]


def test_what_fails_leaves_nothing_half_way(far: FarActor, monkeypatch: pytest.MonkeyPatch) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)

    def fail(*_: object) -> str:
        (far.cache / "versions" / second.hash / ".model.safetensors.patched").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr("penstock.common.transfer.delta.apply_deltas", fail)
    assert far.fetch(second) == ["01/model.delta", "01/model.safetensors"]
    assert not list(far.cache.rglob("*.patched"))


def test_without_a_package_for_deltas_files_come_whole(
    far: FarActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)
    monkeypatch.delitem(sys.modules, "penstock.common.transfer.delta")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert far.fetch(second) == ["01/model.delta", "01/model.safetensors"]


def test_files_that_cannot_be_fetched_do_not_fill_the_disk(
    far: FarActor, queued: QueuedDeltas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.common.transfer.model_folder._KEEP_S", 0.0)
    far.fetch(far.publish(0))
    for step in range(1, 9):
        forged = replace(far.publish(step), hash=f"{step:064x}")
        with pytest.raises(FetchFailed):
            far.fetch(forged)
    assert len(list((far.cache / "deltas").iterdir())) <= 5
    assert len(list((far.cache / "versions").iterdir())) <= 5


@pytest.mark.parametrize("name", ["../../out", "", ".", "a" * 63, "A" * 64])
def test_hashes_of_a_delta_cannot_name_another_folder(far: FarActor, name: str) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)
    for forged in (replace(second.deltas[0], hash=name), replace(second.deltas[0], parent=name)):
        assert far.fetch(replace(second, deltas=(forged,)))[-1] == "01/model.safetensors"
    assert not (far.cache.parent / "out").exists()


@pytest.fixture
def queued(far: FarActor) -> QueuedDeltas:
    """The deltas on the queue server; the actor may fetch them there."""
    queued = QueuedDeltas(far.run.connection, far.run.keys, 1 << 20)
    far.offer._queued = queued
    far.take("auto")
    return queued


@pytest.mark.parametrize("way", ["auto", "queue"])
def test_what_changed_comes_from_the_queue_server(
    far: FarActor, queued: QueuedDeltas, way: Literal["auto", "queue"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.common.wire.messages.DELTA_PART", 100)
    far.take(way)
    assert far.fetch(far.publish(0)) == ["00/model.safetensors"]
    assert far.fetch(far.publish(1)) == []
    far.publish(2)
    assert far.fetch(far.publish(3)) == []
    assert far.run.connection.execute("HLEN", far.run.keys.deltas) > 10
    assert 3000 < far.run.connection.execute("TTL", far.run.keys.deltas) <= 3600


def test_a_way_that_is_chosen_is_the_only_one(far: FarActor, queued: QueuedDeltas) -> None:
    far.take("http")
    far.fetch(far.publish(0))
    assert far.fetch(far.publish(1)) == ["01/model.delta"]


@pytest.mark.parametrize("fault", ["gone", "short", "long", "another", "another type"])
def test_what_is_not_whole_on_the_queue_server_comes_from_the_file_server(
    far: FarActor, queued: QueuedDeltas, fault: str
) -> None:
    far.fetch(far.publish(0))
    second = far.publish(1)
    ((field, _),) = second.deltas[0].parts()
    execute, key = far.run.connection.execute, far.run.keys.deltas
    content = execute("HGET", key, field)
    changed = {"short": content[:-1], "long": content + b"?", "another": content[:-1] + b"?"}
    execute("DEL", key)
    if fault == "another type":
        execute("SET", key, "text")
    elif fault != "gone":
        execute("HSET", key, field, changed[fault])
    assert far.fetch(second) == ["01/model.delta"]


def test_the_queue_server_holds_no_more_than_it_may(far: FarActor) -> None:
    far.publish(0)
    size = far.publish(1).delta_bytes
    far.offer._queued = QueuedDeltas(far.run.connection, far.run.keys, int(2.5 * size))
    far.run.connection.execute("HSET", far.run.keys.deltas, "of-another-learner:0", "x" * 1000)
    announced = [far.publish(step) for step in range(2, 7)]
    held = {name.decode() for name in far.run.connection.execute("HKEYS", far.run.keys.deltas)}
    assert held == {name for one in announced[-2:] for name, _ in one.deltas[-1].parts()}
    far.offer._queued = QueuedDeltas(far.run.connection, far.run.keys, size // 2)
    assert far.publish(7).delta_bytes > size // 2
    assert far.run.connection.execute("EXISTS", far.run.keys.deltas) == 0


def test_a_key_that_changes_its_type_meanwhile_ends_no_learner(
    far: FarActor, queued: QueuedDeltas, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_memory = queued._has_memory

    def interfere(size: int) -> bool:
        far.run.connection.execute("DEL", far.run.keys.deltas)
        far.run.connection.execute("SET", far.run.keys.deltas, "x")
        return has_memory(size)

    monkeypatch.setattr(queued, "_has_memory", interfere)
    far.fetch(far.publish(0))
    far.publish(1)
    monkeypatch.undo()
    far.publish(2)
    assert far.run.connection.execute("HLEN", far.run.keys.deltas)


def test_a_key_of_another_type_is_replaced(far: FarActor, queued: QueuedDeltas) -> None:
    far.run.connection.execute("SET", far.run.keys.deltas, "of another client")
    far.fetch(far.publish(0))
    assert far.fetch(far.publish(1)) == []


@pytest.mark.parametrize("command", ["HSET", "HGET", "HKEYS"])
def test_users_without_the_right_to_deltas_do_without(
    far: FarActor, queued: QueuedDeltas, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = far.run.connection.execute

    def refuse(name: str, *arguments: Any) -> Any:
        if name == command:
            raise NotPermitted("this user may not")
        return execute(name, *arguments)

    monkeypatch.setattr(far.run.connection, "execute", refuse)
    far.fetch(far.publish(0))
    assert far.fetch(far.publish(1)) == ["01/model.delta"]


def test_a_server_without_memory_to_spare_gets_no_deltas(far: FarActor, queued: QueuedDeltas) -> None:
    execute = far.run.connection.execute
    far.fetch(far.publish(10))
    assert far.fetch(far.publish(11)) == []
    used = execute("INFO", "memory")["used_memory"]
    execute("CONFIG", "SET", "maxmemory", int(1.1 * used))
    try:
        assert far.fetch(far.publish(12)) == ["12/model.delta"]
    finally:
        execute("CONFIG", "SET", "maxmemory", 0)
    assert execute("EXISTS", far.run.keys.deltas) == 0
    assert far.fetch(far.publish(13)) == []


def test_fetched_deltas_do_not_fill_the_disk(far: FarActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.common.transfer.model_folder._KEEP_S", 0.0)
    far.fetch(far.publish(0))
    for step in range(1, 9):
        assert far.fetch(far.publish(step)) == [f"{step:02d}/model.delta"]
    assert len(list((far.cache / "deltas").iterdir())) <= 4
    assert len(list((far.cache / "versions").iterdir())) <= 4
