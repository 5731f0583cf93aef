"""The policy: one Update, saved and loaded, resumed from checkpoint and journal. Real DeepSpeed."""

from __future__ import annotations

import inspect
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config

from penstock.actors.engine import verify_weights
from penstock.common.errors import ConfigError
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import INDEX_FILE, Version
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.policy.collective import AllRanksPolicy, TrainablePolicy
from penstock.learner.policy.policy import Policy
from penstock.learner.replay import _difference
from penstock.learner.report.metrics import agreement
from penstock.learner.state.checkpoint import newest_checkpoint
from penstock.learner.state.versions import write_version
from tests.crashes.policy import HashPolicy
from tests.learner.builders import claim_next, make_group, make_plan, make_settings
from tests.learner.trained import Run, make_batch, make_policy, same, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_folder_without_a_causal_language_model_is_refused(model_folder, tmp_path):
    folder = tmp_path / "T5"
    shutil.copytree(model_folder, folder)
    T5Config().save_pretrained(folder)
    with pytest.raises(ConfigError, match="expected a causal language model"):
        make_policy(folder)
    shutil.copy(model_folder / "config.json", folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        make_policy(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected whole weights: merge the adapter"):
        make_policy(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="safetensors"):
        make_policy(folder)


def test_company_in_a_row_does_not_change_log_probabilities(model_folder):
    policy = make_policy(model_folder)
    sequences = list(make_batch(4)[1].sequences)
    together = policy.logprobs(sequences)
    alone = [policy.logprobs([sequence])[0] for sequence in sequences]
    for one, other in zip(together, alone, strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_only_completions_of_the_newest_version_are_compared_with_the_engine(model_folder):
    """Behind a token of older weights the engine's attention holds what these made of it."""
    ticket = make_plan(make_settings()).source.train(TicketId("train:0"), Version(1, 1))
    group = make_group(ticket, spans=[(0, 2), (1, 5)])
    whole = make_group(ticket, spans=[(1, 4)])
    batch = build_batch([group, whole], {"accuracy": 1.0}, 1, make_settings())
    tokens = make_policy(model_folder, num_iterations=2).update(batch, 1).tokens
    compared = (tokens.oldest == 0) & tokens.first.astype(bool)
    count = sum(len(rollout.token_ids) for rollout in whole.group.rollouts)
    assert compared.sum() == count
    assert (tokens.staleness[~compared] == 0).any()
    engine, trainer = tokens.behaviour[compared].astype(float), tokens.logprobs[compared]
    assert agreement(tokens)["sampling/sampling_logp_difference/max"] == pytest.approx(
        np.abs(trainer - engine).max()
    )


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


def test_large_weights_are_three_files_in_a_checkpoint_and_a_version(model_folder, tmp_path):
    policy = make_policy(model_folder, max_shard_size="35KB")
    policy.update(make_batch(1)[1], 1)
    policy.export(tmp_path / "checkpoint")
    weights = write_version(LearnerFolder(tmp_path, 1), policy, Version(1, 1), "")
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for folder in (tmp_path / "checkpoint", verify_weights(weights)):
        assert sorted(path.name for path in folder.glob("*.safetensors")) == names
        assert max(path.stat().st_size for path in folder.glob("*.safetensors")) < 40_000
        assert (folder / INDEX_FILE).is_file()
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert loaded.state_dict().keys() == policy.model.state_dict().keys()
        assert same(loaded.state_dict(), weights_of(policy))
    assert [one.name for one in weights.shards] == [*names, INDEX_FILE]


def test_the_newest_four_versions_are_kept_and_the_oldest_four_in_use(model_folder, tmp_path):
    policy, folder = make_policy(model_folder), LearnerFolder(tmp_path, 1)

    def kept_after(newest: int, being_fetched: list[int]) -> list[int]:
        names = [f"000001-{step:08d}" for step in being_fetched]
        write_version(folder, policy, Version(1, newest), "", being_fetched=lambda: names)
        return sorted(int(path.name[-8:]) for path in folder.versions.iterdir())

    assert [kept_after(step, [0, 2]) for step in range(7)][-1] == [0, 2, 3, 4, 5, 6]
    newest = [kept_after(step, list(range(9))) for step in range(7, 15)][-1]
    assert newest == [0, 2, 3, 4, 11, 12, 13, 14]
    assert kept_after(15, []) == [12, 13, 14, 15]


def test_weights_in_several_files_are_those_in_one(model_folder, tmp_path):
    for size in ("35KB", "5GB"):
        make_policy(model_folder, max_shard_size=size).export(tmp_path / size)
    assert [path.name for path in (tmp_path / "5GB").glob("*.safetensors*")] == ["model.safetensors"]
    assert _difference(tmp_path / "35KB", tmp_path / "5GB") == 0.0


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


def test_only_the_newest_checkpoints_are_kept(model_folder, tmp_path):
    run = Run(tmp_path, model_folder)
    for step in range(3):
        run.checkpoint(step + 1, run.step(step))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["000001-00000002", "000001-00000003"]


def test_a_checkpoint_of_a_superseded_learner_is_passed_over(model_folder, tmp_path):
    run = Run(tmp_path, model_folder)
    run.checkpoint(1, run.step(0))
    claim = claim_next(tmp_path)
    zombie = run.checkpoint(2, run.step(1), checked=False)
    assert json.loads((zombie.folder / "state.json").read_text())["step"] == 2
    assert newest_checkpoint(LearnerFolder(tmp_path, claim.incarnation), claim).step == 1


@pytest.mark.parametrize("kind", [Policy, AllRanksPolicy, HashPolicy])
def test_every_policy_has_the_methods_that_the_learner_calls(kind):
    methods = [name for name in vars(TrainablePolicy) if not name.startswith("_")]
    assert set(methods) == {"update", "score", "save", "load", "export", "offload", "reload", "close"}
    for name in methods:
        expected = inspect.signature(getattr(TrainablePolicy, name), eval_str=True)
        assert name in vars(kind), name
        assert inspect.signature(getattr(kind, name), eval_str=True) == expected, name


def test_an_update_tells_its_phases(model_folder):
    policy = make_policy(model_folder)
    policy.update(make_batch(1)[1], 1)
    told = {name for name, cost in policy.phases.take_profile().items() if cost.seconds > 0}
    assert {"running forward", "running backward", "making an optimizer step"} <= told
