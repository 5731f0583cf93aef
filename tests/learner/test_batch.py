"""From scored groups to arrays: which tokens count, and which groups are over the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Version
from penstock.learner.algorithm.batch import build_batch, is_over_lag
from tests.learner.builders import make_group, make_plan, make_settings

WEIGHTS = {"accuracy": 1.0}


def scored(*spans, number=0, **options):
    """A group of two equal rollouts with these (step, tokens) spans."""
    ticket = make_plan(make_settings()).source.train(TicketId(f"train:{number}"), Version(1, 0))
    return make_group(ticket, spans=list(spans), **options)


def cut_one(group):
    """The group, its first completion cut at max_completion_length."""
    first, second = group.group.rollouts
    rollouts = (replace(first, finish_reason="length"), second)
    return replace(group, group=replace(group.group, rollouts=rollouts))


def masks(groups, step=0, **settings):
    batch = build_batch(groups, WEIGHTS, step, make_settings(**settings))
    return [sequence.mask.tolist() for sequence in batch.sequences]


def test_tokens_over_max_staleness_are_masked_and_the_others_count():
    assert masks([scored((0, 2), (1, 1))], step=2, max_staleness=1) == [[False, False, True]] * 2


def test_a_cut_completion_is_masked_when_asked_for():
    group = cut_one(scored((0, 3)))
    assert masks([group]) == [[True] * 3] * 2
    assert masks([group], mask_truncated_completions=True) == [[False] * 3, [True] * 3]


def test_a_masked_completion_still_counts_in_its_groups_baseline():
    group = cut_one(scored((0, 3), rewards=(0.0, 1.0)))
    batch = build_batch([group], WEIGHTS, 0, make_settings(mask_truncated_completions=True))
    assert batch.sequences[1].advantage == pytest.approx(0.707, abs=1e-3)


def test_a_completion_without_any_reward_is_masked():
    assert masks([scored((0, 1), rewards=(None, 1.0))]) == [[False], [True]]


def test_the_estimator_and_its_scale_are_those_of_the_settings():
    groups = [scored((0, 1), rewards=(3.0, 1.0)), scored((0, 1), number=1, rewards=(0.0, 0.0))]
    settings = make_settings(advantage_estimator="reinforce_plus_plus", scale_rewards="none")
    advantages = [sequence.advantage for sequence in build_batch(groups, WEIGHTS, 0, settings).sequences]
    assert advantages == [2.0, 0.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("spans", "mask", "set_aside"),
    [
        ([(2, 3)], False, False),
        ([(0, 2), (2, 1)], False, True),  # its younger third may still be trained
        ([(0, 3)], True, True),
    ],
)
def test_over_lag_decides_whether_some_old_tokens_are_enough(spans, mask, set_aside):
    group = scored(*spans)
    assert is_over_lag(group, 2, make_settings()) is mask
    assert is_over_lag(group, 2, make_settings(over_lag="set_aside")) is set_aside


def test_tokens_that_are_not_trained_anyway_put_no_group_aside():
    group = scored((0, 2), (2, 1))
    one = group.group.rollouts[0]
    foreign = replace(one, mask=np.array([False, False, True]), spans=one.spans[1:])
    group = replace(group, group=replace(group.group, rollouts=(foreign, foreign)))
    assert not is_over_lag(group, 2, make_settings(over_lag="set_aside"))
    assert not is_over_lag(scored((0, 3), rewards=(None, None)), 2, make_settings())
    cut = scored((0, 3), finish_reason="length")
    settings = make_settings(over_lag="set_aside", mask_truncated_completions=True)
    assert not is_over_lag(cut, 2, settings)
