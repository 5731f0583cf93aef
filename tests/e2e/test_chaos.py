"""Short forms of `make chaos`: kill -9 of everything, helpers included; and preempted actors."""

from __future__ import annotations

import pytest

from tests.chaos.plan import Floors, Plan, make_plan
from tests.chaos.run import run_chaos
from tests.chaos.victims import ACTOR

pytestmark = pytest.mark.e2e


def test_kills_of_every_process_lose_nothing_and_train_nothing_twice(tmp_path):
    verdict = run_chaos(tmp_path, make_plan(20), seed=1)
    assert verdict.faults == []
    assert verdict.resumes >= 1
    assert verdict.replayed["weights_difference"] == 0.0


def test_preempted_actors_lose_no_token(tmp_path):
    plan = Plan({ACTOR: 5}, 4, 300.0, Floors(3, 0, 0, 40, 4))
    assert run_chaos(tmp_path, plan, seed=1, preempt=True).faults == []
