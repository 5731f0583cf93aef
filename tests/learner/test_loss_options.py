"""Options of the loss against the slow version, TRL's recorded results, and the user's own loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.learner.algorithm.loss import (
    LossOptions,
    LossTokens,
    aggregation_weights,
    high_entropy,
    policy_loss,
)
from penstock.learner.data.plan import make_plan
from tests.helpers import NIGHTLY
from tests.learner import slow
from tests.learner.test_loss import PLAIN, assert_equals_slow, at, one_sequence, prepared
from tests.learner.trained import make_batch, make_policy, weights_of
from tests.learner.trl_losses import ADVANTAGES, LENGTHS, LONGEST, PATH, mask, padded_values

RECORDED = json.loads(PATH.read_text())
PACKAGES = os.environ.get("PENSTOCK_REWARD_PACKAGES", "")


def in_trls_form(changes: dict, seed: int) -> tuple[LossTokens, LossOptions]:
    """A recorded case as a packed row, in the decoupled form that TRL has."""
    there = mask().bool()
    values = {name: padded[there] for name, padded in padded_values(seed).items()}
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    changes = dict(changes)
    quantile = changes.pop("top_entropy_quantile", 1.0)
    options = replace(
        PLAIN, decoupled_loss=True, importance_sampling_correction="token", importance_sampling_cap=2.0,
        **changes,
    )  # fmt: skip
    weight = aggregation_weights(
        np.array(LENGTHS), loss_type=options.loss_type, batch_tokens=sum(LENGTHS), mini_batches=1,
        max_completion_length=LONGEST,
    )  # fmt: skip
    (high,) = high_entropy([values["entropy"].numpy()], [np.ones(sum(LENGTHS), bool)], quantile)
    row = LossTokens(
        logprobs_N=values["logprobs"], entropy_N=values["entropy"], old_N=values["old"],
        behaviour_N=values["behaviour"], reference_N=values["reference"],
        advantages_N=torch.tensor(ADVANTAGES, dtype=torch.float64)[sequence],
        weight_N=torch.tensor(weight)[sequence], mask_N=torch.ones_like(sequence, dtype=torch.bool),
        sequence_N=sequence, sequences=len(LENGTHS), high_entropy_N=torch.tensor(high),
    )  # fmt: skip
    return row, options


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: str(case["changes"]))
def test_losses_and_gradients_equal_trls(case):
    assert RECORDED["source"].startswith("TRL 1.16.0")
    row, options = in_trls_form(case["changes"], case["seed"])
    value, gradient = slow.gradient(
        lambda logprobs: policy_loss(replace(row, logprobs_N=logprobs), options).loss, row.logprobs_N
    )
    assert value == pytest.approx(case["loss"], abs=1e-7)  # TRL has SAPO's in float32
    assert gradient.tolist() == pytest.approx(case["gradient"], abs=1e-7)


@pytest.mark.skipif(not NIGHTLY or not PACKAGES, reason="needs TRL in PENSTOCK_REWARD_PACKAGES")
def test_the_record_is_what_trl_computes():
    program = "import json; from tests.learner.trl_losses import recorded; print(json.dumps(recorded()))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(PACKAGES).absolute())}, timeout=600, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == RECORDED


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"])
def test_a_ratio_per_sequence_equals_the_slow_version(loss_type):
    for seed in range(4):
        assert_equals_slow(
            replace(PLAIN, loss_type=loss_type, importance_sampling_level="sequence"), seed
        )


@pytest.mark.parametrize(("high", "low"), [(1.0, 1.05), (0.5, 2.0)])
def test_temperatures_of_sapo_equal_the_slow_version(high, low):
    for seed in range(4):
        sapo = replace(PLAIN, loss_type="sapo", sapo_temperature_pos=high, sapo_temperature_neg=low)
        assert_equals_slow(sapo, seed)


def test_the_off_policy_mask_equals_the_slow_version():
    masked = 0
    for seed, threshold in product(range(6), (0.01, 0.2)):
        options = replace(PLAIN, off_policy_mask_threshold=threshold)
        assert_equals_slow(options, seed)
        row = prepared(seed, options)
        masked += policy_loss(row, options).loss.item() != policy_loss(row, PLAIN).loss.item()
    assert 0 < masked < 12, "some cases must reach the threshold"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_corrected_kl_equals_the_slow_version(estimator):
    for seed, level in product(range(3), ("token", "sequence")):
        assert_equals_slow(
            replace(
                PLAIN, beta=0.3, kl_estimator=estimator, use_bias_correction_kl=True,
                importance_sampling_level=level,
            ),
            seed,
        )  # fmt: skip


def test_the_corrected_kl_has_the_gradient_of_the_kl():
    """At policy = behaviour, the mean over all tokens of a small vocabulary, by their probability."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    options = replace(PLAIN, beta=1.0, use_bias_correction_kl=True)
    logprobs = logits.log_softmax(0)
    fixed = logprobs.detach()
    row = one_sequence([0.0] * 3, fixed.tolist(), 0.0)
    row = replace(row, reference_N=reference, logprobs_N=logprobs, weight_N=fixed.exp())
    (found,) = torch.autograd.grad(policy_loss(row, options).loss, logits)
    kl = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - reference)).sum()
    (expected,) = torch.autograd.grad(kl, logits)
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.97, 1.0])
def test_tokens_of_high_entropy_equal_the_slow_version(share):
    generator = np.random.default_rng(3)
    entropies = [generator.random(size) for size in (4, 1, 9)]
    masks = [np.ones(4, bool), np.zeros(1, bool), generator.random(9) < 0.7]
    found = high_entropy(entropies, masks, share)
    trained = [value for values, kept in zip(entropies, masks, strict=True) for value in values[kept]]
    marked = [high for highs, kept in zip(found, masks, strict=True) for high in highs[kept]]
    assert marked == slow.highest(trained, share)
    assert not any(high for highs, kept in zip(found, masks, strict=True) for high in highs[~kept])


