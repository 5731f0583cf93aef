"""The policy: one Update, saved and loaded, resumed from checkpoint and journal. Real DeepSpeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.codec import encode
from common.disk import Disk
from common.messages import Version
from learner.batch import build_batch
from learner.checkpoint import newest_checkpoint, save_checkpoint
from learner.claim import claim_incarnation
from learner.journal import Journal
from learner.ledger import Ledger
from learner.policy import Policy
from learner.record import Recorder
from learner.resume import relive
from tests.learner.builders import make_group, make_plan, make_settings

SETTINGS = {"learning_rate": 1e-3, "micro_batch_tokens": 64}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that spin for one another make tiny models many times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_policy(folder: Path, **changes) -> Policy:
    return Policy(folder, make_settings(**(SETTINGS | changes)), steps=10)


def make_batch(step: int):
    plan = make_plan(make_settings())
    groups = [
        make_group(plan.source.train(f"train:{n}", Version(1, step)), spans=[(step, 2 + n)])
        for n in (2 * step, 2 * step + 1)
    ]
    return groups, build_batch(groups, plan.reward_weights, step, make_settings())


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_micro_batches_make_the_same_update_as_one_batch(model_folder):
    results = []
    for positions in (4096, 8):
        policy = make_policy(model_folder, micro_batch_tokens=positions, learning_rate=1e-5)
        update = policy.update(make_batch(1)[1], 1)
        results.append((update, policy.model.model.embed_tokens.weight.detach().clone()))
    (whole, whole_weights), (pieces, pieces_weights) = results
    assert pieces.loss == pytest.approx(whole.loss, abs=1e-6)
    assert pieces.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert torch.allclose(whole_weights, pieces_weights, atol=1e-6)


def test_company_in_a_row_does_not_change_log_probabilities(model_folder):
    policy = make_policy(model_folder)
    sequences = list(make_batch(4)[1].sequences)
    together = policy.logprobs(sequences)
    alone = [policy.logprobs([sequence])[0] for sequence in sequences]
    for one, other in zip(together, alone, strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_a_loaded_policy_goes_on_as_the_saved_one(model_folder, tmp_path):
    policy = make_policy(model_folder)
    policy.update(make_batch(1)[1], 1)
    policy.save(tmp_path)
    policy.update(make_batch(2)[1], 2)
    expected = weights_of(policy)
    resumed = make_policy(model_folder)
    resumed.load(tmp_path)
    resumed.update(make_batch(2)[1], 2)
    assert same(weights_of(resumed), expected)


def test_an_export_loads_with_transformers_and_computes_the_same(model_folder, tmp_path):
    policy = make_policy(model_folder)
    policy.update(make_batch(1)[1], 1)
    policy.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 13).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, policy.model(ids).logits)


def test_bf16_keeps_what_is_too_small_for_bf16(model_folder):
    """Without fp32 master weights, updates of 1e-6 would be lost to rounding for ever."""
    name = "model.norm.weight"  # all ones, where a step of bf16 is 0.0039 down and 0.0078 up

    def norm_after(updates: int) -> torch.Tensor:
        policy = make_policy(model_folder, dtype="bfloat16", learning_rate=2e-4)
        for _ in range(updates):
            policy.update(make_batch(1)[1], 1)
        return policy.model.state_dict()[name].clone()

    ones = torch.ones_like(norm_after(0))
    assert ones.dtype == torch.bfloat16
    assert torch.equal(norm_after(1), ones)
    assert not torch.equal(norm_after(40), ones)


class Run:
    """A run's folder with journaled steps, as a learner leaves it when it is killed."""

    def __init__(self, folder: Path, model_folder: Path):
        self.folder = folder
        self.plan = make_plan(make_settings(**SETTINGS))
        self.claim = claim_incarnation(folder, 0)
        self.journal = Journal(folder, self.claim.incarnation)
        self.policy = make_policy(model_folder)
        self.ledger = Ledger()

    def step(self, step: int):
        groups, batch = make_batch(step)
        position = self.journal.append(
            "batch", step=step + 1, groups=[encode(group) for group in groups], ends={},
            ledger=self.ledger.snapshot(), metrics={},
            reward_weights=self.plan.reward_weights,
            settings=make_settings(**SETTINGS).model_dump(mode="json"),
        )  # fmt: skip
        self.policy.update(batch, step)
        return position

    def checkpoint(self, step: int, position, disk: Disk | None = None, **changes):
        settings = make_settings(**(SETTINGS | changes))
        return save_checkpoint(
            self.folder, self.policy, step, position, self.ledger.snapshot(), settings, disk
        )

    def resume(self, model_folder: Path):
        policy = make_policy(model_folder)
        claim = claim_incarnation(self.folder, 0)
        recorder = Recorder(self.folder, [], "x")
        checkpoint = newest_checkpoint(self.folder, claim)
        return relive(self.folder, claim, policy, Ledger(), recorder, checkpoint), policy


@pytest.mark.parametrize("checkpoint_at", [None, 1, 3])
def test_a_killed_run_resumes_with_the_same_weights_bit_for_bit(model_folder, tmp_path, checkpoint_at):
    run = Run(tmp_path, model_folder)
    for step in range(4):
        position = run.step(step)
        if step + 1 == checkpoint_at:
            run.checkpoint(step + 1, position)
    past, policy = run.resume(model_folder)
    assert (past.step, past.retrained) == (4, 4 - (checkpoint_at or 0))
    assert same(weights_of(policy), weights_of(run.policy))


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_the_journal_makes_up_for_it(
    model_folder, tmp_path, damage
):
    run = Run(tmp_path, model_folder)
    run.checkpoint(1, run.step(0))
    newest = run.checkpoint(2, run.step(1))
    victim = next((newest.folder / "trainer").rglob("*.pt"))
    if damage == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))
    elif damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "delete":
        shutil.rmtree(victim.parent)
    else:
        (newest.folder / "manifest.json").unlink()
    past, policy = run.resume(model_folder)
    assert (past.step, past.retrained) == (2, 1)
    assert same(weights_of(policy), weights_of(run.policy))


def test_only_the_newest_checkpoints_are_kept(model_folder, tmp_path):
    run = Run(tmp_path, model_folder)
    for step in range(3):
        run.checkpoint(step + 1, run.step(step))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["000001-00000002", "000001-00000003"]


def test_a_checkpoint_of_a_superseded_learner_is_passed_over(model_folder, tmp_path):
    run = Run(tmp_path, model_folder)
    run.checkpoint(1, run.step(0))
    claim = claim_incarnation(tmp_path, 0)
    zombie = run.checkpoint(2, run.step(1))
    assert json.loads((zombie.folder / "state.json").read_text())["step"] == 2
    assert newest_checkpoint(tmp_path, claim).step == 1
