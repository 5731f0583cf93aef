"""Short form of `make chaos`: kill -9 of everything, helpers included."""

from __future__ import annotations

import pytest

from tests.chaos.plan import make_plan
from tests.chaos.run import run_chaos

pytestmark = pytest.mark.e2e


def test_kills_of_every_process_lose_nothing_and_train_nothing_twice(tmp_path):
    verdict = run_chaos(tmp_path, make_plan(20), seed=1)
    assert verdict.faults == []
    assert verdict.resumes >= 1
    assert verdict.replayed["weights_difference"] == 0.0
