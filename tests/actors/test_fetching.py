"""An actor and a rewarder that see neither the run's folder nor the model's: all comes over HTTP."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from blake3 import blake3

from penstock.actors.loop import run
from penstock.actors.weights.source import WeightSource
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings, RunSettings
from penstock.common.errors import ConfigError, ContractMismatch, PenstockError, RunNotReady
from penstock.common.files.run_folder import RunFolder
from penstock.common.phases import READING_DATA
from penstock.common.transfer import download, model_folder
from penstock.common.transfer.download import FetchFailed, Source, alone
from penstock.common.transfer.model_folder import ModelFetcher, check_base, shared_files
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.messages import Version, Weights
from penstock.learner.state.file_server import FileServer
from penstock.learner.state.file_store import FileStore
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.actors.conftest import Run
from tests.fake_engine import FakeEngine
from tests.helpers import wait_until

ADAPTER = AdapterSpec(4, 32, ("q_proj",))


class OtherHost:
    """An actor whose engine is a fake, with folders of its own, in a thread."""

    def __init__(self, url: str, run_name: str, folder: Path, **actor: Any) -> None:
        self.engine = FakeEngine()
        self.model: Path | None = None
        self.error: PenstockError | None = None
        self.stopping = threading.Event()
        self.cache = folder / "cache" / run_name
        self.settings = ActorCommand(
            redis_url=url,
            run=RunSettings(
                name=run_name, dir=folder / "runs", cache_dir=folder / "cache", join_timeout_s=5.0,
                lease_s=1.0, allow_file_store=True,
            ),
            actor=ActorSettings(**actor),
        )  # fmt: skip
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            run(self.settings, self.stopping, self._make_engine)
        except PenstockError as error:
            self.error = error

    def _make_engine(self, _settings: ActorSettings, _contract: Contract, model: Path) -> FakeEngine:
        self.model = model
        return self.engine

    def start(self) -> OtherHost:
        self.thread.start()
        return self

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.engine.version == Version(1, step), f"version {step}")

    def stop(self) -> None:
        self.stopping.set()
        if self.thread.ident:
            self.thread.join(20)
            assert not self.thread.is_alive()


@pytest.fixture
def far(a_run: Run) -> Run:
    """The run, whose contract names a model folder that is not on the actor's host."""
    (a_run.folder / "config.json").write_text('{"eos_token_id": 2}')
    (a_run.folder / "code.py").write_text("raise SystemExit")
    a_run.contract = replace(
        a_run.contract, model="/nowhere/model", model_files=shared_files(a_run.folder)
    )
    a_run.queue.publish_contract(encode(a_run.contract))
    return a_run


@contextmanager
def serve(run: Run, kind: type[FileServer] = FileServer) -> Iterator[Any]:
    names = [one.name for one in run.contract.model_files]
    with kind(run.run_folder.versions, run.folder, names, "127.0.0.1", 0) as server:
        run.queue.source = Source(f"http://127.0.0.1:{server.port}", server.token)
        yield server


@pytest.fixture
def server(far: Run) -> Iterator[FileServer]:
    with serve(far) as server:
        yield server


def fetcher_of(run: Run, cache: Path, **settings: Any) -> ModelFetcher:
    made = RunSettings(name="run", cache_dir=cache, **settings)
    return ModelFetcher(RunView(run.connection, run.keys), made, threading.Event())


@pytest.fixture
def host(queue_server: LocalServer, run_name: str, tmp_path: Path) -> Iterator[OtherHost]:
    host = OtherHost(queue_server.url, run_name, tmp_path / "other")
    yield host
    host.stop()


def test_it_needs_nothing_but_the_queue_servers_address(
    far: Run, server: FileServer, host: OtherHost
) -> None:
    far.announce(0)
    host.start().wait_for(0)
    assert host.model is not None
    assert sorted(path.name for path in host.model.iterdir() if path.name[0] != ".") == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (host.model / "model.safetensors").read_bytes() == b"weights 0"
    far.issue(far.ticket(1))
    wait_until(lambda: "train:1" in far.groups(), "a group")
    far.announce(1)
    host.wait_for(1)
    assert not host.settings.run.folder.path.exists()
    assert far.groups()["train:1"].rollouts


