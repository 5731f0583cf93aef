"""The learner's files in an object store, for hosts that do not reach the learner's."""

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.transfer.download import FetchFailed, Source, limit_s
from penstock.common.transfer.object_store import (
    PackageMissing,
    StoreFailed,
    list_folder,
    put_file,
    remove_folder,
)
from penstock.common.wire.messages import DELTA_FILE, Weights
from penstock.learner.state.versions import FOLDER_NAME, KEEP

_RETRY_S = 2.0
_MOST = 2 * KEEP
"""Versions in the store at most, however slow a download may be: each is as large as the model."""

log = get_logger(__name__)


class FileStore:
    """Copies a run's files to the folder `url` of an object store, where others fetch them.

    Making one copies the files of the folder `model` with these `names`. A copy is tried for `retry_s`
    seconds, or until `stopping` is set; `progress` is called meanwhile. Raise ConfigError for a URL that
    nobody follows, or without the package for it, StoreFailed if the store does not take a file.
    """

    def __init__(
        self, url: str, model: Path, names: Collection[str], retry_s: float, stopping: threading.Event,
        progress: Callable[[], None],
    ) -> None:  # fmt: skip
        try:
            Source(url, "", files=True).address_of("model")
        except FetchFailed as error:
            raise ConfigError(f"LEARNER_FILES_ADDRESS: {error}") from error
        self.url, self.token = url, ""
        self.is_used = True  # who reads a store is not known
        self._retry_s, self._stopping, self._progress = retry_s, stopping, progress
        self._offered: Weights | None = None
        self._replaced: dict[str, float] = {}  # by version, when the next one came
        for name in names:
            self._put(model / name, f"{url}/model/{name}")
        log.info(f"Actors and rewarders on other hosts get the run's files from {url}.")

    def offer(self, weights: Weights) -> Weights:
        """Copy a version that is on this host, and return its announcement, which names the store.

        The version that was offered last is not copied again. Of the versions in the store up to this
        one the newest 4 are kept, and up to 4 older ones whose download may have begun before the next
        version and not be over. Raise StoreFailed if no try succeeds.
        """
        if weights != self._offered:
            folder = Path(weights.path)
            names = [DELTA_FILE] if weights.deltas else []
            for name in (*names, *(one.name for one in weights.files)):
                self._put(folder / name, f"{self.url}/versions/{folder.name}/{name}")
            self._offered = weights
            self._remove_old(folder.name, weights.size)
        return replace(weights, url=self.url, token="")

    def being_fetched(self) -> frozenset[str]:
        """Return no names: what is copied is read no more on this host."""
        return frozenset()

    def _put(self, file: Path, url: str) -> None:
        """Copy a file, until it succeeds. Raise StoreFailed at the end of the time, or to stop.

        Raise ConfigError at once if the package for such URLs is not installed.
        """
        lost: Deadline | None = None  # since the first failure: an upload may take longer by itself
        while True:
            try:
                return put_file(file, url, self._progress)
            except PackageMissing as error:
                raise ConfigError(f"LEARNER_FILES_ADDRESS: {error}") from error
            except StoreFailed as error:
                if (lost is not None and lost.expired()) or self._stopping.is_set():
                    raise
                lost = lost or Deadline(self._retry_s, math.inf)
                log.warning(f"{file.name} is not in the store yet: {error}")
                self._progress()
                self._stopping.wait(_RETRY_S)

    def _remove_old(self, newest: str, size: int) -> None:
        """Delete old versions, up to `newest`, from the store. Log a warning if one cannot be deleted.

        `size` is the bytes of a version, which set how long a download may take. Later versions than
        `newest` belong to another run of this name, which may still go on.
        """
        versions, now = f"{self.url}/versions", time.monotonic()
        try:
            found = list_folder(versions)
            names = [name for name in found if FOLDER_NAME.fullmatch(name) and name <= newest]
            self._replaced = {name: self._replaced.get(name, now) for name in names[:-1]}
            for name in names[:-KEEP]:
                if name in names[:-_MOST] or now - self._replaced[name] >= limit_s(size):
                    remove_folder(f"{versions}/{name}")
        except StoreFailed as error:
            log.warning(f"Old versions stay in the store: {error}")
