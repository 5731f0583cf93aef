"""Files of a run in an object store; the store is a folder (file://), or stands in for a failing one."""

from __future__ import annotations

import io
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.transfer import object_store
from penstock.common.transfer.download import FetchFailed, Source, Wanted, download
from penstock.common.transfer.object_store import StoreFailed, list_folder, put_file, read_file
from penstock.common.wire.messages import Version, Weights
from penstock.learner.state import file_store
from penstock.learner.state.file_store import FileStore

CONTENT = bytes(range(256)) * 4096
HASH = blake3(CONTENT).hexdigest()


def weights_of(folder: Path, step: int) -> Weights:
    """A version that is written to the run's folder."""
    path = folder / f"run/versions/000001-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(CONTENT)
    return Weights(Version(1, step), str(path), HASH, "", size=len(CONTENT))


@pytest.fixture
def progress() -> list[None]:
    return []


@pytest.fixture
def store(tmp_path: Path, progress: list[None]) -> FileStore:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "secrets.json"):
        (model / name).write_text(name)
    url = f"file://{tmp_path}/store/run"
    names = ["config.json", "tokenizer.json"]
    return FileStore(url, model, names, 0.0, threading.Event(), lambda: progress.append(None))


def wanted_of(weights: Weights) -> Wanted:
    return Wanted(f"versions/{Path(weights.path).name}/model.safetensors", weights.size, weights.hash)


def test_what_is_offered_can_be_fetched_and_nothing_else_is_there(
    store: FileStore, tmp_path: Path, progress: list[None]
) -> None:
    offered = store.offer(weights_of(tmp_path, 4))
    assert (offered.url, offered.token) == (store.url, "")
    download(Source(offered.url, "", files=True), wanted_of(offered), tmp_path / "got/model.safetensors")
    assert (tmp_path / "got/model.safetensors").read_bytes() == CONTENT
    assert progress
    there = sorted(str(path.relative_to(tmp_path / "store")) for path in tmp_path.glob("store/**/*.*"))
    version = "run/versions/000001-00000004/model.safetensors"
    assert there == ["run/model/config.json", "run/model/tokenizer.json", version]


@pytest.mark.parametrize(("lasts_s", "kept"), [(0.0, 4), (60.0, 8)])
def test_the_newest_four_versions_are_kept_and_four_that_may_still_be_fetched(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts_s: float, kept: int
) -> None:
    monkeypatch.setattr(file_store, "limit_s", lambda size: lasts_s * size / len(CONTENT))
    (tmp_path / "store/run/versions/mine").mkdir(parents=True)
    for step in range(20):
        store.offer(weights_of(tmp_path, step))
    names = [f"000001-{step:08d}" for step in range(20 - kept, 20)]
    assert list_folder(f"{store.url}/versions") == [*names, "mine"]


