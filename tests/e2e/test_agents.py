"""A whole run of the example agent: OpenAI's client trains through the endpoint, an actor's kill too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.common.wire.codec import decode
from penstock.common.wire.messages import ScoredGroup
from tests.e2e.forked import ForkedSite
from tests.e2e.site import AGENTS, FAKE_PROCFILE, REAL_PROCFILE, ROOT, Site
from tests.helpers import nightly
from tests.judge import judge, read_records

pytestmark = [pytest.mark.e2e, nightly]

EXAMPLE = ROOT / "deploy" / "environments" / "agent.py"


def test_the_example_agent_trains_and_survives_a_kill_of_its_actor(tmp_path: Path) -> None:
    """The fake engine calls a tool in the first two turns of each rollout, and then answers."""
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, talks=True, LEARNER_MAX_STEPS="3", LEARNER_ENVIRONMENT="",
        LEARNER_AGENT=f"{EXAMPLE}:rollout", LEARNER_REWARDS="environment",
        LEARNER_MAX_PROMPT_LENGTH="20", LEARNER_MAX_COMPLETION_LENGTH="90", FAKE_TOKEN_DELAY_S="0.02",
        LEARNER_NUM_GENERATIONS="2", LEARNER_GROUPS_PER_STEP="2", LEARNER_EVAL_DATASET="",
    )  # fmt: skip
    with site.start():
        site.wait_for(lambda: site.steps() >= 1, "step 1")
        site.kill("actor.1")
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert verdict["states"]["trained"] == 3 * 2
    batches = [record for _, record in read_records(site.run_folder)]
    groups = [decode(data, ScoredGroup) for one in batches for data in one.get("groups", ())]
    for rollout in (made for scored in groups for made in scored.group.rollouts):
        talk = rollout.transcript
        assert talk is not None
        assert (talk.failure, talk.turns, talk.tool_calls) == ("", 3, 2)
        assert talk.reward in (0.0, 1.0)
        turns = int(rollout.mask[0]) + int((np.diff(rollout.mask.astype(int)) == 1).sum())
        assert (rollout.earlier, turns) == ((), 3), "one sequence, the turns apart"
    lines = (site.run_folder / "metrics.jsonl").read_text()
    assert "refused/" not in lines
    assert json.loads(lines.splitlines()[-1])["turns"] == 3
    assert site.moved() > 1e-4
    assert not [line for line in site.lines if "Traceback" in line]


def test_the_tokens_of_an_agent_on_real_vllm_are_those_that_the_trainer_scores(tmp_path: Path) -> None:
    """With untrained weights each token is about as likely: turns are long, and some call the tool."""
    tmp_path.chmod(0o755)
    site = Site(
        tmp_path, REAL_PROCFILE, talks=True, **AGENTS, LEARNER_MAX_STEPS="4", LEARNER_MAX_STALENESS="0",
        LEARNER_NUM_GENERATIONS="8", LEARNER_LEARNING_RATE="1e-3",
    )  # fmt: skip
    with site.start():
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    assert judge(site.run_folder)["faults"] == []
    rows = [json.loads(line) for line in (site.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert sum(row["tools/call_frequency"] for row in rows) > 0
    assert max(row["environment/failed"] for row in rows) == 0
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert site.moved() > 1e-4
