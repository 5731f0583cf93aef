"""A policy whose weights are the hash of all that it was trained on, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.wire.codec import decode
from penstock.common.wire.messages import ScoredGroup
from penstock.learner.algorithm.batch import Batch, build_batch
from penstock.learner.policy.collective import Form, TrainablePolicy
from penstock.learner.policy.update import TokenRecord, Update
from tests.judge import read_records

_WEIGHTS = "model.safetensors"


class HashPolicy(TrainablePolicy):
    """Stands in for Policy: two runs have equal weights if they trained on the same."""

    def __init__(self) -> None:
        self.weights = ""

    def update(self, batch: Batch, step: int) -> Update:
        """Fold the batch into the weights."""
        digest = hashlib.sha256(f"{self.weights} {step}".encode())
        for sequence in batch.sequences:
            for array in (sequence.token_ids, sequence.behaviour, sequence.mask, sequence.staleness):
                digest.update(np.ascontiguousarray(array).tobytes())
            digest.update(f"{sequence.advantage!r}".encode())
        self.weights = digest.hexdigest()
        return Update(0.0, 0.0, 0.0, 1, 0, 1.0, TokenRecord.join([]))

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        """The weights alone."""
        folder.mkdir(exist_ok=True)
        (folder / _WEIGHTS).write_text(self.weights)

    def save(self, folder: Path) -> None:
        """As `export`."""
        self.export(folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        self.weights = (folder / _WEIGHTS).read_text()

    def score(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As the fake engine: any values."""
        return [np.full(len(text) - 1, -1.0) for text in texts]

    def offload(self) -> None:
        """Nothing is on a device."""

    def reload(self) -> None:
        """Nothing was moved."""

    def close(self) -> None:
        """Nothing to give back."""


def weights_by_the_journal(run_folder: Path) -> str:
    """The weights of a learner that trains on the journal's batches without interruption."""
    policy = HashPolicy()
    for _, record in read_records(run_folder):
        if record["kind"] == "batch":
            groups = [decode(group, ScoredGroup) for group in record["groups"]]
            settings = LearnerSettings(**record["settings"])
            step = record["step"] - 1
            policy.update(build_batch(groups, record["reward_weights"], step, settings), step)
    return policy.weights


def final_weights(run_folder: Path) -> str:
    """Those of the run's newest checkpoint."""
    newest = max((run_folder / "checkpoints").glob("[0-9]*"), default=None)
    return (newest / "model" / _WEIGHTS).read_text() if newest else ""
