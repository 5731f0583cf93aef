"""The policy's variants: LoRA, references, several optimizer steps, steps that are not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.actors.engine import verify_weights
from penstock.common.errors import ConfigError, Disagreement, NotFinite
from penstock.common.files.hashing import hash_file
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import ADAPTER_FILE, WEIGHTS_FILE
from penstock.deploy.demo.tiny_llama import CONTEXT_TOKENS, make_model, make_tokenizer, save_checkpoint
from penstock.learner.algorithm.batch import Batch
from penstock.learner.data.probe import probe_texts
from penstock.learner.policy.export import whole_state
from penstock.learner.policy.policy import Policy
from penstock.learner.report import metrics
from penstock.learner.report.metrics import agreement, check_agreement
from penstock.learner.state.best_model import keep_if_best
from penstock.learner.state.versions import write_version
from tests.learner.builders import make_settings
from tests.learner.gradients import make_batch

IDS = torch.arange(3, 13).unsqueeze(0)
ADAPTER = AdapterSpec(4, 32, ("q_proj",))


def make_policy(folder, **changes) -> Policy:
    return Policy(folder, make_settings(learning_rate=1e-2, **changes), steps=10)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def with_advantage(value: float) -> Batch:
    first, *rest = make_batch().sequences
    return Batch((replace(first, advantage=value, mask=np.ones_like(first.mask)), *rest))


# LoRA


def test_lora_trains_the_adapter_alone_and_exports_a_model_that_computes_the_same(
    model_folder, tmp_path
):
    policy = make_policy(model_folder, lora_rank=4)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters()}
    start = logits(policy.model)
    for step in range(3):
        policy.update(make_batch(), step)
    changed = {n for n, value in policy.model.named_parameters() if not torch.equal(value, before[n])}
    assert changed
    assert all(".lora_" in name for name in changed)
    policy.export(tmp_path)
    trained = logits(policy.model)
    assert not torch.allclose(trained, start, atol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.allclose(logits(merged), trained, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(logits(adapted), trained, atol=1e-5)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_version_is_the_adapter_alone_and_with_the_base_the_same_model(model_folder, tmp_path, stage):
    policy = make_policy(model_folder, lora_rank=4, zero_stage=stage)
    for step in range(2):
        policy.update(make_batch(), step)
    folder = LearnerFolder(tmp_path, 1)
    weights = write_version(folder, policy, Version(1, 1), "", adapter=ADAPTER)
    (file,) = Path(weights.path).iterdir()
    assert (file.name, weights.file) == (ADAPTER_FILE, ADAPTER_FILE)
    assert (weights.size, weights.hash) == (file.stat().st_size, hash_file(file))
    policy.export(tmp_path / "checkpoint")
    expected = load_file(tmp_path / "checkpoint/adapter" / ADAPTER_FILE)
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_the_demo_sends_at_rank_4_is_the_adapter_and_a_twentieth_of_the_model(tmp_path):
    tokenizer = make_tokenizer()
    save_checkpoint(make_model(tokenizer), tokenizer, tmp_path / "model")
    policy = make_policy(tmp_path / "model", lora_rank=4)
    texts = probe_texts([np.arange(5)], CONTEXT_TOKENS)
    weights = write_version(LearnerFolder(tmp_path, 1), policy, Version(1, 1), "", texts, ADAPTER)
    sent = weights.size + len(encode(weights))  # with the probe
    policy.export(tmp_path / "checkpoint")
    assert sent <= (tmp_path / "checkpoint/adapter" / ADAPTER_FILE).stat().st_size + 4096
    assert 20 * sent <= (tmp_path / "checkpoint" / WEIGHTS_FILE).stat().st_size


def test_the_best_model_of_a_run_with_adapters_is_the_merged_one(model_folder, tmp_path):
    policy = make_policy(model_folder, lora_rank=4)
    folder = LearnerFolder(tmp_path, 1)
    write_version(folder, policy, Version(1, 0), "", adapter=ADAPTER)
    policy.update(make_batch(), 0)
    trained = logits(policy.model)
    weights = write_version(folder, policy, Version(1, 1), "", adapter=ADAPTER, with_model=True)
    policy.update(make_batch(), 1)
    assert verify_weights(weights)
    assert keep_if_best(folder, Version(1, 1), "accuracy", 0.5, 8)
    (kept,) = folder.best.glob("*/model")
    merged = AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32)
    assert torch.allclose(logits(merged), trained, atol=1e-5)
    assert not (kept / ADAPTER_FILE).exists()


def test_an_adapter_is_not_resumed_on_another_base_model(model_folder, tmp_path):
    policy = make_policy(model_folder, lora_rank=4)
    policy.save(tmp_path)
    make_policy(model_folder, lora_rank=4).load(tmp_path)
    other = make_policy(model_folder, lora_rank=4)
    with torch.no_grad():
        other.model.get_input_embeddings().weight[3, 4] += 0.1
    with pytest.raises(ConfigError, match="set LEARNER_MODEL back"):
        other.load(tmp_path)


def test_exporting_an_adapter_leaves_the_policy_as_it_was(model_folder, tmp_path):
    policy = make_policy(model_folder, lora_rank=4)
    policy.update(make_batch(), 0)
    before = logits(policy.model)
    for number in range(3):
        policy.export(tmp_path / str(number))
    assert torch.equal(logits(policy.model), before)


def test_a_lora_policy_is_saved_and_goes_on_bit_for_bit(model_folder, tmp_path):
    policy = make_policy(model_folder, lora_rank=4)
    policy.update(make_batch(), 0)
    policy.save(tmp_path)
    policy.update(make_batch(), 1)
    resumed = make_policy(model_folder, lora_rank=4)
    resumed.load(tmp_path)
    resumed.update(make_batch(), 1)
    assert torch.equal(logits(resumed.model), logits(policy.model))


def test_modules_that_the_model_lacks_are_named(model_folder):
    with pytest.raises(ConfigError, match="LEARNER_LORA_TARGET_MODULES=nonsense"):
        make_policy(model_folder, lora_rank=4, lora_target_modules="nonsense")


# The reference


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_reference_stays_where_the_policy_began(model_folder, lora_rank):
    policy = make_policy(model_folder, beta=0.1, lora_rank=lora_rank)
    first = policy.update(make_batch(), 0).tokens.kl
    assert np.abs(first).max() < 1e-6
    start = make_policy(model_folder).logprobs(make_batch().sequences)
    kl = policy.update(make_batch(), 1).tokens.kl
    now = policy._score(make_batch().sequences, policy._reference.logprobs)
    assert kl.mean() > 1e-4
    assert np.allclose(np.concatenate(now), np.concatenate(start), atol=1e-6)


def test_the_reference_follows_the_policy_at_its_steps_only(model_folder):
    policy = make_policy(
        model_folder, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5
    )
    start = policy._reference._model.model.lm_head.weight.clone()
    policy.update(make_batch(), 0)
    policy.update(make_batch(), 1)
    assert torch.equal(policy._reference._model.model.lm_head.weight, start)
    trained = policy.model.lm_head.weight.detach().clone()
    policy.update(make_batch(), 2)
    expected = 0.5 * trained + 0.5 * start
    assert torch.allclose(policy._reference._model.model.lm_head.weight, expected, atol=1e-7)


def test_a_mixed_reference_is_saved_and_loaded(model_folder, tmp_path):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    policy = make_policy(model_folder, **settings)
    for step in range(2):
        policy.update(make_batch(), step)
    policy.save(tmp_path)
    resumed = make_policy(model_folder, **settings)
    resumed.load(tmp_path)
    sequences = make_batch().sequences
    assert np.array_equal(
        np.concatenate(resumed._score(sequences, resumed._reference.logprobs)),
        np.concatenate(policy._score(sequences, policy._reference.logprobs)),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_outer_iteration_starts_with_a_new_optimizer_and_the_policy_as_reference(model_folder, dtype):
    policy = make_policy(model_folder, beta=0.1, outer_iteration_steps=2, dtype=dtype)
    policy.update(make_batch(), 0)
    assert np.abs(policy.update(make_batch(), 1).tokens.kl).max() > 1e-4
    assert np.abs(policy.update(make_batch(), 2).tokens.kl).max() < 1e-6
    inner = policy._engine._optimizer
    inner = inner.optimizer if policy._engine.stage else inner
    counts = {int(state["step"]) for state in inner.state.values() if "step" in state}
    assert counts == {1}


def test_a_policy_may_start_from_bare_weights_and_keeps_its_reference(model_folder, tmp_path):
    policy = make_policy(model_folder, beta=0.1)
    policy.update(make_batch(), 0)
    policy.export(tmp_path)
    resumed = Policy(model_folder, make_settings(beta=0.1), 10, start=tmp_path)
    assert torch.equal(logits(resumed.model), logits(policy.model))
    assert torch.equal(logits(resumed._reference._model.model), logits(policy._reference._model.model))


# Several optimizer steps


def test_iterations_times_mini_batches_are_the_optimizer_steps(model_folder):
    policy = make_policy(model_folder, num_iterations=2, num_mini_batches=3)
    update = policy.update(make_batch(), 0)
    assert update.optimizer_steps == 6
    assert len(update.tokens.first) == 2 * make_batch().trained_tokens
    assert 0 < update.tokens.first.sum() < make_batch().trained_tokens


def test_mini_batches_are_drawn_anew_each_time_and_the_same_on_a_replay(model_folder):
    policy = make_policy(model_folder, num_iterations=2, num_mini_batches=2)
    draws = [[m.sequences.tolist() for m in policy._mini_batches(make_batch(), step)] for step in (0, 1)]
    again = [m.sequences.tolist() for m in policy._mini_batches(make_batch(), 0)]
    assert again == draws[0]
    assert draws[0] != draws[1]
    assert draws[0][:2] != draws[0][2:]
    assert sorted(draws[0][0] + draws[0][1]) == list(range(7))


def test_the_decoupled_loss_clips_against_the_policy_of_before_the_update(model_folder):
    batch = make_batch()
    policy = make_policy(model_folder, decoupled_loss=True, num_iterations=2, epsilon=1e-6)
    tokens = policy.update(batch, 0).tokens
    first = tokens.first.astype(bool)
    assert np.allclose(tokens.ratio[first], 1.0)
    assert not np.allclose(tokens.ratio[~first], 1.0, atol=1e-3)
    direct = make_policy(model_folder).update(batch, 0).tokens
    assert not np.allclose(direct.ratio, 1.0, atol=1e-3)


def test_gradients_are_clipped_at_max_grad_norm(model_folder):
    """Adam's first moment is 0.1 of the first gradient that reaches it, as clipped."""
    policy = make_policy(model_folder, max_grad_norm=1e-3)
    update = policy.update(make_batch(), 0)
    assert update.grad_norm > 1e-3
    inner = policy._engine._optimizer
    inner = inner.optimizer if policy._engine.stage else inner
    moments = [state["exp_avg"] for state in inner.state.values()]
    norm = torch.sqrt(sum((moment.double() ** 2).sum() for moment in moments))
    assert norm.item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


