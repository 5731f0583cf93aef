"""Rewards of TRL and verl themselves, unchanged, as docs/rewards.md lists them.

`make nightly` installs the packages in a folder of their own, which PENSTOCK_REWARD_PACKAGES names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import RewarderSettings
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.rewarders.scoring_pool import ScoringPool

FOLDER = Path(os.environ.get("PENSTOCK_REWARD_PACKAGES", "")).absolute()
VERL = FOLDER / "verl/utils/reward_score"
needed = pytest.mark.skipif(
    os.environ.get("NIGHTLY") != "1" or "PENSTOCK_REWARD_PACKAGES" not in os.environ,
    reason="needs TRL and verl in PENSTOCK_REWARD_PACKAGES, and NIGHTLY=1",
)

RIGHT = "<think>\n6 times 12\n</think>\n\\boxed{72} #### 72 <answer>72</answer>"
WRONG = "6 times 12 is \\boxed{71} #### 71 <answer>71</answer>"

MADE = """
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward
from trl.rewards import get_soft_overlong_punishment

cosine = get_cosine_scaled_reward(min_value_correct=1.0, max_len=100)
repetition = get_repetition_penalty_reward(ngram_size=9, max_penalty=-1.0)
overlong = get_soft_overlong_punishment(max_completion_len=3, soft_punish_cache=2)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with pytest.MonkeyPatch.context() as patch:
        if "PENSTOCK_REWARD_PACKAGES" in os.environ:
            patch.setattr(sys, "path", [*sys.path, str(FOLDER)])  # verl has a package `tests`
        with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=4, user="")) as pool:
            yield pool


def score(pool: ScoringPool, reward: object, solution: object = "72") -> tuple[Any, ...]:
    """Score a right and a wrong completion, of three tokens and of one."""
    (spec,) = resolve_rewards(LearnerSettings(rewards=str(reward), reward_completions="messages"))
    assert pool.check(spec) == ""
    arguments = {
        "prompts": ["6*12="] * 2, "completions": [RIGHT, WRONG], "completion_ids": [[1, 2, 3], [1]],
        "solution": [solution] * 2, "data_source": ["openai/gsm8k"] * 2,
    }  # fmt: skip
    return pool.score(spec, arguments).values


@needed
@pytest.mark.parametrize(
    ("reward", "values"),
    [
        ("trl.rewards.accuracy_reward", (1.0, 0.0)),
        ("trl.rewards.reasoning_accuracy_reward", (1.0, 0.0)),
        ("trl.rewards.think_format_reward", (1.0, 0.0)),
        ("made.py:cosine", (1.0, -1.0)),
        ("made.py:repetition", (0.0, 0.0)),
        ("made.py:overlong", (-1.0, 0.0)),
        (VERL / "gsm8k.py:compute_score", (1.0, 0.0)),
        (VERL / "math_dapo.py:compute_score", (1.0, -1.0)),
        (VERL / "math_reward.py:compute_score", (1.0, 0.0)),
    ],
)
def test_a_function_of_another_project_runs_unchanged(
    pool: ScoringPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: object, values: object
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text(MADE)
    assert score(pool, reward) == pytest.approx(values, abs=0.05)


@needed
def test_verls_search_score_gets_its_gold_answer_as_a_map(pool: ScoringPool) -> None:
    reward = VERL / "search_r1_like_qa_em.py:compute_score"
    assert score(pool, reward, {"target": ["72"]}) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("accuracy_reward", (1.0, 0.0)), ("format_reward", (0.0, 0.0)), ("tag_count_reward", (1.0, 0.5)),
        ("reasoning_steps_reward", (0.0, 0.0)), ("len_reward", (-0.5, 0.5)), ("cosine", (0.999, 0.0)),
        ("repetition", (0.0, 0.0)), ("overlong", (-1.0, 0.0)), ("code_reward", (1.0, 0.0)),
    ],
)  # fmt: skip
def test_the_forms_of_open_r1_run(pool: ScoringPool, name: str, values: object) -> None:
    assert score(pool, f"tests.rewarders.open_r1_forms.{name}") == values
