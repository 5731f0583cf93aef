"""The reward `format`, completion by completion."""

from __future__ import annotations

import pytest

from penstock.rewarders.rewards import REWARDS


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a</think><answer>b</answer>",
        "<think>a\nb</think>\n<answer>c\nd</answer>\n",
        "  <think></think> <answer></answer>",
        "<think>1 < 2</think><answer>3 > 2</answer>",
    ],
)
def test_reasoning_and_answer_in_their_tags_score_one(completion: str) -> None:
    assert REWARDS["format"]([""], [completion]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "72",
        "<answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think><answer>b</answer> and more",
        "Sure! <think>a</think><answer>b</answer>",
        "<think>a</think> and <answer>b</answer>",
        "<think>a<answer>b</answer>",
        "<think>a</think><answer>b",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a</think><think>a</think><answer>b</answer>",
    ],
)
def test_anything_else_scores_zero(completion: str) -> None:
    assert REWARDS["format"]([""], [completion]) == [0.0]
