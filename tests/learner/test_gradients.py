"""However a batch is cut into rows, micro-batches and ranks, its gradient is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.e2e

LIMIT = 1e-5


def gradients(tmp_path: Path, model_folder: Path, ranks: int = 1, **options: object) -> dict:
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
    launcher = (
        [sys.executable]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    command = [*launcher, "-m", "tests.learner.gradients", str(model_folder), str(out)]
    command += [f"{name}={value}" for name, value in options.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return torch.load(out)


def assert_agree(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    largest = max(gradient.abs().max() for gradient in one.values())
    difference = max((one[name] - other[name]).abs().max() for name in one)
    assert largest > 0
    assert difference / largest <= LIMIT


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model_folder) -> dict:
    return gradients(tmp_path_factory.mktemp("alone"), model_folder, packing=True)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"packing": False}),
        (1, {"micro_batch_tokens": 32}),
        (1, {"gradient_checkpointing": True, "micro_batch_tokens": 64}),
        (1, {"zero_stage": "1"}),
        (2, {"zero_stage": "0"}),
        (2, {"zero_stage": "2", "micro_batch_tokens": 24}),
        (2, {"zero_stage": "3", "micro_batch_tokens": 24}),
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(
    tmp_path, model_folder, alone, ranks, options
):
    assert_agree(alone, gradients(tmp_path, model_folder, ranks, **options))


@pytest.mark.parametrize("zero_stage", ["0", "2", "3"])
def test_nan_on_one_rank_skips_the_step_on_all(tmp_path, model_folder, zero_stage):
    found = gradients(tmp_path, model_folder, 2, zero_stage=zero_stage, nan=1, learning_rate=0.01)
    assert found["skipped"] == 1
    assert torch.equal(found["before"], found["after NaN"])
    assert torch.isfinite(found["after a sound one"]).all()
    assert not torch.equal(found["before"], found["after a sound one"])