@pytest.mark.parametrize("seed", range(4))
def test_only_tokens_of_high_entropy_have_objective_and_bonus(seed):
    row = prepared(seed, PLAIN)
    row = replace(row, high_entropy_N=torch.arange(len(row.mask_N)) % 3 == 0)
    options = replace(PLAIN, entropy_coef=0.1)
    value, gradient = slow.gradient(lambda x: policy_loss(at(row, x), options).loss, row.logprobs_N)
    expected, by_loops = slow.gradient(lambda x: slow.loss(at(row, x), options), row.logprobs_N)
    assert value == pytest.approx(expected, rel=1e-9)
    assert torch.allclose(gradient, by_loops, rtol=1e-9, atol=1e-13)
    assert (gradient[~row.high_entropy_N] == 0).all()


def test_a_policy_trains_tokens_of_high_entropy_alone_whatever_the_rows(model_folder):
    """The bound is the batch's, so it does not depend on how sequences share rows."""
    changes = {"top_entropy_quantile": 0.5, "learning_rate": 0.01}
    weights = []
    for more in ({"packing": True}, {"packing": False}):
        policy = make_policy(model_folder, **changes, **more)
        policy.update(make_batch(0)[1], 0)
        weights.append(weights_of(policy))
    whole = make_policy(model_folder, learning_rate=0.01)
    whole.update(make_batch(0)[1], 0)
    others = weights_of(whole)
    for name, one in weights[0].items():
        assert torch.allclose(one, weights[1][name], rtol=0, atol=1e-6)
    assert max(float((one - others[name]).abs().max()) for name, one in weights[0].items()) > 1e-3


OWN = """
import torch

def reinforce(tokens, options):
    return -tokens.advantages_N * tokens.logprobs_N

def whole(tokens, options):
    return -(tokens.advantages_N * tokens.logprobs_N).sum()

def text(tokens, options):
    return "0"
"""


