"""Rewards of TRL, ms-swift and verl themselves, unchanged, as docs/rewards.md lists them.

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
from tests.helpers import NIGHTLY

FOLDER = Path(os.environ.get("PENSTOCK_REWARD_PACKAGES", "")).absolute()
VERL = FOLDER / "verl/utils/reward_score"
needed = pytest.mark.skipif(
    not NIGHTLY or "PENSTOCK_REWARD_PACKAGES" not in os.environ,
    reason="needs TRL, ms-swift and verl in PENSTOCK_REWARD_PACKAGES, and NIGHTLY=1",
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

MADE_OF_SWIFT = """
from types import SimpleNamespace
from swift.rewards.orm import CosineReward, RepetitionPenalty, SoftOverlong, orms

args = SimpleNamespace(
    repetition_n_grams=1, repetition_max_penalty=-1.0, soft_max_length=3, soft_cache_length=2,
    cosine_min_len_value_wrong=-0.5, cosine_max_len_value_wrong=0.0,
    cosine_min_len_value_correct=1.0, cosine_max_len_value_correct=0.5, cosine_max_len=3,
)
orms["swift_cosine"] = CosineReward(args)
orms["swift_repetition"] = RepetitionPenalty(args)
orms["swift_overlong"] = SoftOverlong(args)
"""

MADE_OF_VERL = f"""
import functools, sys
sys.path.insert(0, {str(VERL)!r})
from prime_code import compute_score

code = functools.partial(compute_score, continuous=True)
"""

SWIFT = FOLDER / "swift/rewards/orm.py"
CODE = "```python\nprint(int(input()) + {})\n```"
CALL = "<think> a </think>\n<response> 72 </response>"


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with pytest.MonkeyPatch.context() as patch:
        if "PENSTOCK_REWARD_PACKAGES" in os.environ:
            patch.setattr(sys, "path", [*sys.path, str(FOLDER)])  # verl has a package `tests`
        with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=4, user="")) as pool:
            yield pool


def score(
    pool: ScoringPool,
    reward: object,
    *completions: str,
    form: str = "messages",
    solution: object = "72",
    **columns: object,
) -> tuple[Any, ...]:
    """Score a right and a wrong completion, of three tokens and of one."""
    options = {"completions": form, "columns": ["solution", "data_source", *columns]}
    (spec,) = resolve_rewards(LearnerSettings(rewards=str(reward)), options)
    assert pool.check(spec) == ""
    arguments = {
        "prompts": ["6*12="] * 2, "completions": list(completions or (RIGHT, WRONG)),
        "completion_ids": [[1, 2, 3], [1]],
        "solution": [solution] * 2, "data_source": ["openai/gsm8k"] * 2,
        "trainer_state": [{"global_step": 1, "max_steps": 4}] * 2,
        **{name: [value] * 2 for name, value in columns.items()},
    }  # fmt: skip
    return pool.score(spec, arguments).values


@needed
@pytest.mark.parametrize(
    ("reward", "values"),
    [
        ("trl.rewards.accuracy_reward", (1.0, 0.0)),
        ("trl.rewards.reasoning_accuracy_reward", (1.0, 0.0)),
        ("trl.rewards.think_format_reward", (1.0, 0.0)),
        ("trl.rewards.accuracy_rewards.accuracy_reward", (1.0, 0.0)),
        ("trl.rewards.format_rewards.think_format_reward", (1.0, 0.0)),
        ("swift.rewards.accuracy", (1.0, 0.0)),
        ("swift.rewards.orm.format", (0.0, 0.0)),
        ("swift.rewards.orm.ReActFormat", (0.0, 0.0)),
        (f"{SWIFT}:MathAccuracy", (1.0, 0.0)),
        ("made_of_swift.py:swift_cosine", (0.5, -0.375)),
        ("made_of_swift.py:swift_repetition", (0.0, 0.0)),
        ("made_of_swift.py:swift_overlong", (-1.0, 0.0)),
        ("made.py:cosine", (1.0, -1.0)),
        ("made.py:repetition", (0.0, 0.0)),
        ("made.py:overlong", (-1.0, 0.0)),
        (f"{VERL}/gsm8k.py:compute_score", (1.0, 0.0)),
        (f"{VERL}/math_dapo.py:compute_score", (1.0, -1.0)),
        (f"{VERL}/math_reward.py:compute_score", (1.0, 0.0)),
    ],
)
def test_a_function_of_another_project_runs_unchanged(
    pool: ScoringPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: object, values: object
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text(MADE)
    Path("made_of_swift.py").write_text(MADE_OF_SWIFT)
    assert score(pool, reward) == pytest.approx(values, abs=0.05)


@needed
@pytest.mark.parametrize("name", ["compute_score", "compute_score_subem"])
def test_verls_search_score_gets_its_gold_answer_as_a_map(pool: ScoringPool, name: str) -> None:
    completions = ("<answer>x</answer> <answer>72</answer>", "<answer>x</answer> <answer>71</answer>")
    gold = {"target": ["72"]}
    found = score(pool, f"{VERL}/search_r1_like_qa_em.py:{name}", *completions, solution=gold)
    assert found == (1.0, 0.0)


@needed
def test_verls_score_of_tool_calls_gets_the_name_of_the_model(pool: ScoringPool) -> None:
    extra = {"experiment_name": "qwen"}
    completions = (f"<|im_start|>assistant\n{CALL}<|im_end|>", "72")
    reward = f"{VERL}/rlla.py:compute_score"
    assert score(pool, reward, *completions, solution=CALL, extra_info=extra) == (1.0, 0.0)


@needed
def test_verls_score_of_code_runs_the_code(
    pool: ScoringPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_of_verl.py").write_text(MADE_OF_VERL)
    completions, cases = [CODE.format(1), CODE.format(2)], '{"inputs": ["1"], "outputs": ["2"]}'
    reward = f"{tmp_path}/made_of_verl.py:code"
    assert score(pool, reward, *completions, test_cases=cases) == (1.0, 0.0)


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


@pytest.mark.parametrize(
    ("name", "form", "values"),
    [
        ("in_tokens", "auto", (3.0, 1.0)), ("in_letters", "text", (len(RIGHT), len(WRONG))),
        ("thinks", "messages", (1.0, 0.0)), ("boxed", "text", (1.0, 0.0)),
        ("maths", "messages", (1.0, 1.0)), ("coding", "messages", (None, None)),
        ("waited", "messages", (1.0, 1.0)), ("logged", "messages", (1.0, 1.0)),
        ("curriculum", "messages", (0.25, 0.25)), ("external_accuracy", "messages", (1.0, 0.0)),
        ("external_countdown", "messages", (1.0, 1.0)), ("code_format", "messages", (1.0, 1.0)),
        ("scheduled", "messages", (1.0, 1.0)), ("judged", "messages", (1.0, 0.0)),
        ("in_tokens_of_swift", "messages", (3.0, 1.0)),
    ],
)  # fmt: skip
def test_the_forms_of_the_guides_run(pool: ScoringPool, name: str, form: str, values: object) -> None:
    columns = {"ground_truth": "72", "task": "math", "target": 5, "nums": [2, 3]}
    columns |= {"verification_info": {"language": "python"}}
    assert score(pool, f"tests.rewarders.guide_forms.{name}", form=form, **columns) == values
