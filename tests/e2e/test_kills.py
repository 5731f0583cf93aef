"""kill -9 of every kind of process in one run: nothing is lost, nothing is trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.common.wire.codec import decode
from penstock.common.wire.messages import ScoredGroup
from tests.e2e.forked import ForkedSite
from tests.e2e.kills import run_with_kills
from tests.e2e.site import FAKE_PROCFILE
from tests.judge import read_records

pytestmark = pytest.mark.e2e


def sampled_before_the_kill(run_folder: Path) -> int:
    """Tokens of weights of the learner's first incarnation that its second one trained."""
    batches = [record for number, record in read_records(run_folder) if number == 2]
    groups = [decode(data, ScoredGroup) for record in batches for data in record.get("groups", ())]
    made = [rollout for scored in groups for rollout in scored.group.rollouts]
    spans = [span for rollout in made for span in rollout.spans if span.version.incarnation == 1]
    return sum(span.end - span.start for span in spans)


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
    assert sampled_before_the_kill(site.run_folder) > 0
    assert "refused/" not in (site.run_folder / "metrics.jsonl").read_text()
    assert len(verdict["resumed_at"]) == 1  # the learner came back once, and went on from its books
    assert site.moved() > 1e-3
    replayed = site.replay()
    assert replayed == {"steps": 16, "weights_difference": 0.0, "steps_with_other_metrics": []}