def test_an_own_loss_is_weighted_corrected_and_masked(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    settings = LearnerSettings(loss=f"{tmp_path}/mine.py:reinforce", loss_type="bnpo", beta=0.1)
    options = LossOptions.from_settings(settings)
    row = prepared(1, options)
    row = replace(row, logprobs_N=torch.where(row.mask_N, row.logprobs_N, torch.nan))
    value, gradient = slow.gradient(
        lambda x: policy_loss(replace(row, logprobs_N=x), options).loss, row.logprobs_N
    )
    cispo = replace(options, own_loss=None, loss_type="cispo", epsilon_high=1e9)

    def by_hand(logprobs):
        """CISPO without a bound is the ratio times REINFORCE."""
        ratio = (logprobs.detach() - row.old_N).exp()
        weight = torch.where(row.mask_N, row.weight_N / ratio, 0.0)
        kl = policy_loss(
            replace(row, logprobs_N=logprobs, advantages_N=row.advantages_N * 0), cispo
        ).loss
        objective = policy_loss(
            replace(row, logprobs_N=logprobs, weight_N=weight, reference_N=None),
            replace(cispo, beta=0.0),
        )
        return objective.loss + kl

    expected, other_gradient = slow.gradient(by_hand, row.logprobs_N)
    assert value == pytest.approx(expected, rel=1e-9)
    assert torch.allclose(gradient, other_gradient, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "found"), [("whole", r"a tensor of shape \(\)"), ("text", "found str")]
)
def test_an_own_loss_of_another_form_is_an_error(tmp_path, function, found):
    (tmp_path / "mine.py").write_text(OWN)
    options = LossOptions.from_settings(LearnerSettings(loss=f"{tmp_path}/mine.py:{function}"))
    with pytest.raises(ConfigError, match=found):
        policy_loss(prepared(0, options), options)


def test_an_own_loss_that_is_not_there_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for name, text in (("other", "has no function other; it has reinforce, text, torch, whole"),):
        with pytest.raises(ConfigError, match=text):
            LossOptions.from_settings(LearnerSettings(loss=f"{tmp_path}/mine.py:{name}"))
    with pytest.raises(ConfigError, match="there is no file"):
        LossOptions.from_settings(LearnerSettings(loss=f"{tmp_path}/none.py:reinforce"))


def test_an_own_loss_without_gradient_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text("def own(tokens, options): return tokens.logprobs_N.detach()")
    options = LossOptions.from_settings(LearnerSettings(loss=f"{tmp_path}/mine.py:own"))
    row = prepared(0, options)
    with pytest.raises(ConfigError, match="the loss has no gradient"):
        policy_loss(replace(row, logprobs_N=row.logprobs_N.clone().requires_grad_()), options)
    policy_loss(row, options)  # where no gradient is asked for


@pytest.mark.parametrize("code", ["def own(tokens): ...", "def own(a, b, c): ...", "class own: ..."])
def test_an_own_loss_with_other_arguments_is_an_error_at_the_start(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=r"expected a function f\(tokens, options\)"):
        make_plan(LearnerSettings(model=str(tmp_path), loss=f"{tmp_path}/mine.py:own"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"delta": 2.0, "loss_type": "sapo"}, "LEARNER_DELTA has no effect"),
        ({"sapo_temperature_pos": 2.0}, "LEARNER_SAPO_TEMPERATURE_POS has no effect"),
        (
            {"importance_sampling_level": "sequence", "loss_type": "dppo"},
            "LEARNER_IMPORTANCE_SAMPLING_LEVEL has no effect",
        ),
        ({"use_bias_correction_kl": True}, "LEARNER_BETA=0"),
        ({"loss": "reinforce"}, "LEARNER_LOSS: .* no loss 'reinforce'"),
    ],
)
def test_settings_of_the_loss_that_do_nothing_are_errors(changes, text):
    with pytest.raises(ValidationError, match=text):
        LearnerSettings(**changes)
