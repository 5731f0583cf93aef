"""Values that look as if they were copied from TRL, where they mean something else."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values

from penstock.common.config.command import load
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.misplaced import misplaced_values
from penstock.common.config.role_command import LearnerCommand
from penstock.common.errors import ConfigError

SEQUENCE_MASK = {"importance_sampling_correction": "sequence", "importance_sampling_mode": "mask"}
GSPO = {"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
RECIPES = sorted((Path(__file__).parents[2] / "deploy" / "recipes").glob("*.env"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_type": "cispo"}, "bounds the ratio at 1.28.*LEARNER_EPSILON_HIGH=4"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "bounds the ratio at 6"),
        ({"loss_type": "gspo"}, "published with 0.0003"),
        ({"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 0.28}, "published with 0.0003"),
        ({"importance_sampling_level": "sequence"}, "published with 0.0003"),
        (GSPO | {"loss_type": "grpo"}, "LEARNER_EPSILON=0.0003 is a range for gspo. With grpo"),
        ({"epsilon": 0.1}, "LEARNER_EPSILON_HIGH is not: it stays 0.28"),
        ({"epsilon": 0.2}, "LEARNER_EPSILON_HIGH is not: it stays 0.28"),
        ({"loss_type": "sapo", "epsilon_high": 0.3}, "no effect with sapo"),
        ({"loss_type": "cispo", "epsilon_high": 4.0, "epsilon": 0.1}, "no effect with cispo"),
        (GSPO | {"importance_sampling_level": "token"}, "no effect: gspo"),
        ({"beta": 0.9}, "LEARNER_ADAM_BETA1"),
        ({"min_lr": 1e-7, "beta": 0.0}, "LEARNER_MIN_LR has no effect: LR_SCHEDULER_TYPE is constant"),
        ({"lora_alpha": 16}, "LEARNER_LORA_ALPHA has no effect: LORA_RANK is 0"),
        ({"kl_estimator": "k1"}, "LEARNER_KL_ESTIMATOR has no effect: BETA is 0"),
        ({"eval_steps": 5}, "LEARNER_EVAL_STEPS has no effect: no held-out questions"),
        ({"importance_sampling_cap": 3.0}, "TRL's bound of sequence_mask"),
        ({"importance_sampling_cap": 0.2, "importance_sampling_min": 0.1}, "not its distance from 1"),
        (SEQUENCE_MASK, "sequences with a ratio below 0.5 are masked"),
        (GSPO | {"entropy_coef": 0.01}, "The entropy bonus is weighted as gspo"),
        ({"loss_type": "dr_grpo", "use_adaptive_entropy": True}, "weighted as dr_grpo"),
        ({"beta": 1e-5}, "LEARNER_BETA=1e-05 needs a reference model.*hardly counts"),
        ({"beta": 0.04, "evaluate_only": True, "eval_dataset": ["x"]}, "trains nothing"),
        ({"beta": 0.04, "outer_iteration_steps": 1}, "for a term that is 0"),
        ({"beta": 0.04, **SYNCED}, "for a term that is 0"),
        ({"beta": 1e-5, "outer_iteration_steps": 1}, "for a term that is 0"),
    ],
    ids=str,
)  # fmt: skip
def test_a_misplaced_value_is_named_once(values: dict[str, Any], words: str) -> None:
    found = misplaced_values(LearnerSettings(**values))
    assert len(found) == 1
    assert re.search(words, found[0]), found[0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"loss_type": "cispo", "epsilon_high": 4.0},
        GSPO,
        {"epsilon": 0.1, "epsilon_high": 0.1},
        {"beta": 0.04},
        SEQUENCE_MASK | {"importance_sampling_min": 0.0, "importance_sampling_cap": 3.0},
        {"entropy_coef": 0.01},
        {"loss_type": "dppo", "epsilon": 0.005, "epsilon_high": 0.005},
        {"beta": 1e-4},
        {"evaluate_only": True, "eval_dataset": ["x"]},
        {"beta": 0.04, "outer_iteration_steps": 1, "num_iterations": 2},
        {"beta": 0.04, "outer_iteration_steps": 1, "kl_estimator": "k1"},
        {"beta": 0.04, "outer_iteration_steps": 2},
        {"beta": 0.04, **SYNCED, "ref_model_mixup_alpha": 0.9},
    ],
    ids=str,
)
def test_sound_values_are_not(values: dict[str, Any]) -> None:
    assert misplaced_values(LearnerSettings(**values)) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_has_one(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dotenv_values(recipe).items():
        monkeypatch.setenv(name, value or "")
    if not os.environ.get("LEARNER_EVAL_HOLDOUT"):  # the user names the questions, held-out ones too
        monkeypatch.setenv("LEARNER_EVAL_DATASET", "heldout.jsonl")
    assert misplaced_values(load(LearnerCommand, "learner", []).learner) == []


@pytest.mark.parametrize("value", ["True", "false"])
def test_a_truth_value_of_scale_rewards_is_refused_with_what_it_is_here(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LEARNER_SCALE_REWARDS", value)
    with pytest.raises(ConfigError, match=r"LEARNER_SCALE_REWARDS: .*group"):
        load(LearnerCommand, "learner", [])
