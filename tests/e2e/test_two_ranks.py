"""A learner of two processes under torchrun: the whole pipeline, then its journal retrained by one."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.e2e.site import Site
from tests.judge import judge

pytestmark = pytest.mark.e2e

STEPS = 20
LEARNER = "learner: torchrun --standalone --nproc-per-node 2 -m penstock.learner\n"
REAL = LEARNER + "actor: actor\nrewarder: rewarder\n"
FAKE = LEARNER + "actor: python -m tests.actors.fake_actor\nrewarder: rewarder\n"


def ranks_of(site: Site) -> list[int]:
    """Process ids of the launcher's ranks, rank 0 first."""
    children = psutil.Process(site.pid_of("learner.1")).children()
    ranks = {
        int(child.environ()["RANK"]): child.pid
        for child in children
        if "penstock.learner" in child.cmdline()
    }
    return [pid for _, pid in sorted(ranks.items())]


def has_trained(site: Site, incarnation: int) -> bool:
    """Whether this learner has written batches down."""
    files = (site.run_folder / "journal").glob(f"{incarnation:06d}-*.journal")
    return sum(path.stat().st_size for path in files) > 5_000


def test_a_killed_launcher_follower_or_leader_costs_nothing(tmp_path):
    site = Site(
        tmp_path, FAKE, LEARNER_MAX_STEPS="120", LEARNER_SAVE_STEPS="5", LEARNER_ZERO_STAGE="2",
        OMP_NUM_THREADS="1", RUN_LEASE_S="10",
    )  # fmt: skip
    site.start()
    try:
        site.wait_for(lambda: site.steps() >= 5, "step 5")
        site.kill("learner.1")
        site.wait_for(lambda: has_trained(site, 2), "the second learner")
        os.kill(ranks_of(site)[1], signal.SIGKILL)
        site.wait_for(lambda: has_trained(site, 3), "the third learner")
        os.kill(ranks_of(site)[0], signal.SIGKILL)
        assert site.wait(600) == 0, "\n".join(site.lines[-60:])
    finally:
        site.stop()
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], len(verdict["resumed_at"])) == (120, 3)


@pytest.mark.parametrize(
    ("zero_stage", "procfile"),
    [pytest.param("2", REAL, marks=pytest.mark.engine), ("3", FAKE)],
    ids=["zero-2, vLLM", "zero-3, fake engine"],
)
def test_two_ranks_train_through_the_pipeline_and_one_retrains_the_same(tmp_path, zero_stage, procfile):
    site = Site(
        tmp_path, procfile, LEARNER_MAX_STEPS=str(STEPS), LEARNER_SAVE_STEPS="10",
        LEARNER_ZERO_STAGE=zero_stage, LEARNER_MICRO_BATCH_TOKENS="64", OMP_NUM_THREADS="1",
        RUN_LEASE_S="30", ACTOR_KV_CACHE_GIB="0.25",
    )  # fmt: skip
    site.start()
    try:
        assert site.wait(600) == 0, "\n".join(site.lines[-60:])
    finally:
        site.stop()
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert verdict["steps"] == STEPS
    # One process: the stages differ in where the state lies, not in what is computed.
    assert site.moved() > 1e-3
    replayed = site.replay()
    assert replayed["steps"] == STEPS
    assert replayed["weights_difference"] <= 1e-4
    if procfile == FAKE:
        other = site.replay(
            "LEARNER_LEARNING_RATE=1e-3", "LEARNER_LOSS_TYPE=grpo", "--out", str(tmp_path / "other")
        )
        assert other["steps"] == STEPS
        assert other["weights_difference"] > 1e-4
