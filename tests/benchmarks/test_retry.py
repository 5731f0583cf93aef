"""The benchmark of hints: its questions, conversations, game without a hint, and what it counts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from benchmarks import retry
from benchmarks.retry_game import GuessWithoutHint, at_first, calls, valid_calls, within_two
from benchmarks.talk_model import CONTEXT_TOKENS, Talk, make_tokenizer
from benchmarks.talk_run import heldout_means
from penstock.actors.tool_calls import ToolCall, read_calls
from penstock.deploy.environments.retry import Guess
from tests.benchmarks.talks import texts_of


def calls_of(talk: Talk) -> list[ToolCall]:
    """The calls that a conversation for pre-training holds."""
    return [call for text in texts_of(talk) for call in read_calls(text)[1]]


def test_the_held_out_questions_have_other_numbers_than_those_for_training(tmp_path: Path) -> None:
    retry.write_questions(tmp_path, seed=1, train=900, heldout=200)
    lists: dict[str, set[str]] = {}
    places = [0, 0, 0]
    for name, count in (("train.jsonl", 900), ("heldout.jsonl", 200)):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(rows) == count
        lists[name] = {row["question"] for row in rows}
        for row in rows:
            numbers = [int(one) for one in row["question"].removesuffix("?").split()]
            assert numbers == sorted(set(numbers))
            places[numbers.index(row["answer"])] += 1
    assert not lists["train.jsonl"] & lists["heldout.jsonl"]
    assert len(lists["heldout.jsonl"]) == retry.HELDOUT_LISTS
    assert min(places) > 300


def test_under_a_fifth_of_the_calls_for_pre_training_are_valid() -> None:
    draw = random.Random(1)
    found = [call for _ in range(2000) for call in calls_of(retry.make_talk(draw))]
    valid = [call for call in found if not call.error]
    assert 0.1 < len(valid) / len(found) < 0.18
    assert {call.name for call in valid} == {"guess"}


def test_the_conversations_fit_the_context_and_follow_a_hint_more_often_than_chance() -> None:
    draw, tokenizer = random.Random(2), make_tokenizer()
    followed = {"hint": [], "no": []}
    for _ in range(4000):
        talk = retry.make_talk(draw)
        text = "".join(part for part, _ in talk)
        assert len(tokenizer.encode(text, add_special_tokens=False)) <= CONTEXT_TOKENS
        found = calls_of(talk)
        if len(found) < 2 or found[0].error:
            continue
        first, second = (call.arguments["number"] for call in found)
        if "<tool>too" in text:
            followed["hint"].append(second > first if "<tool>too low" in text else second < first)
        else:
            followed["no"].append(second != first)
    shares = {name: sum(values) / len(values) for name, values in followed.items()}
    assert 0.85 < shares["hint"] < 0.97
    assert shares["no"] == 1.0


@pytest.mark.parametrize(
    ("kind", "answers"),
    [(Guess, ["too low", "too high", "right"]), (GuessWithoutHint, ["no", "no", "right"])],
)
def test_both_games_are_equal_but_for_the_hint(kind: type[Guess], answers: list[str]) -> None:
    game = kind()
    game.reset(answer=42)
    assert [game.guess(number) for number in (7, 50, 42)] == answers
    assert game.get_reward() == 1.0
    assert get_json_schema(kind.guess)["function"]["parameters"]["required"] == ["number"]


def talk_with(*answers: str) -> list[dict[str, Any]]:
    """A transcript with these answers to calls."""
    return [{"role": "tool", "content": answer} for answer in answers] + [
        {"role": "assistant", "content": "done"}
    ]


def test_only_the_first_two_answers_count() -> None:
    talks = [
        talk_with("right"), talk_with("too low", "right"), talk_with("no", "no", "right"),
        talk_with("the tool call has no name", "right"), talk_with(),
    ]  # fmt: skip
    assert within_two(talks) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert at_first(talks) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert calls(talks) == [1.0, 2.0, 3.0, 2.0, 0.0]
    assert valid_calls(talks) == [1.0, 2.0, 3.0, 1.0, 0.0]


def test_the_means_are_by_step_and_a_missing_reward_counts_as_0(tmp_path: Path) -> None:
    rows = [(30, 1.0), (0, 0.0), (0, 1.0), (30, None)]
    lines = [json.dumps({"step": step, "rewards": [{"within_two": one}]}) for step, one in rows]
    (tmp_path / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    assert heldout_means(tmp_path) == {0: {"within_two": 0.5}, 30: {"within_two": 0.5}}


def test_both_runs_get_the_same_model_questions_and_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(retry, "run_training", lambda folder, settings: given.append(settings) or 1.0)
    monkeypatch.setattr(retry, "report", lambda run, took_s: {"hint": 0.9, "no": 0.6}[run.name])
    assert retry.compare(tmp_path, steps=5, seed=3) == pytest.approx(0.3)
    files = [
        [Path(one[key]).read_text() for key in ("LEARNER_DATASET", "LEARNER_EVAL_DATASET")]
        for one in given
    ]
    assert files[0] == files[1]
    own = {"RUN_NAME", "LEARNER_DATASET", "LEARNER_EVAL_DATASET", "LEARNER_ENVIRONMENT"}
    hint, other = ({key: value for key, value in one.items() if key not in own} for one in given)
    assert hint == other
    assert (hint["LEARNER_SEED"], hint["LEARNER_MAX_STEPS"]) == ("3", "5")
