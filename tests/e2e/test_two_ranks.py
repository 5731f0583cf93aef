"""A learner of two processes under torchrun: the whole pipeline, then its journal retrained by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.site import ROOT, Site
from tests.judge import judge

pytestmark = pytest.mark.e2e

STEPS = 20
PROCFILE = (
    "learner: torchrun --standalone --nproc-per-node 2 -m learner\n"
    "actor: python -m tests.actors.fake_actor\n"
    "rewarder: rewarder\n"
)


@pytest.mark.parametrize("zero_stage", ["2", "3"])
def test_two_ranks_train_through_the_pipeline_and_one_retrains_the_same(tmp_path, zero_stage):
    site = Site(
        tmp_path, PROCFILE, LEARNER_MAX_STEPS=str(STEPS), LEARNER_SAVE_STEPS="10",
        LEARNER_ZERO_STAGE=zero_stage, LEARNER_MICRO_BATCH_TOKENS="64", OMP_NUM_THREADS="1",
    )  # fmt: skip
    site.start()
    try:
        assert site.wait(240) == 0, "\n".join(site.lines[-60:])
    finally:
        site.stop()
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert verdict["steps"] == STEPS
    # One process: the stages differ in where the state lies, not in what is computed.
    result = subprocess.run(
        [sys.executable, "-m", "learner.replay", str(site.run_folder)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    replayed = json.loads(result.stdout.splitlines()[-1])
    assert replayed["steps"] == STEPS
    assert replayed["difference"] <= 1e-4
