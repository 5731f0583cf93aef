"""The simulated fleet: each group goes once from actor to learner; and the limits by the costs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale, scale_fleet
from benchmarks.intake import make_group
from benchmarks.scale import Load, Result
from benchmarks.scale_costs import HELD, Bench, Costs, GroupCost, make_ticket, median
from penstock.common.broker.local_server import LocalServer
from penstock.common.wire.codec import encode

COSTS = Costs(
    {256: GroupCost(500.0, 4e4, 4e4, 1000.0)}, idle_us=0.0, renew_us=10.0, renewed_us=1.0, look_us=5.0,
    row_us=0.0, take_us=2.0, block_us=3.0, weights_us=10.0, outcomes_us=0.0, watch_us=20.0,
    report_us=40.0, wake_us=30.0,
)  # fmt: skip


def test_a_fleet_hands_each_group_off_once_and_the_audit_balances(
    queue_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_fleet, "RENEW_S", 0.2)
    fleet = scale_fleet.Fleet(20, 200, tokens=16, places=2, group_s=0.1, deadline_s=60.0)
    found = fleet.run(queue_server.url, tmp_path)
    assert found.balances
    assert found.handed_off == found.trained == found.groups == 200
    assert found.renewed >= found.renewals > 20
    assert found.connections >= 20
    assert found.server_s > 0
    assert not replace(found, handed_off=199).balances


def test_the_costs_are_those_of_calls_that_have_their_effect(queue_server: LocalServer) -> None:
    with ExitStack() as stack:
        found = Bench(queue_server.url, 40, stack).measure(40, 5, {16: 7.0})
    group = found.groups[16]
    assert group.learner_us == 7
    assert group.bytes_in > 2 * group_bytes(16)
    assert group.bytes_out > 2 * group_bytes(16)
    assert group.server_us > 0
    assert found.row_us > 0


def group_bytes(tokens: int) -> int:
    """The bytes of a group as it is sent."""
    return len(encode(make_group(make_ticket(0), tokens, np.random.default_rng(1)).group))


def test_the_limit_is_where_the_costs_of_all_actors_fill_a_core() -> None:
    load = Load(256, tokens_per_s=2048.0)  # a group a second
    each_us = 500 + 20 * 10 + 1.6 * 5 + 20 + 20 + (10 + HELD) / 3.75
    assert load.share(COSTS, 1000) == pytest.approx(1000 * each_us / 1e6)
    limits = load.limits(COSTS)
    assert limits["the server's processor"] == int(1e6 / each_us)
    assert limits["the learner's intake"] == 1000
    assert limits["10 Gbit/s"] == 1.25e9 / 4e4


def test_rows_of_held_tickets_count_up_to_a_thousand() -> None:
    costs = replace(COSTS, row_us=1.0)
    rows = [costs.per_actor(actors, 10)["rows of held tickets"] for actors in (1, 50, 100, 200)]
    assert rows == pytest.approx([8, 400, 800, 800])


def test_a_result_that_was_printed_is_read_and_shown_again(tmp_path: Path) -> None:
    run = scale_fleet.FleetRun(
        actors=20, groups=200, handed_off=200, trained=200, left_open=0, faults=(), renewals=9,
        renewed=18, takes=400, functions=500, seconds=2.0, server_s=0.5, simulator_s=1.0, longest_s=3.8,
        late_s=0.01, connections=23,
    )  # fmt: skip
    result = Result(COSTS, [run], 5000.0, {"machine": "2 cores"})
    (tmp_path / "scale.json").write_text(json.dumps(asdict(result)))
    again = Result.read(tmp_path / "scale.json")
    assert again == result
    shown = "\n".join(scale.tables(again))
    assert "| 20 | 200 | 100.0 | 0.50 | 0.10 | 1.0 | 3.80 | balances |" in shown
    scale.draw(again, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_the_median_is_taken_of_each_cost() -> None:
    rounds = [replace(COSTS, look_us=value, row_us=-value) for value in (3.0, 1.0, 2.0)]
    assert median(rounds) == replace(COSTS, look_us=2.0, row_us=-2.0)
