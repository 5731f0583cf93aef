from __future__ import annotations

from tests.chaos.tokens import Tokens, count_tokens


def line(most: int, sampled: int, ended: bool = False, index: int = 0) -> dict:
    return {"ticket": "train:7", "index": index, "most": most, "sampled": sampled, "ended": ended}


def test_a_completion_that_goes_on_loses_nothing():
    assert count_tokens([line(32, 11), line(21, 5), line(16, 16, True)]) == Tokens(32, 16, 0)


def test_a_completion_that_begins_anew_loses_what_it_had():
    assert count_tokens([line(32, 11), line(32, 16, True)]) == Tokens(27, 0, 11)


def test_one_that_had_ended_and_is_sampled_again_is_in_vain():
    assert count_tokens([line(32, 11, True), line(32, 4, True)]) == Tokens(15, 0, 4)


def test_completions_of_one_ticket_are_told_apart():
    assert count_tokens([line(32, 11), line(32, 9, index=1), line(21, 5)]) == Tokens(25, 11, 0)
