"""Publishing a version of the weights: a new folder each time, hashed, renamed, then announced.

A path is never written twice: an engine that reads it can never see half a version.
"""

import shutil
from pathlib import Path

from penstock.common.files.atomic import folder_size, hash_file, whole_folder
from penstock.common.files.disk import Disk
from penstock.common.files.run_folder import RunFolder
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Weights
from penstock.learner.policy.collective import TrainablePolicy

KEEP = 4
"""Version folders kept: an actor may still be reading the one before the announced one."""


def write_version(
    run_folder: RunFolder, policy: TrainablePolicy, version: Version, parent: str, disk: Disk
) -> Weights:
    """Export the policy as this version; returns what is to be announced. Raises DiskFull."""
    folder = run_folder.version(version.incarnation, version.step)
    versions = folder.parent
    found = sorted(versions.glob("[0-9]*-[0-9]*"), reverse=True)
    needed = folder_size(found[0]) if found else None
    disk.write("the weights of a version", folder, lambda: _export(policy, folder), needed)
    for old in sorted(versions.glob("[0-9]*-[0-9]*"), reverse=True)[KEEP:]:
        shutil.rmtree(old)
    return Weights(version, str(folder), hash_file(folder / "model.safetensors"), parent)


def _export(policy: TrainablePolicy, folder: Path) -> None:
    with whole_folder(folder) as aside:
        policy.export(aside)
