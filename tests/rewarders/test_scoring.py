"""One group to its outcome: what cannot be scored is left out, named, and never worth 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.sandbox.handle import TOO_LONG
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import ScoredGroup, Verdict, Version
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.rewarders import scoring
from penstock.rewarders.reward_process import Scores
from penstock.rewarders.scoring import Scorer, make_scorer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.rewarders.stand_ins import make_contract, make_group


def scorer_for(pool: ScoringPool, folder: Path, **rewards: float) -> tuple[Scorer, Contract]:
    contract = make_contract(folder, rewards)
    return make_scorer(contract, pool, "rewarder-1"), contract


def test_a_completion_that_cannot_be_scored_is_left_out_and_named(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, bad_for_five=1.0, format=0.5)
    outcome = scorer.score_group(make_group(contract, "train:0", "4", "five", "four: 4"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == {"bad_for_five": (1 / 7, None, 1.0), "format": (0.0, None, 0.0)}
    assert outcome.failures[0] == outcome.failures[2] == ""
    assert "reward bad_for_five: killed its process" in outcome.failures[1]


def test_the_rest_is_scored_as_if_it_were_the_group(pool, folder) -> None:
    """The longest completion is the one that fails: what is left is compared with what is left."""
    scorer, contract = scorer_for(pool, folder, bad_for_five=1.0)
    outcome = scorer.score_group(make_group(contract, "train:0", "4", "five", "44"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards["bad_for_five"] == (0.5, None, 1.0)


def test_with_fewer_than_two_left_the_group_fails(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, bad_for_five=1.0)
    with pytest.raises(
        ScoringFailed, match=r"2 of 3 completions have no reward, .*: reward bad_for_five"
    ):
        scorer.score_group(make_group(contract, "train:0", "4", "five", "five"))


def test_an_eval_group_of_one_fails_alone(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, bad_for_five=1.0)
    with pytest.raises(ScoringFailed, match="1 of 1 completions have no reward"):
        scorer.score_group(make_group(contract, "eval:1.0:0", "five"))


class TimedPool:
    """A pool whose clock shows the seconds of its calls, of which each completion names its own."""

    timeout_s = 30.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = 0.0
        self.calls: list[tuple[int, float]] = []
        monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: self.clock))

    def check(self, _spec: RewardSpec) -> str:
        """Every reward can be used."""
        return ""

    def score(self, spec: RewardSpec, arguments: dict[str, Any], timeout_s: float = 0.0) -> Scores:
        """Give each completion's seconds, and note the size of the call and its limit."""
        limit_s = timeout_s or self.timeout_s
        seconds = [float(text) for text in arguments["completions"]]
        self.calls.append((len(seconds), limit_s))
        self.clock += min(sum(seconds), limit_s)
        if sum(seconds) > limit_s:
            raise ScoringFailed(f"reward {spec.name}: {TOO_LONG} {limit_s:g} s")
        return Scores(tuple(seconds))


