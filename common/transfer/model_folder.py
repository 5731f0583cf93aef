"""The folder of the run's model on this host: the learner's own where it is visible, else a copy."""

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.common.broker.run_view import RunView
from penstock.common.config.settings import RunSettings, WeightsFrom
from penstock.common.deadline import Deadline, run_aside
from penstock.common.errors import (
    ConfigError,
    ContractMismatch,
    DeadlineExceeded,
    MalformedMessage,
    RunNotReady,
    ServerUnavailable,
)
from penstock.common.files.hashing import hash_file
from penstock.common.files.reading import parse_json, reading
from penstock.common.files.run_folder import version_name
from penstock.common.log import get_logger, shorten
from penstock.common.transfer.download import (
    CacheUnusable,
    FetchFailed,
    Source,
    Wanted,
    alone,
    download,
    not_stored,
)
from penstock.common.transfer.object_store import is_store
from penstock.common.transfer.patching import HASH, patch
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import (
    LARGEST_SHARED_FILE,
    TOKENIZER_FILES,
    Contract,
    ModelFile,
    check_tokenizer,
    is_shared,
    is_weights,
)
from penstock.common.wire.messages import INDEX_FILE, WEIGHTS_FILE, Weights

Result = TypeVar("Result")
_POLL_S, _RETRY_S = 0.2, 2.0
_KEEP, _KEEP_S, _MOST = 2, 60.0, 8
"""The newest two fetched versions stay, the newest eight for 60 s. The next delta changes the newest,
and other actors of the host may use older ones."""

log = get_logger(__name__)


def shared_files(folder: Path, with_weights: bool = False) -> tuple[ModelFile, ...]:
    """Return those files of a model folder that are sent to other hosts, ordered by name.

    Weights are among them if asked for. Other files of over 256 MiB are left out. Raise ConfigError for
    a damaged index of the weights, OSError if a file cannot be read.
    """
    weights = _weights_of(folder) if with_weights else set()
    found = []
    for path in sorted(folder.iterdir()):
        if (path.name in weights or is_shared(path.name)) and path.is_file():
            size = path.stat().st_size
            if path.name in weights or size <= LARGEST_SHARED_FILE:
                found.append(ModelFile(path.name, size, hash_file(path)))
    return tuple(found)


def _weights_of(folder: Path) -> set[str]:
    """Return the names of a model folder's safetensors files, with that of their index if it has one.

    Raise ConfigError for a damaged index, OSError if it cannot be read.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return {WEIGHTS_FILE}
    with reading(index, "Restore the model folder"):
        return {index.name, *parse_json(index.read_bytes())["weight_map"].values()}


def check_base(contract: Contract, folder: Path) -> Path:
    """Return the model's folder on this host, after checking the contract's files of it.

    Those are configs, and the weights that adapters are added to; other weights are not checked here.
    Raise ContractMismatch if one is missing or not the learner's.
    """
    for one in contract.model_files:
        if not _is_learners(folder, one):
            why = ", and the run's versions are LoRA adapters to it" if is_weights(one.name) else ""
            raise ContractMismatch(
                f"{folder / one.name} is not the learner's file of this name{why}: copy the learner's "
                "model folder, or move this one away and let the learner serve its files"
            )
    return folder


def _is_learners(folder: Path, one: ModelFile) -> bool:
    """Return whether the folder has this file of the learner's, as its hash says."""
    try:
        return hash_file(folder / one.name) == one.hash
    except OSError:
        return False


def _is_here(folder: str, one: ModelFile) -> bool:
    """Return whether the folder has this file; weights, which `check_base` checks, need only be read."""
    if is_weights(one.name):
        return os.access(os.path.join(folder, one.name), os.R_OK)
    return _is_learners(Path(folder), one)


class FetchStopped(ServerUnavailable):
    """The process was told to stop, or the run has ended, before all files were fetched."""