def test_a_download_may_go_on_while_versions_come_until_its_time_is_over(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time counts from the next version on: up to then it may begin."""
    now = [0.0]
    monkeypatch.setattr(file_store.time, "monotonic", lambda: now[0])
    for step in range(10):
        store.offer(weights_of(tmp_path, step))
        now[0] += 200.0
        there = list_folder(f"{store.url}/versions")[0]
        assert there == f"000001-{max(0, step - 4):08d}", "616 s for the whole MiB"


def test_a_download_goes_on_where_it_was_cut(store: FileStore, tmp_path: Path) -> None:
    offered = store.offer(weights_of(tmp_path, 1))
    part = tmp_path / f".got.{HASH[:16]}.part"
    part.write_bytes(CONTENT[:1000])
    url = f"{store.url}/{wanted_of(offered).path}"
    assert b"".join(read_file(url, 1000, len(CONTENT))) == CONTENT[1000:]
    download(Source(store.url, "", files=True), wanted_of(offered), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert not part.exists()


@pytest.mark.parametrize("change", ["other", "longer", "shorter", "gone", "folder", "pipe"])
def test_another_file_than_the_announced_one_is_refused(
    store: FileStore, tmp_path: Path, change: str
) -> None:
    offered = store.offer(weights_of(tmp_path, 1))
    there = tmp_path / "store/run" / wanted_of(offered).path
    there.unlink()
    if change == "folder":
        there.mkdir()
    elif change == "pipe":
        os.mkfifo(there)
    elif change != "gone":
        size = len(CONTENT) + {"longer": 1, "shorter": -1}.get(change, 0)
        there.write_bytes(b"x" * size)
    with pytest.raises(FetchFailed, match=r"not the announced|cannot be read"):
        download(Source(store.url, "", files=True), wanted_of(offered), tmp_path / "got")
    assert not (tmp_path / "got").exists()


class Silent(io.BufferedReader):
    """A file whose bytes do not come, which cannot be closed while it is read."""

    def seek(self, *_: Any) -> int:
        return 0


@pytest.mark.parametrize("silent", ["info", "open", "read"])
def test_a_store_that_does_not_answer_is_given_up(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr("penstock.common.transfer.object_store._SILENCE_S", 0.5)
    offered, ended = store.offer(weights_of(tmp_path, 1)), threading.Event()
    reader, writer = os.pipe()
    with Silent(io.FileIO(reader)) as file:

        def answer(*_: Any, **__: Any) -> Any:
            return file if silent == "read" else ended.wait(60)

        monkeypatch.setattr(LocalFileSystem, "open" if silent == "read" else silent, answer)
        with pytest.raises(FetchFailed, match=r"read: TimeoutError\('no answer within 0.5 s'\)"):
            download(Source(store.url, "", files=True), wanted_of(offered), tmp_path / "got")
        ended.set()
        os.close(writer)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/../other", "simplecache::file:///tmp", "file::s3://x/y", "s3://user@bucket/x",
        "s3://bucket/x?y", "s3://bucket/x#y", "s3://bucket/ x", "github://a:b@/x", "sftp://host/x",
        "memory://x", "zip://x::file:///y", "local:///tmp", "S3://bucket", "://x", "file",
    ],
)  # fmt: skip
def test_only_plain_urls_of_known_stores_are_followed(url: str, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="is no URL such as"):
        download(Source(url, "", files=True), Wanted("x", 1, HASH), tmp_path / "got")


def test_a_folder_is_followed_only_if_the_user_says_so(store: FileStore, tmp_path: Path) -> None:
    offered = store.offer(weights_of(tmp_path, 1))
    with pytest.raises(FetchFailed, match=r"is no URL such as .*RUN_ALLOW_FILE_STORE=true"):
        download(Source(offered.url, ""), wanted_of(offered), tmp_path / "got")


def make_store(url: str, folder: Path, retry_s: float = 0.0) -> FileStore:
    """A store for a folder with one file of a model."""
    (folder / "config.json").write_text("{}")
    return FileStore(url, folder, ["config.json"], retry_s, threading.Event(), lambda: None)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install s3fs"):
        make_store("s3://bucket/run", tmp_path)
    with pytest.raises(FetchFailed, match="pip install gcsfs"):  # whoever announced it ends no actor
        download(Source("gs://bucket/run", ""), Wanted("x", 1, HASH), tmp_path / "got")


def test_a_store_that_takes_no_file_of_the_model_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreFailed, match="cannot be written"):
        make_store(f"file://{tmp_path}/file/x", tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "file://relative/x", "file:///mnt/../x", "s3:///x", "s3://b/\xfc", "s3://a/b?c", "s3://u@b/x",
        "az://account.blob.core.windows.net/x", "s3://a/b:c", "s3://a/simplecache::x",
    ],
)  # fmt: skip
def test_an_address_that_nobody_follows_is_refused_at_the_start(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LEARNER_FILES_ADDRESS: .*is no URL such as"):
        make_store(url, tmp_path)


def test_a_run_that_begins_anew_keeps_its_own_versions(store: FileStore, tmp_path: Path) -> None:
    """An earlier run of this name left versions of greater numbers in the store."""
    for step in range(10, 15):
        store.offer(weights_of(tmp_path, step))
    again = make_store(store.url, tmp_path)
    offered = again.offer(weights_of(tmp_path, 0))
    download(Source(store.url, "", files=True), wanted_of(offered), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_version_is_copied_once_and_replaced_in_one_piece(
    store: FileStore, tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    """A learner announces its version again when the queue server came back, while actors read it."""
    weights = weights_of(tmp_path, 1)
    offered = store.offer(weights)
    there = tmp_path / "store/run" / wanted_of(offered).path
    with there.open("rb") as reader:
        before = reader.read(1000)
        put_file(Path(offered.path) / "model.safetensors", f"file://{there}", lambda: None)
        assert before + reader.read() == CONTENT
    quick.setattr(file_store, "put_file", Failing(10))
    assert store.offer(weights) == offered
    assert [path.name for path in there.parent.iterdir()] == ["model.safetensors"]


def test_a_cloud_tells_of_its_progress_however_it_counts() -> None:
    told: list[None] = []
    callback = object_store._callback(lambda: told.append(None))
    callback.relative_update(5)
    callback.absolute_update(9)
    assert len(told) == 2


def test_being_told_to_stop_ends_the_wait_for_a_store(
    store: FileStore, tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    store._retry_s = 3600.0
    store._stopping.set()
    quick.setattr(file_store, "put_file", Failing(10))
    with pytest.raises(StoreFailed):
        store.offer(weights_of(tmp_path, 1))


class Failing:
    """A store that fails some times before it takes a file."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __call__(self, *arguments: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreFailed("the store is away")
        put_file(*arguments)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(file_store, "_RETRY_S", 0.01)
    return monkeypatch


def test_a_store_that_is_away_for_a_moment_ends_no_run(
    store: FileStore, tmp_path: Path, progress: list[None], quick: pytest.MonkeyPatch
) -> None:
    store._retry_s = 60.0
    quick.setattr(file_store, "put_file", Failing(3))
    assert store.offer(weights_of(tmp_path, 1)).url == store.url
    assert len(progress) >= 3  # a learner that waits does not look like one that hangs


def test_a_store_that_stays_away_ends_the_learner_before_the_announcement(
    store: FileStore, tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    quick.setattr(file_store, "put_file", Failing(10))
    with pytest.raises(StoreFailed, match="the store is away"):
        store.offer(weights_of(tmp_path, 1))


def test_the_time_of_each_try_counts(
    store: FileStore, tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10**9, 60))
    quick.setattr("penstock.common.deadline.time.monotonic", lambda: next(seconds))
    quick.setattr(file_store, "put_file", failing := Failing(1000))
    store._retry_s = 300.0
    with pytest.raises(StoreFailed):
        store.offer(weights_of(tmp_path, 1))
    assert failing.failures >= 1000 - 7


def test_an_upload_that_takes_long_before_it_fails_is_tried_again(
    store: FileStore, tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10**9, 60))
    quick.setattr("penstock.common.deadline.time.monotonic", lambda: next(seconds))
    quick.setattr(file_store, "put_file", Failing(1))
    store._retry_s = 59.0
    assert store.offer(weights_of(tmp_path, 1)).url == store.url


def test_old_versions_that_cannot_be_deleted_stay(
    store: FileStore, tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    def refuse(url: str) -> None:
        raise StoreFailed("no right to delete")

    quick.setattr(file_store, "remove_folder", refuse)
    for step in range(6):
        store.offer(weights_of(tmp_path, step))
    assert len(list_folder(f"{store.url}/versions")) == 6


@pytest.mark.parametrize("address", ["s3://bucket/folder", "file:///mnt/share", "gs://bucket"])
def test_a_store_is_an_address(address: str) -> None:
    assert LearnerSettings(files_address=address).files_address == address


@pytest.mark.parametrize(
    "address", ["ftp://host/x", "s3://", "s3://a@b", "s3://a?b", "s3://a b", "s3://u@b/x:1", "file://x"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="files_address"):
        LearnerSettings(files_address=address)


def test_an_announced_store_is_that_of_the_weights(store: FileStore, tmp_path: Path) -> None:
    weights = weights_of(tmp_path, 2)
    assert store.offer(weights) == replace(weights, url=store.url)
