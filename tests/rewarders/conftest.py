"""Fixtures of the rewarder's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.common.sandbox import starter
from penstock.common.sandbox.nursery import Nursery


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
