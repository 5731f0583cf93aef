"""The whole pipeline with its real parts: vLLM, queue server, DeepSpeed; a few steps of a tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from tests.e2e.site import REAL_PROCFILE, Site
from tests.judge import judge

pytestmark = pytest.mark.engine

STEPS = 4


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(
        tmp_path_factory.mktemp("site"), REAL_PROCFILE, LEARNER_MAX_STEPS=str(STEPS),
        LEARNER_SAVE_STEPS="2", RUN_LEASE_S="30", ACTOR_KV_CACHE_GIB="0.25",
    )  # fmt: skip
    site.start()
    try:
        assert site.wait(240) == 0, "\n".join(site.lines[-60:])
    finally:
        site.stop()
    return site


def read(site: Site, name: str) -> list[dict]:
    return [json.loads(line) for line in (site.run_folder / name).read_text().splitlines()]


def test_every_ticket_ended_once_and_every_step_was_made(site):
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert verdict["steps"] == STEPS


def test_trainer_and_engine_agree_on_fresh_tokens_at_every_step(site):
    differences = [
        row["sampling/sampling_logp_difference/mean"]
        for row in read(site, "metrics.jsonl")
        if "sampling/sampling_logp_difference/mean" in row
    ]
    assert differences
    assert max(differences) <= 1e-4


def test_staleness_stays_within_its_bound(site):
    assert max(row["sample/staleness_max"] for row in read(site, "metrics.jsonl")) <= 1


def test_completions_are_logged_with_rewards_and_versions(site):
    files = sorted((site.run_folder / "completions").iterdir())
    rows = [row for path in files for row in parquet.read_table(path).to_pylist()]
    assert len(files) == STEPS
    assert len(rows) == STEPS * 4 * 4
    for row in rows:
        assert row["accuracy"] in (0.0, 1.0)
        assert ":0-" in row["versions"]
        assert row["versions"].endswith(f"-{row['completion_length']}")


def test_held_out_questions_were_asked_before_and_after(site):
    steps = [row["step"] for row in read(site, "evaluations.jsonl")]
    assert steps == [0] * 10 + [STEPS] * 10


def test_the_final_checkpoint_is_the_published_policy_and_loads_with_transformers(site):
    checkpoint = max((site.run_folder / "checkpoints").iterdir())
    version = max((site.run_folder / "versions").iterdir())
    assert checkpoint.name == version.name
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (checkpoint / "model", version)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_journal_alone_gives_the_same_weights_bit_for_bit(site):
    assert site.moved() > 1e-4
    replayed = site.replay()
    assert replayed == {"steps": STEPS, "weights_difference": 0.0, "steps_with_other_metrics": []}


def test_another_loss_on_the_same_groups_gives_other_weights(site, tmp_path):
    replayed = site.replay(
        "LEARNER_LEARNING_RATE=1e-3", "LEARNER_LOSS_TYPE=grpo", "--out", str(tmp_path)
    )
    assert replayed["steps"] == STEPS
    assert replayed["weights_difference"] > 0
