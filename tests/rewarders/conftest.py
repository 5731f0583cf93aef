"""Fixtures of the rewarder's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.config.settings import RewarderSettings
from penstock.common.sandbox import starter
from penstock.common.sandbox.nursery import Nursery
from penstock.rewarders.scoring_pool import ScoringPool
from tests.rewarders.stand_ins import make_model_folder


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(RewarderSettings(workers=1, timeout_s=10.0, memory_gib=1)) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_nurseries() -> Iterator[None]:
    """Pools with the same settings fork from one nursery, which costs a second of processor time."""
    made: dict[str, Nursery] = {}

    def share(*arguments: Any) -> Nursery:
        nursery = made.get(repr(arguments))
        if nursery is None or not nursery.runs:
            nursery = made[repr(arguments)] = Nursery(*arguments)
        return nursery

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starter, "Nursery", share)
        patch.setattr(Nursery, "close", lambda _nursery: None)
        yield
    for nursery in made.values():
        nursery.close()