# What is not finite


@pytest.mark.parametrize(
    "options", [{}, {"zero_stage": "1"}, {"zero_stage": "2"}, {"dtype": "bfloat16"}], ids=str
)
def test_a_step_with_nan_changes_nothing_and_the_next_one_is_as_if_it_had_not_been(
    model_folder, options
):
    policy = make_policy(model_folder, **options)
    start = logits(policy.model)
    assert policy.update(with_advantage(float("nan")), 0).skipped == 1
    assert torch.equal(logits(policy.model), start)
    update = policy.update(make_batch(), 1)
    clean = make_policy(model_folder, **options)
    clean.update(make_batch(), 0)
    assert update.skipped == 0
    assert torch.equal(logits(policy.model), logits(clean.model))


def test_weights_that_are_not_finite_are_not_written(model_folder, tmp_path):
    policy = make_policy(model_folder)
    with torch.no_grad():
        policy.model.lm_head.weight[3, 4] = float("inf")
    with pytest.raises(NotFinite, match="lm_head"):
        policy.export(tmp_path / "version")
    assert not (tmp_path / "version").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "bfloat16", "zero_stage": "0"}, "master weights"),
        ({"offload_optimizer": True}, "LEARNER_OFFLOAD_OPTIMIZER"),
        ({"offload_param": True, "zero_stage": "2"}, "LEARNER_OFFLOAD_PARAM"),
        ({"share_device": True, "zero_stage": "3"}, "LEARNER_SHARE_DEVICE"),
        ({"share_device": True, "zero_stage": "1", "offload_optimizer": True}, "LEARNER_SHARE_DEVICE"),
        ({"num_mini_batches": 5}, "at most 4"),
        ({"lora_rank": 4, "beta": 0.1, "sync_ref_model": True}, "the reference is the base model"),
        ({"lora_rank": 513}, "up to rank 512.*LEARNER_LORA_PUBLISH_MERGED"),
        ({"sync_ref_model": True}, "no reference model"),
        ({"ref_device": "cpu"}, "no reference model"),
        ({"delta": 3.0, "loss_type": "dppo"}, "LEARNER_DELTA has no effect"),
        ({"epsilon": 1.5}, "LEARNER_EPSILON"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_or_do_nothing_are_refused(settings, named):
    with pytest.raises(ValidationError, match=named):
        make_settings(**settings)


def test_a_device_that_is_not_there_is_named(model_folder):
    with pytest.raises(ConfigError, match="LEARNER_REF_DEVICE=cuda:77"):
        make_policy(model_folder, beta=0.1, ref_device="cuda:77")


# Settings that change between a save and a load


def test_a_changed_learning_rate_counts_after_a_load(model_folder, tmp_path):
    policy = make_policy(model_folder)
    policy.update(make_batch(), 0)
    policy.save(tmp_path)
    slower = Policy(model_folder, make_settings(learning_rate=1e-4, adam_beta1=0.5), steps=10)
    slower.load(tmp_path)
    assert slower.update(make_batch(), 1).learning_rate == 1e-4
    (group,) = slower._engine._optimizer.param_groups
    assert (group["lr"], group["betas"][0]) == (1e-4, 0.5)


def test_a_mixed_reference_stays_when_mixing_is_turned_off(model_folder, tmp_path):
    policy = make_policy(model_folder, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    for step in range(2):
        policy.update(make_batch(), step)
    policy.save(tmp_path)
    resumed = make_policy(model_folder, beta=0.1)
    resumed.load(tmp_path)
    mixed = policy._reference._model.model.lm_head.weight
    assert torch.equal(resumed._reference._model.model.lm_head.weight, mixed)
    resumed.save(tmp_path / "again")
    assert (tmp_path / "again" / "reference.safetensors").is_file()


def test_mixing_may_be_turned_on_later(model_folder, tmp_path):
    policy = make_policy(model_folder, beta=0.1)
    policy.update(make_batch(), 0)
    policy.save(tmp_path)
    resumed = make_policy(model_folder, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    resumed.load(tmp_path)
    resumed.update(make_batch(), 1)
    assert resumed._reference._changed


# Other models


def test_persistent_buffers_are_exported(model_folder, tmp_path):
    policy = make_policy(model_folder)
    policy.model.model.layers[0].register_buffer("bias_of_experts", torch.full((3,), 7.0))
    policy.export(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.0.bias_of_experts").tolist() == [7.0] * 3


def test_lora_is_refused_on_layers_that_it_would_merge_wrongly(model_folder):
    with pytest.raises(ConfigError, match="embed_tokens, a Embedding"):
        make_policy(model_folder, lora_rank=4, lora_target_modules="embed_tokens")


def test_two_policies_begin_with_the_same_adapter(model_folder):
    one, other = (whole_state(make_policy(model_folder, lora_rank=4)._engine) for _ in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_offloaded_optimizer_and_parameters_train_the_same(model_folder):
    options = {"adam_epsilon": 1e-4}  # with 1e-8 Adam's first step would enlarge rounding
    moved = options | {"zero_stage": "3", "offload_optimizer": True, "offload_param": True}
    plain, away = (make_policy(model_folder, **changes) for changes in (options, moved))
    for policy in (plain, away):
        policy.update(make_batch(), 0)
    expected = whole_state(plain._engine)
    for name, value in whole_state(away._engine).items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"zero_stage": "2"}, {"lora_rank": 4}, {"beta": 0.1}]
)
def test_a_policy_that_leaves_the_device_between_updates_trains_the_same(model_folder, settings):
    weights = []
    for leaves in (False, True):
        policy = make_policy(model_folder, **settings)
        for step in range(3):
            policy.update(make_batch(), step)
            if leaves:
                policy.offload()
                policy.reload()
        weights.append({name: value.clone() for name, value in policy.model.named_parameters()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"packing": False}])
def test_the_probe_is_scored_as_transformers_scores_it(model_folder, tmp_path, settings):
    policy = make_policy(model_folder, **settings)
    policy.update(make_batch(), 0)
    texts = [np.arange(3, 13, dtype="<i4"), np.array([5, 3], "<i4")]
    weights = write_version(LearnerFolder(tmp_path, 1), policy, Version(1, 1), "", texts)
    model = AutoModelForCausalLM.from_pretrained(weights.path, dtype=torch.float32)
    for text, probe in zip(texts, weights.probes, strict=True):
        ids = torch.from_numpy(text[None].astype(np.int64))
        with torch.no_grad():
            scored = torch.log_softmax(model(ids).logits[0, :-1], -1)[range(len(text) - 1), ids[0, 1:]]
        assert probe.token_ids.tolist() == text.tolist()
        assert np.allclose(probe.logprobs, scored.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ([3, 4], 1000, [129, 129]),
        ([300], 1000, [129, 129]),
        ([100] * 5, 60, [59] * 5),
        ([1], 3, [2] * 256),
        ([], 100, []),
        ([0], 100, []),
        ([5], 2, []),
    ],
)
def test_prompts_are_joined_and_repeated_to_texts_with_256_positions(lengths, room, expected):
    texts = probe_texts([np.arange(length, dtype="<i4") for length in lengths], room)
    assert [len(text) for text in texts] == expected
    joined = np.concatenate([np.zeros(0, "<i4"), *(np.arange(length) for length in lengths)])
    assert not texts or np.concatenate(texts)[: len(joined)].tolist() == joined[: sum(expected)].tolist()


