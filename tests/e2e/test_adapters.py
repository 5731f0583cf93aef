"""A run with LoRA, real vLLM and a killed learner: adapters alone are published, and agree (nightly)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from penstock.common.wire.messages import ADAPTER_FILE
from tests.e2e.adapter import compare
from tests.e2e.site import REAL_PROCFILE, Site
from tests.helpers import nightly
from tests.judge import judge

pytestmark = [pytest.mark.e2e, pytest.mark.engine, nightly]

STEPS = 8


def test_a_run_with_lora_publishes_adapters_alone(tmp_path: Path) -> None:
    site = Site(
        tmp_path, REAL_PROCFILE, LEARNER_MAX_STEPS=str(STEPS), LEARNER_LORA_RANK="4",
        LEARNER_SAVE_BEST_MODEL="true", LEARNER_SAVE_STEPS="2", LEARNER_EVAL_STEPS="4", RUN_LEASE_S="10",
        ACTOR_KV_CACHE_GIB="0.25", LEARNER_MAX_STALENESS="0",
    )  # fmt: skip
    with site.start():
        site.wait_for(lambda: site.steps() >= 3, "step 3")
        site.kill("learner.1")
        assert site.wait(600) == 0, "\n".join(site.lines[-60:])
    verdict = judge(site.run_folder)
    assert (verdict["faults"], verdict["steps"]) == ([], STEPS)
    versions = sorted((site.run_folder / "versions").iterdir())
    assert all({path.name for path in one.iterdir()} <= {ADAPTER_FILE, "model"} for one in versions)
    rows = [json.loads(line) for line in (site.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["perf/version_bytes"] == (versions[-1] / ADAPTER_FILE).stat().st_size
    name = "sampling/sampling_logp_difference/mean"
    found = [row[name] for row in rows if name in row]
    assert len(found) == STEPS
    assert max(found) < 1e-3
    (best,) = (site.run_folder / "best").glob("*/model")
    assert AutoModelForCausalLM.from_pretrained(best).num_parameters() > 0
    newest = max((site.run_folder / "checkpoints").iterdir()) / "model"
    answers = compare(newest, site.folder / "model", site.folder / "train.jsonl")
    assert answers["identical"] == answers["questions"]
    assert answers["changed by the adapter"] > 0
