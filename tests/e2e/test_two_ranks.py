"""A learner of two processes under torchrun: the whole pipeline, then its journal retrained by one.

NIGHTLY=1 kills launcher and follower too, makes more steps, and repeats all with vLLM under ZeRO 2.
Gradients of two ranks under ZeRO 0, 2 and 3 are compared in tests/learner/test_gradients.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.common.errors import ConfigError
from penstock.learner.replay import replay
from tests.e2e.site import Site
from tests.helpers import NIGHTLY, nightly
from tests.judge import judge

pytestmark = pytest.mark.e2e


LEARNER = "learner: python -m penstock.learner.torchrun --standalone --nproc-per-node 2\n"
REAL = LEARNER + "actor: actor\nrewarder: rewarder\n"
FAKE = LEARNER + "actor: python -m tests.actors.fake_actor\nrewarder: rewarder\n"


def make_site(folder: Path, procfile: str, **variables: str) -> Site:
    """A run of two ranks with several micro-batches per step on each."""
    return Site(
        folder, procfile, LEARNER_SAVE_STEPS="5", LEARNER_MICRO_BATCH_TOKENS="64", OMP_NUM_THREADS="1",
        **variables,
    )  # fmt: skip


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


def check(site: Site, steps: int, learners: int) -> None:
    """Judge the run, and train its journal again in this process.

    With one rank the stages differ in where the state lies, not in what is computed.
    """
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], len(verdict["resumed_at"])) == (steps, learners - 1)
    assert site.moved() > 1e-3
    replayed = replay(site.run_folder, site.folder / "replay", {})
    assert replayed.steps == steps
    assert replayed.weights_difference is not None
    assert replayed.weights_difference <= 1e-4


def test_the_launcher_ends_with_the_learners_exit_code(tmp_path):
    flags = ["--standalone", "--nproc-per-node", "1"]
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.learner.torchrun", *flags], check=False,
        env=os.environ | {"RUN_DIR": str(tmp_path), "LEARNER_MODEL": ""}, timeout=300,
    )  # fmt: skip
    assert ended.returncode == ConfigError.exit_code


@pytest.mark.parametrize(
    ("procfile", "stage"),
    [(FAKE, "3"), pytest.param(REAL, "2", marks=[pytest.mark.engine, nightly])],
    ids=["ZeRO 3", "ZeRO 2 with vLLM"],
)
def test_a_killed_launcher_follower_or_leader_costs_nothing(procfile, stage, tmp_path):
    steps, learners = (40, 4) if NIGHTLY else (12, 2)
    site = make_site(
        tmp_path, procfile, LEARNER_MAX_STEPS=str(steps), LEARNER_ZERO_STAGE=stage, RUN_LEASE_S="10",
        ACTOR_KV_CACHE_GIB="0.25",
    )  # fmt: skip
    with site.start():
        site.wait_for(lambda: site.steps() >= 5, "step 5")
        if NIGHTLY:
            site.kill("learner.1")
            site.wait_for(lambda: has_trained(site, 2), "the second learner")
            os.kill(ranks_of(site)[1], signal.SIGKILL)
            site.wait_for(lambda: has_trained(site, 3), "the third learner")
        os.kill(ranks_of(site)[0], signal.SIGKILL)
        assert site.wait(600) == 0, "\n".join(site.lines[-60:])
    check(site, steps, learners)
    other = replay(site.run_folder, tmp_path / "other", {"learning_rate": "1e-3", "loss_type": "grpo"})
    assert other.steps == steps
    assert other.weights_difference is not None
    assert other.weights_difference > 1e-4