def test_with_adapters_the_models_own_weights_come_once_and_then_adapters_alone(
    far: Run, host: OtherHost
) -> None:
    (far.folder / "model-000001-of-000001.safetensors").write_bytes(b"base")
    index = {"weight_map": {"w": "model-000001-of-000001.safetensors"}}
    (far.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (far.folder / "notes.safetensors").write_bytes(b"not of the model")
    adapter, files = ADAPTER, shared_files(far.folder, with_weights=True)
    far.contract = replace(far.contract, adapter=adapter, model_files=files)
    far.queue.publish_contract(encode(far.contract))
    with serve(far):
        far.announce(0, adapter=ADAPTER)
        host.start().wait_for(0)
        assert host.model is not None
        assert sorted(path.name for path in host.model.iterdir() if path.name[0] != ".") == [
            "config.json", "model-000001-of-000001.safetensors", "model.safetensors.index.json",
            "tokenizer.json",
        ]  # fmt: skip
        far.announce(1, adapter=ADAPTER)
        host.wait_for(1)
    fetched = [path.name for path in host.cache.glob("versions/*/*.safetensors")]
    assert fetched == ["adapter_model.safetensors"] * 2


def test_base_weights_that_are_here_are_those_of_the_learner(
    far: Run, host: OtherHost, tmp_path: Path
) -> None:
    """Adapters are added to them, and a small difference would pass the probe."""
    (far.folder / "model.safetensors").write_bytes(b"base")
    here = tmp_path / "here"
    shutil.copytree(far.folder, here)
    files = shared_files(far.folder, with_weights=True)
    far.contract = replace(far.contract, model=str(here), adapter=ADAPTER, model_files=files)
    assert check_base(far.contract, here) == here
    (here / "model.safetensors").write_bytes(b"ba5e")
    far.queue.publish_contract(encode(far.contract))
    host.start()
    wait_until(lambda: host.error is not None, "the actor to end")
    assert isinstance(host.error, ContractMismatch)
    assert f"{here / 'model.safetensors'} is not the learner's" in str(host.error)


def test_base_weights_are_kept_for_another_contract(far: Run, tmp_path: Path) -> None:
    (far.folder / "model.safetensors").write_bytes(b"base")
    files = shared_files(far.folder, with_weights=True)
    fetcher = fetcher_of(far, tmp_path / "mine")
    with serve(replace_contract(far, adapter=ADAPTER, model_files=files)):
        far.announce(0, adapter=ADAPTER)
        first = fetcher.with_weights(far.contract)
        (far.folder / "model.safetensors").unlink()
        second = fetcher.with_weights(replace(far.contract, groups_per_step=7))
    assert first != second
    assert (second / "model.safetensors").read_bytes() == b"base"


def replace_contract(run: Run, **changes: Any) -> Run:
    run.contract = replace(run.contract, **changes)
    return run


def test_a_rewarder_gets_no_weights_with_adapters(far: Run, tmp_path: Path) -> None:
    (far.folder / "model.safetensors").write_bytes(b"base")
    files = shared_files(far.folder, with_weights=True)
    far.contract = replace(far.contract, adapter=ADAPTER, model_files=files)
    with serve(far):
        far.announce(0, adapter=ADAPTER)
        folder = fetcher_of(far, tmp_path / "mine").with_tokenizer(far.contract)
    assert [path.name for path in folder.iterdir() if path.name[0] != "."] == ["tokenizer.json"]


def test_it_waits_for_the_first_announcement(far: Run, server: FileServer, host: OtherHost) -> None:
    host.start()
    far.queue.beat(30.0, "reading data and model")
    assert host.model is None
    far.announce(3)
    host.wait_for(3)


def test_a_version_that_is_gone_is_skipped_and_the_newest_is_fetched(
    far: Run, server: FileServer, host: OtherHost
) -> None:
    far.announce(0)
    host.start().wait_for(0)
    gone = far.run_folder.version(1, 1)
    digest = blake3(b"weights 1").hexdigest()
    far.queue.announce(Weights(Version(1, 1), str(gone), digest, "", 9))
    far.issue(far.ticket(1))
    wait_until(lambda: "train:1" in far.groups(), "a group of the old version")
    assert host.engine.version == Version(1, 0)
    far.announce(2)
    host.wait_for(2)


def test_a_file_that_is_not_the_announced_one_is_never_loaded(
    far: Run, server: FileServer, host: OtherHost
) -> None:
    far.announce(0)
    host.start().wait_for(0)
    far.announce(1, wrong=True)
    far.issue(far.ticket(1))
    wait_until(lambda: "train:1" in far.groups(), "a group of the old version")
    assert host.engine.version == Version(1, 0)
    far.announce(1)
    host.wait_for(1)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_learner_that_starts_again_serves_at_another_port(
    far: Run, host: OtherHost, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Also if the host of the one before hangs and keeps its connections."""
    monkeypatch.setattr("penstock.common.transfer.download._LOOK_S", 0.1)
    with serve(far):
        far.announce(0)
        host.start().wait_for(0)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        if hangs:
            far.queue.source = Source(f"http://127.0.0.1:{hanging.getsockname()[1]}", "token")
        far.announce(1)  # names the server that is gone, or hangs
        _held = hangs and hanging.accept()
        with serve(far):
            far.announce(1)
            host.wait_for(1)


class Dying(FileServer):
    """Sends the first four bytes of a file, and then nothing until it is stopped."""

    has_sent = False

    async def _send_turn(self, response: Any, file: Any) -> bool:
        await response.write(file.read(4))
        self.has_sent = True
        return await asyncio.Event().wait()


@pytest.mark.parametrize("joined", [True, False])
def test_a_learner_that_dies_within_a_file_and_comes_back_elsewhere_sends_the_rest(
    far: Run, host: OtherHost, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    begins, rest = [], download._rest
    monkeypatch.setattr(download, "_rest", lambda *asked: begins.append(asked[2]) or rest(*asked))
    if joined:
        with serve(far):
            far.announce(0)
            host.start().wait_for(0)
    with serve(far, Dying) as dying:
        far.announce(1)
        if not joined:
            host.start()
        wait_until(lambda: dying.has_sent, "a part of a file")
    with serve(far):
        far.queue.beat(30.0, "publishing weights")
        far.announce(1)
        host.wait_for(1)
    assert 4 in begins


def test_fetched_versions_do_not_fill_the_disk(
    far: Run, server: FileServer, host: OtherHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start()
    for step, most in [*((step, 8) for step in range(11)), (11, 2)]:
        monkeypatch.setattr(model_folder, "_KEEP_S", 60.0 if most == 8 else 0.0)
        far.announce(step)
        host.wait_for(step)
        assert len(list((host.cache / "versions").iterdir())) <= most


def test_it_ends_while_a_server_is_silent(far: Run, server: FileServer, host: OtherHost) -> None:
    far.announce(0)
    host.start().wait_for(0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far.queue.source = Source(f"http://127.0.0.1:{silent.getsockname()[1]}", "token")
        far.announce(1)
        silent.accept()  # it is fetching
        host.stop()
    assert host.error is None


def test_nothing_can_be_fetched_from_a_learner_without_a_file_server(far: Run, host: OtherHost) -> None:
    far.announce(0)
    host.start()
    wait_until(lambda: host.error is not None, "an error")
    assert isinstance(host.error, ContractMismatch)
    assert (
        "/nowhere/model, which does not exist on this host or has other files, and the learner serves"
        in str(host.error)
    )


def test_what_an_earlier_learner_left_without_files_is_not_final(far: Run, host: OtherHost) -> None:
    """LEARNER_FILES_ADDRESS is corrected and all are started again; the contract stays the same."""
    far.announce(0)
    with structlog.testing.capture_logs() as logs:
        host.start()
        wait_until(
            lambda: host.error or any("cannot be served" in log["event"] for log in logs), "it to look"
        )
    far.queue = LearnerQueue(far.connection, far.keys, 2)
    far.queue.claim("nonce", "the next one", 30.0)
    with serve(far):
        for phase in (READING_DATA, "loading the model"):
            far.queue.publish_contract(encode(far.contract))
            far.queue.beat(30.0, phase)
        host.thread.join(1.0)  # it looks again, at what the earlier one announced
        far.announce(0)
        wait_until(lambda: host.error or host.engine.version, "weights")
    assert host.error is None
    assert host.engine.version == Version(2, 0)


@pytest.mark.parametrize("trusts", [True, False])
def test_code_of_a_model_is_not_fetched(
    far: Run, server: FileServer, queue_server: LocalServer, run_name: str, tmp_path: Path, trusts: bool
) -> None:
    """An engine that knows the model needs none of the code that its config.json names."""
    host = OtherHost(queue_server.url, run_name, tmp_path / "other", trust_remote_code=trusts)
    (far.folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "code.Model"}}))
    far.contract = replace(far.contract, model_files=shared_files(far.folder))
    far.queue.publish_contract(encode(far.contract))
    far.announce(0)
    host.start()
    try:
        wait_until(lambda: host.error or host.engine.version, "an error, or weights")
        assert (host.error is not None) is trusts
        assert not trusts or "code is not fetched: copy the learner's model folder" in str(host.error)
    finally:
        host.stop()
    assert not list(host.cache.rglob("*.py"))


def test_a_rewarder_gets_the_tokenizer_alone(far: Run, server: FileServer, tmp_path: Path) -> None:
    far.announce(0)
    folder = fetcher_of(far, tmp_path / "mine").with_tokenizer(far.contract)
    assert [path.name for path in folder.iterdir() if path.name[0] != "."] == ["tokenizer.json"]
    assert hash_tokenizer(folder) == far.contract.tokenizer_hash


def test_a_folder_of_the_model_without_its_files_is_not_used(
    far: Run, server: FileServer, tmp_path: Path
) -> None:
    """As an empty volume, or a folder that another user may not read."""
    far.announce(0)
    (empty := tmp_path / "empty").mkdir()
    folder = fetcher_of(far, tmp_path / "mine").with_tokenizer(replace(far.contract, model=str(empty)))
    assert hash_tokenizer(folder) == far.contract.tokenizer_hash


@pytest.mark.parametrize("way", ["auto", "folder"])
def test_a_model_folder_with_another_config_is_not_used(
    far: Run, server: FileServer, queue_server: LocalServer, run_name: str, tmp_path: Path, way: str
) -> None:
    """Which would sample with other stop tokens, or other positions."""
    here = tmp_path / "here"
    shutil.copytree(far.folder, here)
    (here / "config.json").write_text('{"eos_token_id": 3}')
    far.contract = replace(far.contract, model=str(here))
    far.queue.publish_contract(encode(far.contract))
    far.announce(0)
    host = OtherHost(queue_server.url, run_name, tmp_path / "other", weights_from=way).start()
    wait_until(lambda: host.error or host.model, "an error, or an engine")
    host.stop()
    if way == "auto":
        assert host.model is not None
        assert (host.model / "config.json").read_text() == '{"eos_token_id": 2}'
    else:
        assert isinstance(host.error, ContractMismatch)
        assert f"{here / 'config.json'} is not the learner's file of this name: copy" in str(host.error)


@pytest.fixture
def store(far: Run, tmp_path: Path) -> FileStore:
    """The run's files in an object store, which is a folder here."""
    names = [one.name for one in far.contract.model_files]
    store = FileStore(
        f"file://{tmp_path}/store/run", far.folder, names, 1.0, threading.Event(), lambda: None
    )
    far.queue.source = store
    return store


def test_all_may_come_from_an_object_store(far: Run, store: FileStore, host: OtherHost) -> None:
    far.announce(0)
    host.start().wait_for(0)
    assert host.model is not None
    assert host.model.is_relative_to(host.cache)
    shutil.rmtree(far.run_folder.versions)
    for step in (1, 2):
        far.announce(step)
    host.wait_for(2)


def test_a_store_and_a_server_are_different_ways(far: Run, store: FileStore, tmp_path: Path) -> None:
    weights = far.announce(0)
    assert "cache" in Path(far.weight_source("store").find(weights).path).parts
    with pytest.raises(FetchFailed, match="ACTOR_WEIGHTS_FROM=http allows no such address"):
        far.weight_source("http").find(weights)
    with pytest.raises(FetchFailed, match="ACTOR_WEIGHTS_FROM=store allows no such address"):
        far.weight_source("store").find(replace(weights, url="http://127.0.0.1:1"))
    settings = RunSettings(name="run", cache_dir=tmp_path, allow_file_store=True, join_timeout_s=0.1)
    first = ModelFetcher(RunView(far.connection, far.keys), settings, threading.Event(), "http")
    with pytest.raises(FetchFailed, match="ACTOR_WEIGHTS_FROM=http allows no such address"):
        first.with_weights(far.contract)


@pytest.mark.parametrize("way", ["folder", "http"])
def test_a_way_may_be_chosen(far: Run, server: FileServer, tmp_path: Path, way: str) -> None:
    weights = far.announce(0)
    source = far.weight_source(way)  # type: ignore[arg-type]
    assert ("cache" in Path(source.find(weights).path).parts) is (way == "http")
    shutil.rmtree(far.run_folder.versions)
    if way == "http":
        assert source.find(weights).path
    with pytest.raises(FetchFailed, match="the learner serves no files"):
        far.weight_source("http").find(replace(weights, url=""))


@pytest.mark.parametrize(
    "digest", ["../../out", "", ".", "a" * 63, "A" * 64, "/" + "a" * 63, "a/../" * 12]
)
def test_an_announced_hash_cannot_name_another_folder(
    far: Run, server: FileServer, tmp_path: Path, digest: str
) -> None:
    weights = Weights(Version(1, 0), "", digest, "", 9, *_source_of(far))
    with pytest.raises(FetchFailed, match="is no 64 hex digits"):
        far.weight_source("http").find(weights)
    assert not (tmp_path / "cache").exists()


def _source_of(run: Run) -> tuple[str, str]:
    weights = run.announce(0)
    return weights.url, weights.token


def test_another_tokenizer_than_the_contracts_is_refused(
    far: Run, server: FileServer, tmp_path: Path
) -> None:
    """The hashes of the files and that of the tokenizer are in the contract, and must agree."""
    far.announce(0)
    copy = fetcher_of(far, tmp_path / "mine", join_timeout_s=1.0)
    with pytest.raises(ContractMismatch, match="differs from the learner's"):
        copy.with_tokenizer(replace(far.contract, tokenizer_hash="0" * 64))
    (far.folder / "tokenizer.json").write_text("changed")
    other = replace(far.contract, groups_per_step=3)
    with pytest.raises(RunNotReady, match="another contract meanwhile"):  # in place of endless tries
        copy.with_tokenizer(other)
    far.queue.publish_contract(encode(other))
    with pytest.raises(FetchFailed):
        copy.with_tokenizer(other)


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_that_cannot_be_written_or_locked_is_named(
    far: Run, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "as on Lustre")

    far.announce(0)
    if locks:
        (tmp_path / "mine").write_text("")
    else:
        monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match="set RUN_CACHE_DIR"):
        fetcher_of(far, tmp_path / "mine", join_timeout_s=1.0).with_tokenizer(far.contract)


def test_first_weights_that_cannot_be_written_end_the_actor(
    far: Run, server: FileServer, host: OtherHost
) -> None:
    """It has the model's folder, so that nothing else is fetched."""
    far.announce(0)
    far.queue.publish_contract(encode(replace(far.contract, model=str(far.folder))))
    host.settings.run.cache_dir.parent.mkdir(exist_ok=True)
    host.settings.run.cache_dir.write_text("")
    host.start()
    wait_until(lambda: host.error is not None, "the actor to end")
    assert isinstance(host.error, ConfigError)
    assert "set RUN_CACHE_DIR" in str(host.error)


def test_a_file_of_an_earlier_run_in_its_own_folder_is_passed_over(
    far: Run, server: FileServer, host: OtherHost
) -> None:
    far.announce(0)
    host.start().wait_for(0)
    stale = host.settings.run.folder.version(1, 1)
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"weights of last week")
    far.announce(1)
    host.wait_for(1)


