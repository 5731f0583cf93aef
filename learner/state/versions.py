"""Publishing a version of the weights: a new folder each time, hashed, renamed, then announced.

A path is never written twice: an engine that reads it can never see half a version.
"""

import shutil

from penstock.common.files.atomic import hash_file
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Weights
from penstock.learner.policy.collective import TrainablePolicy

KEEP = 4
"""Version folders kept: an actor may still be reading the one before the announced one."""


def write_version(
    folder: LearnerFolder, policy: TrainablePolicy, version: Version, parent: str
) -> Weights:
    """Export the policy as a version and return its announcement. Raise RunTaken, DiskFull.

    `parent` is the hash of the version before. All but the newest KEEP versions are deleted.
    """
    path = folder.version(version.incarnation, version.step)
    folder.write_folder("the weights of a version", path, policy.export)
    for old in sorted(path.parent.glob("[0-9]*-[0-9]*"), reverse=True)[KEEP:]:
        shutil.rmtree(old)
    return Weights(version, str(path), hash_file(path / "model.safetensors"), parent)
