"""Rewards of conversations: what they get, and what a broken environment leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.common.own_code import digest_of, find_code
from penstock.common.wire.messages import Group, ScoredGroup, Verdict
from penstock.common.wire.reward_spec import RewardSpec
from penstock.common.wire.transcript import FAILED_TOOL, Transcript
from penstock.rewarders.scoring import Scorer, make_scorer
from penstock.rewarders.scoring_pool import ScoringFailed
from tests.rewarders.stand_ins import make_contract, make_group

REWARD = '''
def turns(completions, **columns):
    """The number of messages; each must have TRL's form."""
    for talk in completions:
        assert all(set(message) <= {"role", "content", "name", "tool_calls"} for message in talk), talk
    return [float(len(talk)) for talk in completions]
'''


def talk(answer: str, reward: float | None = None, failure: str = "") -> Transcript:
    """Two turns, whose tool answered 4."""
    messages = (
        {"role": "assistant", "content": "7", "tool_calls": []},
        {"role": "tool", "name": "add", "content": "4", FAILED_TOOL: True},
        {"role": "assistant", "content": answer},
    )
    return Transcript(messages, 2, 1, 1, reward, failure)


def group_of(scorer: Scorer, *talks: Transcript) -> Group:
    group = make_group(scorer.contract, "train:0", *["7" for _ in talks])
    rollouts = [replace(one, transcript=t) for one, t in zip(group.rollouts, talks, strict=True)]
    return replace(group, rollouts=tuple(rollouts))


def test_texts_are_scored_by_the_last_turn_and_environments_by_their_own_reward(pool, folder) -> None:
    contract = make_contract(folder, {"accuracy": 1.0, "environment": 2.0})
    scorer = make_scorer(contract, pool, "rewarder-1")
    outcome = scorer.score_group(group_of(scorer, talk("5", 0.5), talk("4", None), talk("4", -3.0)))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards["environment"] == (0.5, None, -3.0)
    assert outcome.rewards["accuracy"] == (0.0, 1.0, 1.0)


def test_the_environment_is_part_of_the_filter(pool, folder) -> None:
    scorer = make_scorer(make_contract(folder, {"environment": 1.0}), pool, "rewarder-1")
    outcome = scorer.score_group(group_of(scorer, talk("5", 0.5), talk("4", 0.5)))
    assert isinstance(outcome, Verdict)
    assert outcome.reason == "no spread"
    outcome = scorer.score_group(group_of(scorer, talk("5", None), talk("4", None)))
    assert isinstance(outcome, Verdict)
    assert outcome.reason == "no reward applies"


def test_a_broken_environment_has_no_reward_of_any_name(pool, folder) -> None:
    contract = make_contract(folder, {"accuracy": 1.0, "environment": 1.0})
    scorer = make_scorer(contract, pool, "rewarder-1")
    broken = talk("4", 9.0, failure="tool up took more than 5 s")
    outcome = scorer.score_group(group_of(scorer, talk("4", 1.0), broken, talk("5", 3.0)))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.failures == ("", "tool up took more than 5 s", "")
    assert {name: values[1] for name, values in outcome.rewards.items()} == {
        "accuracy": None, "environment": None,
    }  # fmt: skip
    with pytest.raises(ScoringFailed, match="tool up took"):
        scorer.score_group(group_of(scorer, talk("4", 1.0), broken))


def test_own_rewards_get_the_messages_in_the_form_of_trl(pool, folder, tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text(REWARD)
    tmp_path.chmod(0o755)
    spec = RewardSpec("turns", 1.0, str(file), digest_of(find_code(str(file), "test")))
    spec = replace(spec, options={"completions": "messages"})
    contract = replace(make_contract(folder, {"accuracy": 1.0}), rewards=(spec,), filter_zero_std=False)
    scorer = make_scorer(contract, pool, "rewarder-1")
    outcome = scorer.score_group(group_of(scorer, talk("4"), talk("5")))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == {"turns": (3.0, 3.0)}


def test_the_conversation_for_which_a_reward_fails_is_left_out_alone(pool, folder) -> None:
    scorer = make_scorer(make_contract(folder, {"picky": 1.0}), pool, "rewarder-1")
    talks = (talk("5", failure="it broke"), talk("bad", 1.0), talk("4", 2.0), talk("5", 3.0))
    outcome = scorer.score_group(group_of(scorer, *talks))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == {"picky": (None, None, 2.5, 3.5)}
