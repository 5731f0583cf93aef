"""The learner's files in an object store, for hosts that do not reach the learner's."""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.transfer.model_folder import WEIGHTS_FILE
from penstock.common.transfer.object_store import StoreFailed, list_folder, put_file, remove_folder
from penstock.common.wire.messages import Weights
from penstock.learner.state.versions import KEEP

_VERSION = re.compile(r"\d{6,15}-\d{8,15}")
_RETRY_S = 2.0

log = get_logger(__name__)


class FileStore:
    """Copies a run's files to the folder `url` of an object store, where others fetch them.

    Making one copies the files of the folder `model` with these `names`. A copy is tried for `retry_s`
    seconds, and `progress` is called meanwhile. Raise ConfigError if the store does not take a file.
    """

    def __init__(
        self, url: str, model: Path, names: Collection[str], retry_s: float, progress: Callable[[], None]
    ) -> None:
        self.url, self.token = url, ""
        self._retry_s, self._progress = retry_s, progress
        try:
            for name in names:
                put_file(model / name, f"{url}/model/{name}", progress)
            log.info(f"Actors and rewarders on other hosts get the run's files from {url}.")
        except StoreFailed as error:
            raise ConfigError(f"LEARNER_FILES_ADDRESS: {error}") from error

    def offer(self, weights: Weights) -> Weights:
        """Copy a version that is on this host, and return its announcement, which names the store.

        Of the versions in the store the newest 4 are kept. Raise StoreFailed if no try succeeds.
        """
        folder = Path(weights.path)
        target = f"{self.url}/versions/{folder.name}/{WEIGHTS_FILE}"
        deadline = Deadline(self._retry_s)
        while True:
            try:
                put_file(folder / WEIGHTS_FILE, target, self._progress)
                break
            except StoreFailed as error:
                if deadline.expired():
                    raise
                log.warning(f"Version {weights.version} is not in the store yet: {error}")
                self._progress()
                time.sleep(_RETRY_S)
        self._remove_old()
        return replace(weights, url=self.url, token="")

    def _remove_old(self) -> None:
        """Delete all but the newest versions in the store. What stays is logged as a warning."""
        versions = f"{self.url}/versions"
        try:
            names = [name for name in list_folder(versions) if _VERSION.fullmatch(name)]
            for name in names[:-KEEP]:
                remove_folder(f"{versions}/{name}")
        except StoreFailed as error:
            log.warning(f"Old versions stay in the store: {error}")