def test_a_group_of_completions_that_are_slow_but_not_too_slow_is_scored(monkeypatch, folder) -> None:
    """The three take 40 s together. Their call may take 30 s longer than the 70 s of all four alone."""
    pool = TimedPool(monkeypatch)
    scorer, contract = scorer_for(pool, folder, length=1.0)
    outcome = scorer.score_group(make_group(contract, "train:0", "20", "99", "12", "8"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == {"length": (20.0, None, 12.0, 8.0)}
    assert pool.calls[-1] == (3, 100.0)


def test_a_group_of_endless_completions_does_not_hold_its_worker_for_long(monkeypatch, folder) -> None:
    pool = TimedPool(monkeypatch)
    scorer, contract = scorer_for(pool, folder, length=1.0)
    endless = ["99"] * 6
    outcome = scorer.score_group(make_group(contract, "train:0", *endless, "1", "2", "4"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == {"length": (None,) * 6 + (1.0, 2.0, None)}
    assert [limit for size, limit in pool.calls if size == 1] == [30.0] * 4 + [3.0] * 6
    assert outcome.failures[2] == "reward length: took more than 30 s"
    why = "because 3 completions of the group took more than all of it"
    for late in (5, 8):
        assert (
            outcome.failures[late] == f"reward length: took more than 3 s; that is a tenth of it, {why}"
        )


def test_a_question_that_hangs_every_scoring_is_found_at_once(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, accuracy=1.0)
    calls = pool.finished
    gold = "$9^{9^{9^{9}}}$"
    with pytest.raises(ScoringFailed, match="for the completion `0` too"):
        scorer.score_group(make_group(contract, "train:0", *"12345678", solution=gold))
    assert pool.finished - calls == 2


def test_a_function_gets_the_state_of_the_training(pool, folder, tmp_path) -> None:
    """The Updates before the ticket was issued and the steps of the run, and all else of TRL."""
    (tmp_path / "curriculum.py").write_text(
        "def curriculum(prompts, completions, completion_ids, trainer_state, level, **rest):\n"
        "    assert prompts == [[{'role': 'user', 'content': 'Q?'}]] * 2\n"
        "    assert [one[0]['content'] for one in completions] == ['a', 'bc']\n"
        "    assert rest.pop('log_extra') and rest.pop('log_metric')\n"
        "    assert rest.pop('environments') is None and rest.pop('solution') == ['4', '4']\n"
        "    assert rest.keys() == {'answer', 'response_token_ids'}\n"
        "    assert rest['response_token_ids'] == completion_ids == [[66, 0], [67, 68, 0]]\n"
        "    done = trainer_state.global_step / trainer_state.max_steps\n"
        "    return [done * len(ids) + one for ids, one in zip(completion_ids, level)]\n"
    )
    settings = LearnerSettings(rewards=f"{tmp_path}/curriculum.py:curriculum")
    options = {"columns": ["answer", "level"], "max_steps": 8, "completions": "messages"}
    contract = replace(make_contract(folder, {}), rewards=resolve_rewards(settings, options))
    group = make_group(contract, "train:0", "a", "bc", level=1)
    group = replace(group, ticket=replace(group.ticket, version=Version(1, 2)))
    outcome = make_scorer(contract, pool, "rewarder-1").score_group(group)
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards == {"curriculum": (1.5, 1.75)}


def test_what_rewards_log_goes_along(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, logs=1.0)
    outcome = scorer.score_group(make_group(contract, "train:0", "a", "bc"))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.extra == {"shouted": ("A", "BC"), "parsed": ("1" + "0" * 30,) * 2}
    assert decode(encode(outcome), ScoredGroup).extra == outcome.extra
    assert outcome.metrics == {"letters": 3.0}


def test_an_evaluation_keeps_its_answers_beside_all_columns_that_a_reward_may_log(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, logs_all=1.0)
    outcome = scorer.score_group(make_group(contract, "eval:1.0:0", "a", "bc"))
    assert isinstance(outcome, ScoredGroup)
    assert len(decode(encode(outcome), ScoredGroup).extra) == 1024
    assert outcome.extra["answer"] == ("a", "bc")


def test_half_a_character_from_a_reward_reaches_nobody(pool, folder) -> None:
    """UTF-8 has none, so a message that held one could not be sent."""
    scorer, contract = scorer_for(pool, folder, logs_surrogates=1.0)
    outcome = scorer.score_group(make_group(contract, "train:0", "a", "bc"))
    assert decode(encode(outcome), ScoredGroup).extra == {"half \\ud800": ("?", "?")}
    assert outcome.metrics == {"half \\ud800": 1.0}
    scorer, contract = scorer_for(pool, folder, raise_surrogates=1.0)
    with pytest.raises(ScoringFailed, match=r"half \\ud800"):
        scorer.score_group(make_group(contract, "train:0", "a", "bc"))


def test_the_cause_is_told_where_the_reward_needs_more_than_one_completion(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, spread_of_letters=1.0)
    with pytest.raises(
        ScoringFailed, match=r"five is bad .*; and for the completion `0` alone: .* at least 2"
    ):
        scorer.score_group(make_group(contract, "train:0", "4", "five", "44"))


def test_a_filtered_group_shows_its_first_completion(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, accuracy=1.0)
    outcome = scorer.score_group(make_group(contract, "train:0", "5", "6"))
    assert isinstance(outcome, Verdict)
    assert (outcome.prompt, outcome.completion) == ("Q?", "5")


def test_a_filtered_group_says_which_completions_failed_and_why(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, bad_for_five=1.0)
    outcome = scorer.score_group(make_group(contract, "train:0", "4", "five", "4"))
    assert isinstance(outcome, Verdict)
    assert outcome.reason.startswith("no spread; 1 of 3 completions could not be scored, the first: ")
    assert "reward bad_for_five" in outcome.reason


def test_an_eval_group_carries_the_answers_that_were_found(pool, folder) -> None:
    scorer, contract = scorer_for(pool, folder, accuracy=1.0)
    group = make_group(contract, "eval:1.0:0", "so <answer> 4 </answer>", "#### 5")
    outcome = scorer.score_group(group)
    assert isinstance(outcome, ScoredGroup)
    assert outcome.extra["answer"] == ("4", "5")


def test_the_filter_normalizes_each_reward_if_the_contract_says_so(pool, folder) -> None:
    """Accuracy is 0 and 1, xml_tags 0.2 and 0: totals of 0.2 and 0.2."""
    scorer, contract = scorer_for(pool, folder, accuracy=0.2, xml_tags=1.0)
    group = make_group(contract, "train:0", "<answer> 5", "4")
    assert isinstance(scorer.score_group(group), Verdict)
    normalizing = replace(contract, multi_objective_aggregation="normalize_then_sum")
    outcome = make_scorer(normalizing, pool, "rewarder-1").score_group(group)
    assert isinstance(outcome, ScoredGroup)
