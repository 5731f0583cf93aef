"""A policy whose weights are several files, as those of a model larger than LEARNER_MAX_SHARD_SIZE."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from penstock.common.wire.messages import INDEX_FILE, shard_names
from penstock.learner.policy.collective import Form
from tests.crashes.policy import HashPolicy


class ShardedPolicy(HashPolicy):
    """Its files have 10,000 words each. An export changes one word in fifty before it writes them."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.count, self._exports = count, 0
        self._words = np.random.default_rng(0).integers(0, 0xFFFF, 10_000 * count).astype("<u2")

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        """The files and their index; one file alone has none."""
        self._exports += 1
        changed = np.random.default_rng(self._exports).random(len(self._words)) < 0.02
        self._words = self._words + changed.astype("<u2")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        names = shard_names(self.count)[:-1] if self.count > 1 else ["model.safetensors"]
        for name, words in zip(names, np.split(self._words, self.count), strict=True):
            (folder / name).write_bytes(words.tobytes())
        if self.count > 1:
            tensors = {f"layers.{number}": name for number, name in enumerate(names)}
            index = {"metadata": {"total_size": self._words.nbytes}, "weight_map": tensors}
            (folder / INDEX_FILE).write_text(json.dumps(index))
