"""Adaptive entropy: against plain loops and TRL's own results; its state survives a checkpoint."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.learner.algorithm.batch import Batch
from penstock.learner.algorithm.entropy import EntropyControl, adapt, applied_coef, control_of
from penstock.learner.report.metrics import update_metrics
from tests.learner.builders import make_settings
from tests.learner.trained import make_batch, make_policy, same, weights_of

RECORDED = json.loads(Path(__file__).with_name("trl_entropy.json").read_text())
"""What TRL's own lines computed, step by step; `source` names release and file."""

HIGH_TARGET = {"use_adaptive_entropy": True, "entropy_target": 50.0, "entropy_coef_delta": 0.5}
"""The entropy is always below the target, so the coefficient grows at each step."""


def run(entropies: list[float], **changes: float) -> list[list[float]]:
    """Per step: entropy, applied coefficient, coefficient after the step."""
    settings = make_settings(use_adaptive_entropy=True, **changes)
    control, rows = EntropyControl(settings.entropy_coef, None), []
    for entropy in entropies:
        applied = applied_coef(control, settings)
        control = adapt(control, entropy, settings)
        rows.append([entropy, applied, control.coef])
    return rows


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: str(case["settings"]))
def test_the_coefficient_equals_trls(case) -> None:
    assert RECORDED["source"].startswith("TRL 1.16.0")
    found = run([row[0] for row in case["steps"]], **case["settings"])
    for ours, theirs in zip(found, case["steps"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


def test_the_coefficient_equals_the_slow_version() -> None:
    draw = random.Random(1)
    for _ in range(50):
        low, target, delta = draw.uniform(0, 0.2), draw.uniform(0.1, 2), draw.uniform(0.01, 0.1)
        high = low + draw.uniform(0, 0.5)
        coef, before = draw.uniform(low, high), math.inf
        entropies = [draw.uniform(0, 2 * target) for _ in range(20)]
        changes = {"entropy_target": target, "entropy_coef_delta": delta, "entropy_coef": coef}
        found = run(entropies, **changes, entropy_coef_min=low, entropy_coef_max=high)
        for entropy, (_, applied, after) in zip(entropies, found, strict=True):
            assert applied == (0.0 if before > target else pytest.approx(coef, abs=1e-12))
            coef += -delta if entropy > target else delta
            coef = high if coef > high else low if coef < low else coef
            before = entropy
            assert after == pytest.approx(coef, abs=1e-12)


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
def test_an_entropy_that_is_no_number_changes_nothing(entropy: float) -> None:
    settings = make_settings(use_adaptive_entropy=True)
    assert adapt(EntropyControl(0.3, 0.1), entropy, settings) == EntropyControl(0.3, 0.1)


@pytest.mark.parametrize("wrong", [{}, [], {"coef": "x", "entropy": 1}, {"coef": None, "entropy": None}])
def test_a_damaged_state_is_an_error(wrong) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        control_of(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"entropy_target": 0.3},
        {"use_adaptive_entropy": True, "entropy_coef": 2.0},
        {"use_adaptive_entropy": True, "entropy_coef_min": 0.1},
        {"use_adaptive_entropy": True, "entropy_coef_min": 0.3, "entropy_coef_max": 0.2},
    ],
)
def test_settings_without_effect_or_out_of_bounds_are_refused(wrong) -> None:
    with pytest.raises(ValidationError, match="LEARNER_ENTROPY_"):
        make_settings(**wrong)


def test_the_logged_ratio_is_that_to_the_sampling_policy(model_folder) -> None:
    update = make_policy(model_folder, decoupled_loss=True).update(make_batch(1)[1], 1)
    ratio = np.exp(update.tokens.logprobs - update.tokens.behaviour)
    found = update_metrics(update)
    for name in ("min", "mean", "max", "std"):
        logged = found[f"sampling/importance_sampling_ratio/{name}"]
        assert logged == pytest.approx(getattr(ratio, name)())
    assert found["sampling/importance_sampling_ratio/std"] > 0


def test_each_optimizer_step_adapts_and_the_first_has_no_bonus(model_folder) -> None:
    plain, adapted = make_policy(model_folder), make_policy(model_folder, **HIGH_TARGET)
    batch = make_batch(1)[1]
    update = adapted.update(batch, 1)
    plain.update(batch, 1)
    assert same(weights_of(plain), weights_of(adapted))  # no bonus: there was no step before
    assert update_metrics(update)["entropy_coef"] == 0.5
    assert "entropy_coef" not in update_metrics(plain.update(batch, 2))
    adapted.update(batch, 2)
    assert not same(weights_of(plain), weights_of(adapted))
    twice = make_policy(model_folder, num_iterations=2, num_mini_batches=2, **HIGH_TARGET)
    assert twice.update(batch, 1).entropy_coef == 1.0  # four steps of 0.5, bounded by 1


def test_a_resumed_policy_has_the_same_coefficient_and_weights(model_folder, tmp_path) -> None:
    policy = make_policy(model_folder, **HIGH_TARGET)
    policy.update(make_batch(1)[1], 1)
    policy.save(tmp_path)
    after = policy.update(make_batch(2)[1], 2)
    resumed = make_policy(model_folder, **HIGH_TARGET)
    resumed.load(tmp_path)
    again = resumed.update(make_batch(2)[1], 2)
    assert (again.entropy_coef, again.loss) == (after.entropy_coef, after.loss)
    assert same(weights_of(resumed), weights_of(policy))


def test_a_skipped_step_leaves_the_coefficient(model_folder) -> None:
    policy = make_policy(model_folder, **HIGH_TARGET)
    first, *rest = make_batch(1)[1].sequences
    update = policy.update(Batch((replace(first, advantage=math.nan), *rest)), 1)
    assert update.skipped == 1
    assert update.entropy_coef == 0.0


def test_a_coefficient_of_a_checkpoint_is_put_within_changed_bounds() -> None:
    settings = make_settings(use_adaptive_entropy=True, entropy_coef_max=0.01, entropy_coef=0.0)
    assert applied_coef(EntropyControl(0.5, 0.1), settings) == 0.01