def test_a_version_whose_log_probabilities_are_not_finite_is_not_announced(
    model_folder, tmp_path, monkeypatch
):
    policy = make_policy(model_folder)
    monkeypatch.setattr(policy, "score", lambda texts: [np.array([-1.0, np.nan])])
    with pytest.raises(NotFinite, match="log-probabilities"):
        write_version(LearnerFolder(tmp_path, 1), policy, Version(1, 1), "", [np.arange(3, 6)])


def test_a_run_whose_engine_computes_another_model_ends(model_folder, monkeypatch):
    policy = make_policy(model_folder)
    update = policy.update(make_batch(), 0)
    found = agreement(update.tokens)["sampling/sampling_logp_difference/mean"]
    low, high = found * 0.99, found * 1.01
    check_agreement(update, make_settings(max_logp_difference=low))  # a few tokens are too few
    monkeypatch.setattr(metrics, "FEWEST_COMPARED", 1)
    check_agreement(update, make_settings(max_logp_difference=high))
    check_agreement(update, make_settings(max_logp_difference=0.0))
    check_agreement(update, make_settings(max_logp_difference=low, accept_sampling_bias=True))
    with pytest.raises(Disagreement, match="LEARNER_MAX_LOGP_DIFFERENCE"):
        check_agreement(update, make_settings(max_logp_difference=low))
