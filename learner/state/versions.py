"""Published versions of the weights: each in a new folder, renamed when it is whole, then announced.

No path is written twice, so an engine that reads a version never reads half of it. Versions are not
synced: after a power cut the next learner publishes new ones, from a checkpoint that is.
"""

import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.common.errors import NotFinite
from penstock.common.files.hashing import hash_file
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import (
    LOWEST_PROBED,
    WEIGHTS_FILE,
    Probe,
    Weights,
    WeightsFile,
    hash_of_shards,
    shard_names,
)
from penstock.learner.policy.collective import TrainablePolicy

MODEL = "model"
"""Folder of the merged model in the folder of a version that is an adapter."""
FOLDER_NAME = re.compile(r"\d{6,15}-\d{8,15}")
"""Name of a version's folder: its incarnation and its step."""
KEEP = 4
"""Newest versions that are kept, and older ones that are being fetched."""


def write_version(
    folder: LearnerFolder,
    policy: TrainablePolicy,
    version: Version,
    parent: str,
    texts: Sequence[np.ndarray] = (),
    adapter: AdapterSpec | None = None,
    with_model: bool = False,
    being_fetched: Callable[[], Collection[str]] = frozenset,
) -> Weights:
    """Write the policy's weights to the folder of `version`, and return the announcement to be sent.

    `parent` is the hash of the version before, "" for none; it is put into the announcement, as are the
    log-probabilities of `texts`, token ids (L,) each. With `adapter` the weights are the LoRA adapter
    alone; `with_model` puts the merged model beside it, for `keep_if_best`. A folder of this version is
    replaced. The newest KEEP (4) versions in the run's folder are kept, and of older ones the first 4
    that are `being_fetched` after the export. The others are deleted. Raise
    RunTaken if a later learner has claimed the run's folder, DiskFull if the disk stays full, NotFinite
    if a weight, or a log-probability of `texts`, is NaN or infinite.
    """
    path = folder.version(version.incarnation, version.step)

    def export(aside: Path) -> None:
        """Write what is sent, and what is not. Raise NotFinite."""
        policy.export(aside, "adapter" if adapter else "version")
        if adapter and with_model:
            policy.export(aside / MODEL, "version")

    folder.write_folder("the weights of a version", path, export, sync=False)
    made = [one for one in path.parent.iterdir() if FOLDER_NAME.fullmatch(one.name)]
    older, fetched = sorted(made)[:-KEEP], being_fetched()
    kept = [one for one in older if one.name in fetched][:KEEP]
    for old in older:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    weights = with_hashes(Weights(version, str(path), "", parent, adapter=adapter))
    return replace(weights, probes=_probes(policy, version, texts))


def with_hashes(weights: Weights) -> Weights:
    """Return the announcement of weights with the hash and size of each file in their folder.

    Each file is read once, while the system still has it in memory, and hashed on all cores.
    """
    folder = Path(weights.path)
    if weights.adapter or (folder / WEIGHTS_FILE).is_file():
        file = folder / weights.file
        return replace(weights, hash=hash_file(file), size=file.stat().st_size)
    names = shard_names(len(list(folder.glob("model-*.safetensors"))))
    shards = tuple(
        WeightsFile(name, (folder / name).stat().st_size, hash_file(folder / name)) for name in names
    )
    size = sum(one.size for one in shards)
    return replace(weights, hash=hash_of_shards(shards), size=size, shards=shards)


def _probes(policy: TrainablePolicy, version: Version, texts: Sequence[np.ndarray]) -> tuple[Probe, ...]:
    """Return the policy's log-probabilities of texts, token ids (L,) each. Raise NotFinite for NaN."""
    scored = policy.score(texts) if texts else []
    if not all(np.isfinite(values).all() for values in scored):
        raise NotFinite(
            f"the weights of version {version} are finite, and their log-probabilities are NaN or "
            "infinity: lower LEARNER_LEARNING_RATE, and resume from an earlier checkpoint"
        )
    pairs = zip(texts, scored, strict=True)
    return tuple(
        Probe(text, np.clip(values, LOWEST_PROBED, 0.0).astype("<f4")) for text, values in pairs
    )
