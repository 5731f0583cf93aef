"""However a batch is cut into rows, micro-batches and ranks, its gradient is the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.learner.gradients import CUTS_OF_TWO_RANKS, NAN_STAGES, gradients, make_policy

pytestmark = pytest.mark.e2e

LIMIT = 1e-5


@pytest.fixture(scope="module")
def alone(model_folder, one_thread) -> dict:
    return gradients(make_policy(model_folder, {"packing": True}))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory, model_folder) -> dict:
    """What two ranks found in each case: rank 0 writes all to one file."""
    out = tmp_path_factory.mktemp("ranks") / "found.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, "-m", "tests.learner.gradients", str(model_folder), str(out)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found = torch.load(out)
    assert found["ranks"] == 2
    return found


def assert_agree(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    largest = max(gradient.abs().max() for gradient in one.values())
    difference = max((one[name] - other[name]).abs().max() for name in one)
    assert largest > 0
    assert difference / largest <= LIMIT


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": False},
        {"micro_batch_tokens": 32},
        {"gradient_checkpointing": True, "micro_batch_tokens": 64},
        {"zero_stage": "1"},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(model_folder, one_thread, alone, settings):
    assert_agree(alone, gradients(make_policy(model_folder, settings)))


@pytest.mark.parametrize("settings", [str(cut) for cut in CUTS_OF_TWO_RANKS])
def test_the_gradient_of_two_ranks_is_that_of_one(alone, of_two_ranks, settings):
    assert_agree(alone, of_two_ranks["cuts"][settings])


@pytest.mark.parametrize("zero_stage", NAN_STAGES)
def test_nan_on_one_rank_skips_the_step_on_all(of_two_ranks, zero_stage):
    found = of_two_ranks["nan"][zero_stage]
    assert found["skipped"] == 1
    assert torch.equal(found["before"], found["after NaN"])
    assert torch.isfinite(found["after a sound one"]).all()
    assert not torch.equal(found["before"], found["after a sound one"])
