"""Where an actor finds the weights of an announced version: in the run's folder, or fetched."""

import os
from dataclasses import replace

from penstock.actors.engine import WeightsRejected
from penstock.common.config.settings import WeightsFrom
from penstock.common.files.run_folder import RunFolder
from penstock.common.transfer.download import FetchFailed
from penstock.common.transfer.model_folder import ModelFetcher
from penstock.common.wire.messages import Weights


class WeightSource:
    """Finds versions in `folder`, the run's, or fetches them by `fetcher`; `way` may allow one alone.

    With "auto" the folder is used where it has the version, and not after `distrust`. With "auto" and
    "queue" what changed comes from the queue server, and whole files from where they are announced.
    """

    def __init__(self, folder: RunFolder, fetcher: ModelFetcher, way: WeightsFrom) -> None:
        self._folder, self._fetcher, self._way = folder, fetcher, way
        self._distrusted = ""

    def find(self, weights: Weights) -> Weights:
        """Return announced weights with the path that they have on this host. Block while they come.

        The announced path is not used: whoever can write to the queue server cannot choose a file. A
        file in the run's folder is not checked here. Raise FetchFailed if the weights cannot be fetched,
        WeightsRejected if a file in the run's folder is a link that leads out of the versions, and
        Connection.execute's errors.
        """
        if self._way == "folder" or (self._way == "auto" and self._is_here(weights)):
            return find_weights(weights, self._folder)
        if not weights.url:
            raise FetchFailed(
                f"version {weights.version} cannot be fetched, because the learner serves no files: set "
                "LEARNER_FILES_ADDRESS there, or ACTOR_WEIGHTS_FROM=folder here"
            )
        return replace(weights, path=str(self._fetcher.version(weights)))

    def distrust(self, weights: Weights) -> None:
        """Do not take these weights from the run's folder, as the file there is another one."""
        self._distrusted = weights.hash

    def _is_here(self, weights: Weights) -> bool:
        """Return whether the run's folder has this version's files, or nothing else can have them."""
        if not weights.url:
            return True
        path = self._folder.version(weights.version.incarnation, weights.version.step)
        all_here = all(os.path.isfile(path / one.name) for one in weights.files)  # without rights: False
        return weights.hash != self._distrusted and all_here


def find_weights(weights: Weights, folder: RunFolder) -> Weights:
    """Return a copy of announced weights with the path that their version has in the run's folder.

    The announced path is not used. Raise WeightsRejected if a file there is a link that leads out of
    the folder of versions. Whether there is a file is not checked.
    """
    path = folder.version(weights.version.incarnation, weights.version.step)
    for one in weights.files:
        if not (path / one.name).resolve().is_relative_to(folder.versions.resolve()):
            raise WeightsRejected(
                f"{path / one.name} leads out of {folder.versions}; weights are read from the run's "
                "folder only: put the file there instead of the link"
            )
    return replace(weights, path=str(path))