def test_it_ends_while_the_first_fetch_is_stuck(far: Run, host: OtherHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far.queue.source = Source(f"http://127.0.0.1:{silent.getsockname()[1]}", "token")
        far.announce(0)
        host.start()
        silent.accept()
        host.stop()
    assert host.error is None
    assert host.model is None


def test_it_ends_with_the_run_while_it_waits_for_the_model(far: Run, host: OtherHost) -> None:
    far.queue.source = Source("http://127.0.0.1:1", "token")
    far.announce(0)
    with structlog.testing.capture_logs() as logs:
        host.start()
        wait_until(lambda: any("fetching them" in log["event"] for log in logs), "a try")
    far.queue.set_state("ended")
    wait_until(lambda: not host.thread.is_alive(), "the actor's end")
    assert host.error is None


def test_a_long_fetch_that_fails_ends_no_actor(
    far: Run, server: FileServer, host: OtherHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.announce(0)
    host.start().wait_for(0)
    monkeypatch.setattr(ModelFetcher, "version", slow_and_failing := SlowAndFailing())
    far.announce(1)
    wait_until(lambda: slow_and_failing.calls == 1, "a fetch")
    assert host.error is None
    assert host.thread.is_alive()
    monkeypatch.undo()
    far.announce(2)
    host.wait_for(2)


class SlowAndFailing:
    """A fetch that takes longer than RUN_JOIN_TIMEOUT_S, and then fails."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _weights: Weights) -> Path:
        time.sleep(6)
        self.calls += 1
        raise FetchFailed("deleted there")


def test_a_failed_fetch_is_not_repeated_at_once(
    far: Run, server: FileServer, host: OtherHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.announce(0)
    host.start().wait_for(0)
    tries: list[float] = []

    def fail(_copy: ModelFetcher, _weights: Weights) -> Path:
        tries.append(time.monotonic())
        raise FetchFailed("cut")

    monkeypatch.setattr(ModelFetcher, "version", fail)
    far.announce(1)
    wait_until(lambda: len(tries) == 3, "three tries")
    assert tries[1] - tries[0] >= 1
    assert tries[2] - tries[1] >= 2


def test_strange_entries_stop_no_cleaning(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number:064}").mkdir()
        os.utime(tmp_path / f"{number:064}", (1e9 + number, 1e9 + number))
    (tmp_path / "note.txt").write_text("")
    os.utime(tmp_path / "note.txt", (1.0, 1.0))
    model_folder._delete_old(tmp_path, "*", 4)
    assert sorted(path.name[-1:] for path in tmp_path.iterdir()) == ["4", "5", "6", "7", "t"]


def test_models_of_earlier_contracts_are_deleted(
    far: Run, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "_KEEP_S", -1.0)
    far.announce(0)
    for length in (31, 32, 33):
        contract = replace(far.contract, tokens_per_sequence=length)
        folder = fetcher_of(far, tmp_path / "cache").with_weights(contract)
        assert list(folder.parent.glob("model-*")) == [folder]


def test_a_folder_that_cannot_be_looked_into_is_not_here(far: Run, tmp_path: Path) -> None:
    """As with the right of another user alone, Path.is_file raises for so long a name."""
    weights = far.announce(0)
    source = WeightSource(RunFolder(tmp_path / ("x" * 300)), fetcher_of(far, tmp_path), "auto")
    assert not source._is_here(replace(weights, url="http://127.0.0.1:1"))


def test_an_error_while_a_folder_is_locked_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="of the block"), alone(tmp_path):
        raise FileNotFoundError("of the block")
    with alone(tmp_path, wait_s=0.0):
        pass


def test_several_actors_of_a_host_share_what_they_fetch(far: Run, server: FileServer) -> None:
    def fetch_all(_: int) -> None:
        source = far.weight_source("http")
        for weights in announced:
            assert Path(source.find(weights).path, "model.safetensors").read_bytes()
            together.wait(300)  # one that is eight versions behind finds its files deleted

    announced, together = [far.announce(step) for step in range(40)], threading.Barrier(4)
    with ThreadPoolExecutor(4) as actors:
        list(actors.map(fetch_all, range(4)))


@pytest.mark.parametrize("links", [True, False])
def test_the_weights_are_put_beside_the_models_files(
    far: Run, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    far.announce(0)
    folder = fetcher_of(far, tmp_path / "mine").with_weights(far.contract)
    assert (folder / "model.safetensors").read_bytes() == b"weights 0"
    assert not list(folder.glob(".model*"))


def test_a_user_without_a_home_is_told_only_when_something_is_fetched(
    far: Run, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    far.announce(0)
    copy = ModelFetcher(RunView(far.connection, far.keys), RunSettings(), threading.Event())
    with pytest.raises(ConfigError, match=r"RUN_CACHE_DIR: .* is in no home"):
        copy.with_tokenizer(far.contract)
