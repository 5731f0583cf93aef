"""kill -9 of every kind of process in one run: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import pytest

from tests.e2e.forked import ForkedSite
from tests.e2e.kills import run_with_kills
from tests.e2e.site import FAKE_PROCFILE

pytestmark = pytest.mark.e2e


def test_a_run_survives_kill_9_of_each_of_its_processes(tmp_path):
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS="16", LEARNER_SAVE_STEPS="3",
        FAKE_TOKEN_DELAY_S="0.02",
    )  # fmt: skip
    verdict = run_with_kills(site, every=3, timeout_s=600)
    assert verdict["exit_code"] == 0
    assert verdict["faults"] == []
    assert verdict["steps"] == 16
    assert verdict["states"]["trained"] == 16 * 4
    assert len(verdict["resumed_at"]) == 1  # the learner came back once, and went on from its books
    assert site.moved() > 1e-3
    replayed = site.replay()
    assert replayed == {"steps": 16, "weights_difference": 0.0, "steps_with_other_metrics": []}
