"""When the learner offers deltas, and of which versions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.common.errors import ConfigError
from penstock.common.files.hashing import hash_file
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import DELTA_FILE, Weights
from penstock.learner.state.deltas import OfferWithDeltas, with_deltas
from tests.learner.builders import CONTRACT


class Somewhere:
    """An offer whose versions are fetched."""

    is_used = True

    def offer(self, weights: Weights) -> Weights:
        return replace(weights, url="http://10.0.0.5:29700", token="token")


FAR = Somewhere()
BF16 = replace(CONTRACT, dtype="bfloat16")


def version(folder: Path, step: int, words: np.ndarray, parent: Weights | None) -> Weights:
    path = folder / f"000001-{step:08d}"
    path.mkdir()
    file = path / "model.safetensors"
    file.write_bytes(words.astype("<u2").tobytes())
    before = parent.hash if parent else ""
    return Weights(Version(1, step), str(path), hash_file(file), before, file.stat().st_size)


def test_deltas_are_for_bfloat16() -> None:
    assert isinstance(with_deltas(FAR, "auto", BF16), OfferWithDeltas)
    assert with_deltas(FAR, "auto", replace(BF16, dtype="float32")) is FAR
    assert with_deltas(FAR, "false", BF16) is FAR
    assert isinstance(with_deltas(FAR, "true", replace(BF16, dtype="float32")), OfferWithDeltas)
    assert with_deltas(FAR, "true", replace(BF16, adapter=AdapterSpec(4, 8, ("q_proj",)))) is FAR
    assert with_deltas(None, "true", BF16) is None


def test_the_newest_four_versions_have_deltas_each_from_the_one_before(tmp_path: Path) -> None:
    offer, words, last = OfferWithDeltas(FAR), np.arange(1000), None
    announced = []
    for step in range(6):
        words = words + (np.arange(1000) == step)
        last = version(tmp_path, step, words, last)
        announced.append(offer.offer(last))
        assert offer.offer(last) == announced[-1]
    assert announced[0].deltas == ()
    assert [one.version.step for one in announced[-1].deltas] == [2, 3, 4, 5]
    assert [one.parent for one in announced[-1].deltas] == [one.hash for one in announced[1:5]]
    for one in announced[1:]:
        file = Path(one.path) / DELTA_FILE
        assert (one.deltas[-1].hash, one.delta_bytes) == (hash_file(file), file.stat().st_size)
    assert announced[-1].url == "http://10.0.0.5:29700"


@pytest.mark.parametrize("cause", ["everything changed", "another parent", "the file is gone"])
def test_without_a_delta_the_next_ones_begin_anew(tmp_path: Path, cause: str) -> None:
    offer, draw = OfferWithDeltas(FAR), np.random.default_rng(0)
    first = version(tmp_path, 0, np.arange(1000), None)
    offer.offer(first)
    words = draw.integers(0, 0xFFFF, 1000) if cause == "everything changed" else np.arange(1000)
    second = version(tmp_path, 1, words, first)
    if cause == "another parent":
        second = replace(second, parent="0" * 64)
    if cause == "the file is gone":
        (Path(first.path) / first.file).unlink()
    assert offer.offer(second).deltas == ()
    assert not (Path(second.path) / DELTA_FILE).exists()
    third = version(tmp_path, 2, words, second)
    assert [one.version.step for one in offer.offer(third).deltas] == [2]


def test_without_a_package_for_deltas_versions_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penstock.common.transfer.delta", raising=False)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert with_deltas(FAR, "auto", BF16) is FAR
    with pytest.raises(ConfigError, match="LEARNER_PUBLISH_DELTAS=true"):
        with_deltas(FAR, "true", BF16)
