"""The folder of the run's model on this host: the learner's own where it is visible, else a copy."""

import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.common.broker.run_view import RunView
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import ContractMismatch, DeadlineExceeded, ServerUnavailable
from penstock.common.files.atomic import hash_file
from penstock.common.files.reading import parse_json, reading
from penstock.common.log import get_logger, shorten
from penstock.common.transfer.download import FetchFailed, Source, Wanted, download
from penstock.common.wire.contract import (
    LARGEST_SHARED_FILE,
    TOKENIZER_FILES,
    Contract,
    ModelFile,
    check_tokenizer,
    is_shared,
)
from penstock.common.wire.messages import Weights

WEIGHTS_FILE = "model.safetensors"
_HASH = re.compile("[0-9a-f]{64}")
_POLL_S = 0.5
_KEEP = 4  # fetched versions of a run: several actors of a host may be at different ones

log = get_logger(__name__)


def shared_files(folder: Path) -> tuple[ModelFile, ...]:
    """Return those files of a model folder that are sent to other hosts, ordered by name.

    Larger ones than 256 MiB are left out. Raise OSError if a file cannot be read.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if is_shared(path.name) and path.is_file():
            size = path.stat().st_size
            if size <= LARGEST_SHARED_FILE:
                found.append(ModelFile(path.name, size, hash_file(path)))
    return tuple(found)


class ModelCopy:
    """Fetches what a process needs of a run's model, into the run's folder below RUN_CACHE_DIR.

    `view` reads the announcements, which name the file server. Waits end after RUN_JOIN_TIMEOUT_S of
    `run` without a heartbeat of the learner, and when `stopping` is set.
    """

    def __init__(self, view: RunView, run: RunSettings, stopping: threading.Event) -> None:
        self._view, self._run, self._stopping = view, run, stopping
        self._folder = run.cache_dir.expanduser() / run.name

    def with_tokenizer(self, contract: Contract) -> Path:
        """Return the model's folder on this host, or a copy with the tokenizer's files alone.

        Raise ContractMismatch if the folder has another tokenizer than the learner's, ConfigError if it
        has none, DeadlineExceeded if nothing can be fetched, or Connection.execute's errors.
        """
        return self._found(contract, TOKENIZER_FILES) or check_tokenizer(contract)

    def with_weights(self, contract: Contract) -> Path:
        """Return the model's folder on this host, or a copy with the weights that are announced now.

        Raise what `with_tokenizer` raises, and ContractMismatch for a model that needs code of its
        folder: code is not fetched.
        """
        every = [one.name for one in contract.model_files]
        return self._found(contract, every, with_weights=True) or check_tokenizer(contract)

    def version(self, weights: Weights) -> Path:
        """Return the folder of fetched weights, model.safetensors alone. Raise FetchFailed.

        Its name is their hash. The versions that were fetched longest ago are deleted, all but 4.
        """
        if not _HASH.fullmatch(weights.hash):
            raise FetchFailed(
                f"the announced hash {shorten(repr(weights.hash))} of version {weights.version} is no "
                "SHA-256 in hex: see who else writes to the queue server"
            )
        folder = self._folder / "versions" / weights.hash
        wanted = Wanted(
            f"versions/{weights.version.incarnation:06d}-{weights.version.step:08d}/{WEIGHTS_FILE}",
            weights.size, weights.hash,
        )  # fmt: skip
        download(Source(weights.url, weights.token), wanted, folder / WEIGHTS_FILE)
        os.utime(folder)
        fetched = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in fetched[_KEEP:]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _found(
        self, contract: Contract, names: Iterable[str], with_weights: bool = False
    ) -> Path | None:
        """Return a copy of the model's files with these names; None if the folder itself is here."""
        if os.path.isdir(contract.model) or not contract.model_files:
            return None
        wanted = [one for one in contract.model_files if one.name in names]
        log.info(f"The model's folder {contract.model} is not on this host: fetching its files.")
        deadline = Deadline(self._run.join_timeout_s)
        while True:
            weights = self._announced(contract, deadline)
            try:
                folder = self._fetch(contract, wanted, weights, with_weights)
                return check_tokenizer(replace(contract, model=str(folder)))
            except FetchFailed as error:
                if deadline.expired():
                    raise
                log.warning(shorten(f"The model's files were not fetched: {error}"))
                self._pause()

    def _announced(self, contract: Contract, deadline: Deadline) -> Weights:
        """Wait for an announcement, and return it. Raise ContractMismatch if it names no file server.

        Raise DeadlineExceeded if no heartbeat comes meanwhile, ServerUnavailable if told to stop.
        """
        while (weights := self._view.weights()) is None:
            sign = self._view.learner()
            if deadline.expired(progress=sign):
                raise DeadlineExceeded(
                    f"no weights were announced, and no heartbeat came for {deadline.limit_s:g} s "
                    f"(RUN_JOIN_TIMEOUT_S): {sign}; see what the learner does, or start it again"
                )
            self._pause()
        if not weights.url:
            raise ContractMismatch(
                f"the contract names the model folder {contract.model}, which does not exist on this "
                "host, and the learner serves no files (LEARNER_FILES_ADDRESS): share the folder, copy "
                "it to this path, or let the learner serve its files"
            )
        return weights

    def _pause(self) -> None:
        """Wait half a second. Raise ServerUnavailable if told to stop."""
        if self._stopping.wait(_POLL_S):
            raise ServerUnavailable("told to stop while the model's files were fetched")

    def _fetch(
        self, contract: Contract, wanted: list[ModelFile], weights: Weights, with_weights: bool
    ) -> Path:
        """Return a folder with the wanted files, and if asked the weights. Raise FetchFailed."""
        folder = self._folder / f"model-{contract.hash}"
        source = Source(weights.url, weights.token)
        for one in wanted:
            download(source, Wanted(f"model/{one.name}", one.size, one.hash), folder / one.name)
        if with_weights:
            _check_no_code(folder)
            fetched = self.version(weights) / WEIGHTS_FILE
            link = folder / f".{WEIGHTS_FILE}.{os.getpid()}"
            link.unlink(missing_ok=True)
            os.link(fetched, link)
            link.replace(folder / WEIGHTS_FILE)
        return folder


def _check_no_code(folder: Path) -> None:
    """Raise ContractMismatch if the model's config.json names code, which is not fetched."""
    with reading(folder / "config.json", "Copy the learner's model folder"):
        code = parse_json((folder / "config.json").read_bytes()).get("auto_map")
    if code:
        raise ContractMismatch(
            f"the model needs the code that its config.json names as auto_map ({shorten(repr(code))}), "
            "and code is not fetched: copy the learner's model folder to the same path on this host"
        )
