"""The lag benchmark at a tiny size: its lag is exact, and what it reports is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import lag, lag_world
from benchmarks.lag import (
    ARMS,
    UNCORRECTED,
    Size,
    Summary,
    draw,
    make_runs,
    plan_runs,
    report,
    rows_of,
    verdict,
)
from benchmarks.lag_world import Run, copy_state, recipe_settings, train
from penstock.deploy.demo.task import write_task
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint
from penstock.learner.algorithm.batch import Batch
from penstock.learner.policy.policy import Policy

TINY = {"groups_per_step": 2, "num_generations": 2, "eval_samples": 6, "warmup_steps": 0, "seed": 1}
LEARNING_RATE = recipe_settings().learning_rate
RUN = Run({0: 0.4, 2: 0.5}, 4, 0.0, 0.1, 0.2, 0.3, 0.5)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, str]:
    """The demo's data set, and its model with random weights."""
    folder = tmp_path_factory.mktemp("world")
    task, tokenizer = write_task(folder / "task", 1), make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        save_checkpoint(make_model(tokenizer), tokenizer, folder / "base")
    return {"model": str(folder / "base"), "dataset": str(task.train), "eval_dataset": str(task.heldout)}


def tiny_settings(world: dict[str, str], **changes):
    return recipe_settings(**(world | TINY | changes))


def test_every_batch_is_sampled_by_the_weights_of_exactly_so_many_versions_ago(world, monkeypatch):
    updates = record_updates(monkeypatch)
    monkeypatch.setattr(lag_world, "_accuracy", reward_by_letters)
    train(tiny_settings(world, max_staleness=2), lag=2, steps=4, eval_steps=4)
    assert [stalenesses(batch) for _, batch, _ in updates] == [{0}, {1}, {2}, {2}]
    for step, (policy, batch, _) in enumerate(updates):
        sampled_by = max(0, step - 2)
        for version in range(step + 1):
            policy.model.load_state_dict(updates[version][2])
            assert (apart(policy, batch) < 1e-5) == (version == sampled_by)


def test_without_lag_no_correction_is_missed(world, monkeypatch):
    updates = record_updates(monkeypatch)
    monkeypatch.setattr(lag_world, "_accuracy", reward_by_letters)
    for changes in ({}, UNCORRECTED):
        train(tiny_settings(world, max_staleness=0, **changes), lag=0, steps=1, eval_steps=1)
    (default, _, _), (uncorrected, _, _) = updates
    pairs = zip(default.model.parameters(), uncorrected.model.parameters(), strict=True)
    assert all((one - other).abs().mean() < 1e-3 * LEARNING_RATE for one, other in pairs)


def reward_by_letters(text: str, gold: str) -> float:
    """Random weights get nothing right; this gives their groups a spread."""
    return float(sum(map(ord, text)) % 2)


def record_updates(monkeypatch) -> list[tuple[Policy, Batch, dict]]:
    """Policy, batch, and the weights before each Update, as they come."""
    seen, update = [], Policy.update

    def call(policy, batch, step):
        seen.append((policy, batch, copy_state(policy)))
        return update(policy, batch, step)

    monkeypatch.setattr(Policy, "update", call)
    return seen


def stalenesses(batch: Batch) -> set[int]:
    return {int(age) for sequence in batch.sequences for age in sequence.staleness}


def apart(policy: Policy, batch: Batch) -> float:
    """Largest difference between the behaviour and the policy now."""
    pairs = zip(policy.logprobs(batch.sequences), batch.sequences, strict=True)
    return max(float(abs(now - sequence.behaviour).max()) for now, sequence in pairs)


def test_a_policy_without_signal_is_given_up(world):
    run = train(tiny_settings(world), lag=0, steps=1, eval_steps=1)
    assert run.groups_trained == 0
    assert run.accuracy == {0: 0.0, 1: 0.0}


def test_finished_runs_are_not_made_again(tmp_path: Path, monkeypatch):
    made = []
    monkeypatch.setattr(lag_world, "leave", lambda: None)
    monkeypatch.setattr(lag_world, "train_arm", lambda *arguments: made.append(arguments) or RUN)
    size, path = Size(2, 2), tmp_path / "results.jsonl"
    make_runs(plan_runs(ARMS, 2, 1), size, path)
    assert len(made) == len(ARMS) + 2
    make_runs(plan_runs(ARMS, 2, 2), size, path)
    assert len(made) == 2 * len(ARMS)
    assert rows_of(ARMS[0], Size(3, 2), path) == []


def test_the_report_is_whole(tmp_path: Path):
    row = {"accuracy": {"0": 0.4, "2": 0.5}, "groups_trained": 4} | dict.fromkeys(
        ("log_ratio", "clipped", "bounded"), 0.1
    )
    worse = json.loads(json.dumps(row).replace("0.5", "0.3"))
    fresh, lagged = Summary.of(ARMS[0], [row, row]), Summary.of(ARMS[1], [row, row, worse])
    holds, words = verdict(fresh, lagged)
    assert holds
    assert words.startswith("lag 4 minus lag 0: -6.7 points; allowed -9.4")
    assert not verdict(fresh, Summary.of(ARMS[1], [worse, worse]))[0]
    assert "| lag 4 | 3 | 43.3 ± 11.5 | -6.7 |" in report([fresh, lagged])
    draw([fresh, lagged], tmp_path / "lag.png")
    assert (tmp_path / "lag.png").stat().st_size > 0


def test_arms_have_names_of_their_own():
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    assert lag.STRESS_LAG in {arm.lag for arm in ARMS if arm.part == "stress"}
