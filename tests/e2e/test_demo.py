"""The whole pipeline with its real parts (vLLM, queue server, DeepSpeed): five steps of `penstock demo`.

One run is the fixture of all tests here. Its model, questions and settings are the demo's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from penstock.learner.replay import Replayed, replay
from tests.common.test_modes import wider
from tests.e2e.site import moved
from tests.judge import judge
from tests.traps import trap_folders

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

SEED, STEPS = 5, 5
GROUPS, GENERATIONS, HELD_OUT = 64, 8, 500
"""Of the recipe, deploy/recipes/demo.env, and of the demo's data set."""

LIMIT_S = 1500


@dataclass(frozen=True, slots=True)
class Demo:
    """What the command printed, the run's folder, and the model it began with."""

    output: str
    run_folder: Path
    base_model: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of one of the run's JSON-lines files."""
        return [json.loads(line) for line in (self.run_folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = trap_folders(tmp_path_factory.mktemp("demo"))
    runs = folder / "runs"  # the command gets it relative, as by default: paths are part of its lines
    command = Path(sys.executable).with_name("penstock")
    done = subprocess.run(
        [command, "demo", "--seed", str(SEED), "--steps", str(STEPS), "--dir", "runs"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    (run_folder,) = runs.glob(f"demo-{SEED}-*")
    return Demo(done.stdout, run_folder, runs / f"demo-base-{SEED}")


def test_its_output_fits_100_columns_and_has_no_warning(demo):
    lines = demo.output.splitlines()
    assert lines
    assert [line for line in lines if len(line) > 100] == []
    assert [line for line in lines if "warning" in line.lower()] == []


def test_nobody_else_can_read_a_file_of_it(demo):
    assert wider(demo.run_folder, 0o077) == {}
    assert wider(demo.base_model, 0o077) == {}


def test_every_ticket_ended_once_and_every_step_was_made(demo):
    verdict = judge(demo.run_folder)
    assert verdict["faults"] == []
    assert verdict["steps"] == STEPS


def test_trainer_and_engine_agree_on_fresh_tokens_at_every_step(demo):
    differences = [
        row["sampling/sampling_logp_difference/mean"]
        for row in demo.rows("metrics.jsonl")
        if "sampling/sampling_logp_difference/mean" in row
    ]
    assert differences
    assert max(differences) <= 1e-4


def test_every_role_reports_what_it_spent(demo):
    sums = {"actor/generating_s": 0.0, "actor/subprocesses_cpu_s": 0.0, "rewarder/scoring_s": 0.0}
    for row in demo.rows("metrics.jsonl"):
        for name in sums:
            sums[name] += row.get(f"perf/{name}", 0.0)
    assert min(sums.values()) > 0


def test_staleness_stays_within_its_bound(demo):
    assert max(row["sample/staleness_max"] for row in demo.rows("metrics.jsonl")) <= 1


def test_completions_are_logged_with_rewards_and_versions(demo):
    files = sorted((demo.run_folder / "completions").iterdir())
    rows = [row for path in files for row in parquet.read_table(path).to_pylist()]
    trained = [row for row in rows if row["state"] == "trained"]
    assert len(files) == STEPS
    assert len(trained) == STEPS * GROUPS * GENERATIONS
    for row in trained:
        assert row["accuracy"] in (0.0, 1.0)
        assert ":0-" in row["versions"]
        assert row["versions"].endswith(f"-{row['completion_length']}")


def test_held_out_questions_were_asked_before_and_after(demo):
    steps = [row["step"] for row in demo.rows("evaluations.jsonl")]
    assert set(steps) == {0, STEPS}
    assert steps.count(0) == steps.count(STEPS) >= HELD_OUT


def test_the_final_checkpoint_is_the_published_policy_and_loads_with_transformers(demo):
    checkpoint = max((demo.run_folder / "checkpoints").iterdir())
    version = max((demo.run_folder / "versions").iterdir())
    assert checkpoint.name == version.name
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (checkpoint / "model", version)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_journal_alone_gives_the_same_weights_bit_for_bit(demo):
    assert moved(demo.base_model, demo.run_folder) > 1e-4
    assert replay(demo.run_folder, demo.run_folder / "replay", {}) == Replayed(STEPS, 0.0, [])
