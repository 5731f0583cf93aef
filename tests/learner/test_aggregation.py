"""Several rewards, each normalized before the sum (GDPO): against plain loops, and TRL's own results."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.common.reward_totals import group_totals, normalize_rewards
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import ScoredGroup
from penstock.learner.algorithm.batch import build_batch
from penstock.rewarders.filtering import NO_REWARD, NO_SPREAD, why_filtered
from tests.learner.builders import make_group, make_plan, make_settings

Table = list[list[float | None]]
"""A row per rollout, a value per reward."""

RECORDED = json.loads(Path(__file__).with_name("trl_aggregation.json").read_text())
"""Advantages that TRL's own lines computed, with None as NaN; `source` names release and file."""


def scored(number: int, rows: Table) -> ScoredGroup:
    """A group with these rewards, r0, r1 and so on."""
    settings = make_settings(num_generations=len(rows))
    ticket = make_plan(settings).source.train(TicketId(f"train:{number}"), Version(1, 0))
    rewards = {f"r{i}": tuple(row[i] for row in rows) for i in range(len(rows[0]))}
    return replace(make_group(ticket, rewards=rewards["r0"]), rewards=rewards)


def advantages(tables: list[Table], weights: list[float]) -> list[float]:
    """Those of the batch that the learner builds."""
    settings = make_settings(multi_objective_aggregation="normalize_then_sum")
    named = {f"r{i}": weight for i, weight in enumerate(weights)}
    batch = build_batch([scored(i, rows) for i, rows in enumerate(tables)], named, 0, settings)
    return [sequence.advantage for sequence in batch.sequences]


def slow_advantages(tables: list[Table], weights: list[float]) -> list[float]:
    """The same by loops, as docs/losses.md says it."""
    sums: list[float | None] = []
    for rows in tables:
        for row in rows:
            total = 0.0
            for place, value in enumerate(row):
                found = [other[place] for other in rows if other[place] is not None]
                if value is not None and len(found) > 1:
                    spread = statistics.stdev(found) + 1e-4
                    total += weights[place] * (value - statistics.fmean(found)) / spread
            sums.append(total if any(value is not None for value in row) else None)
    known = [total for total in sums if total is not None]
    if len(known) < 2:
        return [0.0] * len(sums)
    mean, spread = statistics.fmean(known), statistics.stdev(known) + 1e-4
    return [0.0 if total is None else (total - mean) / spread for total in sums]


def random_tables(seed: int) -> list[Table]:
    """Groups of 2 to 6 rollouts with three rewards of very different size, a third of them None."""
    generator = np.random.default_rng(seed)
    sizes = (100.0, 1.0, 0.01)
    return [
        [
            [None if generator.random() < 1 / 3 else generator.normal() * s for s in sizes]
            for _ in range(g)
        ]
        for g in (4, 2, 6, 3)
    ]


def test_normalized_rewards_equal_the_slow_version() -> None:
    for seed in range(30):
        tables = random_tables(seed)
        found = advantages(tables, [1.0, 0.5, -2.0])
        assert found == pytest.approx(slow_advantages(tables, [1.0, 0.5, -2.0]), abs=1e-9)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['weights']}")
def test_advantages_equal_those_of_trl(case) -> None:
    assert RECORDED["source"].startswith("TRL 1.16.0")
    size, rows = case["generations"], case["rewards"]
    tables = [rows[start : start + size] for start in range(0, len(rows), size)]
    assert advantages(tables, case["weights"]) == pytest.approx(case["advantages"], abs=1e-6)


def test_a_reward_of_another_size_counts_alike() -> None:
    found = normalize_rewards({"small": (0.0, 2.0, None), "large": (0.0, 200.0, None)})
    assert found["small"] == pytest.approx([-0.7071, 0.7071, None], abs=1e-3)
    assert found["large"] == pytest.approx(found["small"], abs=1e-3)


def test_a_reward_of_one_rollout_alone_adds_nothing() -> None:
    totals = group_totals({"one": (5.0, None, None)}, {"one": 1.0}, "normalize_then_sum")
    assert totals[0] == 0.0
    assert np.isnan(totals[1:]).all()


@pytest.mark.parametrize(
    ("rewards", "of_sums", "of_normalized"),
    [
        ({"a": (0.0, 1.0), "b": (2.0, 0.0)}, NO_SPREAD, None),  # weights 1 and 0.5: totals 1 and 1
        ({"a": (0.0, 1.0), "b": (1.0, 1.0)}, None, None),
        ({"a": (1.0, 1.0), "b": (0.5, 0.5)}, NO_SPREAD, NO_SPREAD),
        ({"a": (1.0, None), "b": (None, 0.5)}, None, NO_SPREAD),  # nothing to compare either with
        ({"a": (None, None), "b": (1.0, None)}, NO_REWARD, NO_REWARD),
        ({"a": (1e-17, 0.0), "b": (0.3, 0.1 + 0.2)}, NO_SPREAD, NO_SPREAD),
    ],
)
def test_the_filter_looks_at_each_reward(rewards, of_sums, of_normalized) -> None:
    weights = {"a": 1.0, "b": 0.5}
    for aggregation, expected in (
        ("sum_then_normalize", of_sums),
        ("normalize_then_sum", of_normalized),
    ):
        totals = group_totals(rewards, weights, aggregation)
        assert why_filtered(totals, filter_zero_std=True) == expected
        assert why_filtered(totals, filter_zero_std=False) in (None, NO_REWARD)


def test_a_group_that_the_filter_drops_has_no_advantage() -> None:
    flat, other = [[1.0, 0.5]] * 3, [[0.0, 1.0], [1.0, 3.0], [2.0, 0.0]]
    assert advantages([flat, other], [1.0, 1.0])[:3] == [0.0] * 3
    assert not any(map(math.isnan, advantages([flat], [1.0, 1.0])))


@pytest.mark.parametrize("ignored", [{"scale_rewards": "none"}, {"advantage_estimator": "rloo"}])
def test_a_baseline_or_scale_that_it_would_ignore_is_refused(ignored) -> None:
    with pytest.raises(ValidationError, match=rf"{next(iter(ignored)).upper()}.* has no effect"):
        make_settings(multi_objective_aggregation="normalize_then_sum", **ignored)