class ModelFetcher:
    """Fetches what a process needs of a run's model, into the run's folder below RUN_CACHE_DIR.

    `view` reads the announcements, which name the file server. Waits end after RUN_JOIN_TIMEOUT_S of
    `run` without a heartbeat of the learner, and when `stopping` is set. `way` is
    ACTOR_WEIGHTS_FROM, by which versions may come.
    """

    def __init__(
        self, view: RunView, run: RunSettings, stopping: threading.Event, way: WeightsFrom = "auto"
    ) -> None:
        self._view, self._run, self._stopping, self._way = view, run, stopping, way

    @property
    def _folder(self) -> Path:
        """Return the run's folder below RUN_CACHE_DIR. Raise ConfigError for a "~" without a home."""
        try:
            return self._run.cache_dir.expanduser() / self._run.name
        except RuntimeError as error:
            raise ConfigError(
                f"RUN_CACHE_DIR: {self._run.cache_dir} is in no home, as this user has none ({error}): "
                "set it to another folder"
            ) from error

    def _source(self, weights: Weights) -> Source:
        """Return where announced weights, and the model's files, can be fetched.

        Raise FetchFailed for an address that ACTOR_WEIGHTS_FROM does not allow.
        """
        if self._way in ("http", "store") and is_store(weights.url) is not (self._way == "store"):
            raise FetchFailed(
                f"version {weights.version} is announced at {shorten(weights.url)}, and "
                f"ACTOR_WEIGHTS_FROM={self._way} allows no such address: set it to auto"
            )

        def moved() -> bool:
            """Return whether the learner has announced another address or token since."""
            now = self._view.weights()
            return now is not None and (now.url, now.token) != (weights.url, weights.token)

        return Source(weights.url, weights.token, self._run.allow_file_store, moved)

    def with_tokenizer(self, contract: Contract) -> Path:
        """Return the model's folder on this host, or a copy with the tokenizer's files alone.

        Raise ContractMismatch if the folder has another tokenizer than the learner's, ConfigError if it
        has none, DeadlineExceeded or FetchFailed if nothing can be fetched, RunNotReady if meanwhile the
        run has another contract, FetchStopped, or Connection.execute's errors.
        """
        return self._found(contract, TOKENIZER_FILES) or check_tokenizer(contract)

    def with_weights(self, contract: Contract, runs_code: bool = False) -> Path:
        """Return the model's folder on this host, or a copy with weights: those that are announced now,
        or, where the versions are adapters, the folder's own.

        Raise what `with_tokenizer` raises, and ContractMismatch if code of the folder is to be run
        (`runs_code`) and the model has some: code is not fetched.
        """
        every = [one.name for one in contract.model_files]
        copy = self._found(contract, every, with_weights=contract.adapter is None)
        if copy and runs_code:
            _check_no_code(copy)
        return copy or check_tokenizer(contract)

    def version(self, weights: Weights) -> Path:
        """Return the folder of fetched weights, which holds their files alone. Raise FetchFailed.

        Its name is their hash. If an earlier version is here, only what changed is fetched, see `patch`.
        Older versions are deleted, see `_delete_old`. Raise Connection.execute's errors too.
        """
        if not HASH.fullmatch(weights.hash):
            raise FetchFailed(
                f"the announced hash {shorten(repr(weights.hash))} of version {weights.version} is no "
                "64 hex digits: see who else writes to the queue server"
            )
        folder = self._folder / "versions" / weights.hash
        try:
            self._complete(weights, folder)
            with contextlib.suppress(OSError):
                os.utime(folder)
        finally:
            for kept in (folder.parent, self._folder / "deltas"):
                _delete_old(kept, "*", _KEEP)
        return folder

    def _complete(self, weights: Weights, folder: Path) -> None:
        """Put the files of weights into the folder. Raise FetchFailed, Connection.execute's errors."""
        source = self._source(weights)
        view = self._view if self._way in ("auto", "queue") else None
        made = patch(source, view, weights, self._folder)
        name = version_name(weights.version.incarnation, weights.version.step)
        for one in weights.files:
            if one.name not in made:
                wanted = Wanted(f"versions/{name}/{one.name}", one.size, one.hash)
                download(source, wanted, folder / one.name)

    def _found(
        self, contract: Contract, names: Iterable[str], with_weights: bool = False
    ) -> Path | None:
        """Return a copy of the model's files with these names; None if its folder here has them.

        Raise what `with_tokenizer` raises, such as RunNotReady, ConfigError if RUN_CACHE_DIR cannot be
        written, and FetchFailed if a file here that differs is not served for RUN_JOIN_TIMEOUT_S: it may
        have been changed since the learner's start.
        """
        wanted = [one for one in contract.model_files if one.name in names]
        is_there = all(os.access(os.path.join(contract.model, one.name), os.R_OK) for one in wanted)
        if all(_is_here(contract.model, one) for one in wanted):
            return None
        log.info(f"The learner's files of {contract.model} are not here: fetching them.")
        deadline = Deadline(self._run.join_timeout_s, math.inf)
        limit = Deadline(self._run.join_timeout_s if is_there else math.inf, math.inf)
        while True:
            weights = self._announced(contract, deadline)
            fetch = partial(self._fetch, contract, wanted, weights, with_weights)
            try:
                return check_tokenizer(replace(contract, model=str(self._unless_stopped(fetch))))
            except CacheUnusable as error:
                raise ConfigError(str(error)) from error
            except FetchFailed as error:
                self._check_published(contract)
                if deadline.expired(progress=self._view.learner()) or limit.expired():
                    raise
                self._view.report("The model's files were not fetched.", cause=str(error))
                self._pause(_RETRY_S)

    def _check_published(self, contract: Contract) -> None:
        """Raise RunNotReady if the queue server now holds another contract than `contract`.

        Another client wrote `contract`, or the learner was restarted with other settings.
        """
        data = self._view.contract()
        with contextlib.suppress(MalformedMessage):
            if data is not None and decode(data, Contract).hash != contract.hash:
                raise RunNotReady("the learner published another contract meanwhile: join the run again")

    def _announced(self, contract: Contract, deadline: Deadline) -> Weights:
        """Wait for an announcement, and return it. Raise ContractMismatch if it names no file server.

        One of an earlier learner than the present one may name none. Raise DeadlineExceeded if no
        heartbeat comes meanwhile, FetchStopped if told to stop.
        """
        while (weights := self._view.weights()) is None or not (
            weights.url or weights.version.incarnation >= self._view.incarnation()
        ):
            status = self._view.learner()
            if deadline.expired(progress=status):
                raise DeadlineExceeded(
                    f"no weights were announced, and no heartbeat came for {deadline.limit_s:g} s "
                    f"(RUN_JOIN_TIMEOUT_S): {status}; see what the learner does, or start it again"
                )
            self._pause(_POLL_S)
        if not weights.url:
            raise ContractMismatch(
                f"the contract names the model folder {contract.model}, which does not exist on this "
                "host or has other files, and the learner serves none (LEARNER_FILES_ADDRESS): share "
                "the folder, copy it to this path, or let the learner serve its files"
            )
        return weights

    def _unless_stopped(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, and raise what it raises, from a thread of its own.

        Raise FetchStopped, and leave the thread alone, when told to stop or once the run has ended.
        """
        done = run_aside(work)
        while not done.done():
            self._pause(_POLL_S)
        return done.result()

    def _pause(self, seconds: float) -> None:
        """Wait. Raise FetchStopped when told to stop or once the run has ended."""
        if self._stopping.wait(seconds) or self._view.ended():
            raise FetchStopped("the process has to stop, and the model's files are not here yet")

    def _put_version(self, weights: Weights, folder: Path) -> None:
        """Put the files of weights into a model's folder, in place of those of an earlier version there.

        Raise FetchFailed, Connection.execute's errors.
        """
        fetched, names = self.version(weights), {one.name for one in weights.files}
        for name in names:
            _put(fetched / name, folder)
        with contextlib.suppress(OSError):
            for old in [path for path in folder.iterdir() if is_weights(path.name)]:
                if old.name not in names:  # an engine would load it too
                    old.unlink(missing_ok=True)

    def _fetch(
        self, contract: Contract, wanted: list[ModelFile], weights: Weights, with_weights: bool
    ) -> Path:
        """Return a folder with the wanted files, and if asked the weights. Raise FetchFailed."""
        folder = self._folder / f"model-{contract.hash}"
        source = self._source(weights)
        for one in wanted:
            file = Wanted(f"model/{one.name}", one.size, one.hash)
            if is_weights(one.name):  # kept by their hash, for other contracts too
                download(source, file, self._folder / "weights" / one.hash / one.name)
                _put(self._folder / "weights" / one.hash / one.name, folder)
            else:
                download(source, file, folder / one.name)
        if with_weights:
            self._put_version(weights, folder)
        with contextlib.suppress(OSError):
            os.utime(folder)
        _delete_old(self._folder, "model-*", 1)
        return folder


def _put(file: Path, folder: Path) -> None:
    """Put a fetched file into another folder too. Raise FetchFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            _link_or_copy_whole(file, folder / file.name)
    except OSError as error:
        raise not_stored(str(file), folder / file.name, error) from error


def _link_or_copy_whole(file: Path, target: Path) -> None:
    """Put a file at `target` too, as a link where the file system has them. Raise OSError.

    What a killed process left half-way is replaced. The caller holds the lock of the folder.
    """
    aside = target.with_name(f".{target.name}.new")
    aside.unlink(missing_ok=True)
    try:
        os.link(file, aside)
    except OSError:
        shutil.copyfile(file, aside)
    aside.replace(target)


def _delete_old(parent: Path, names: str, keep: int) -> None:
    """Delete folders of over a minute ago in `parent`, but not the newest `keep` and what is fetched.

    A version that an actor has just found is not deleted before its engine has read it, unless 8 newer
    ones came in that time. What cannot be deleted stays: another actor may delete the same ones.
    """
    with contextlib.suppress(OSError):
        fetched = sorted((path.stat().st_mtime, path) for path in parent.glob(names) if path.is_dir())
        for newer, (found_at, old) in enumerate(reversed(fetched)):
            if newer >= _MOST or (newer >= keep and time.time() - found_at > _KEEP_S):
                with contextlib.suppress(FetchFailed, OSError), alone(old, wait_s=0.0):
                    shutil.rmtree(old, ignore_errors=True)


def _check_no_code(folder: Path) -> None:
    """Raise ContractMismatch if the model's config.json names code, which is not fetched."""
    with reading(folder / "config.json", "Copy the learner's model folder"):
        code = parse_json((folder / "config.json").read_bytes()).get("auto_map")
    if code:
        raise ContractMismatch(
            f"the model has the code that its config.json names as auto_map ({shorten(repr(code))}), "
            "ACTOR_TRUST_REMOTE_CODE is on, and code is not fetched: copy the learner's model folder to "
            "the same path on this host, or set ACTOR_TRUST_REMOTE_CODE=false"
        )
