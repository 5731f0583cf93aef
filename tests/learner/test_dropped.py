"""Groups that came to lie over max_staleness: dropped or asked again, and reported either way."""

from __future__ import annotations

import itertools

import pytest

from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Verdict
from penstock.learner.report.metrics import group_metrics
from penstock.learner.streams.intake import Arrivals
from tests.learner.builders import make_outcome, make_verdict
from tests.learner.test_intake import Desk


def overtaken(**settings):
    """Step 2, bound 1: train:0 of step 0 came now, train:1 to train:3 of later steps before it."""
    desk = Desk(max_staleness=1, **settings)
    desk.issue(1, step=0)
    desk.issue(1, step=1)
    desk.issue(2, step=2)
    desk.arrive(1, step=1)
    desk.arrive(0, step=0, spans=[(0, 7)], rewards=(1.0, 0.5))
    return desk


@pytest.mark.parametrize("mode", ["drop", "requeue"])
def test_without_the_pace_the_first_to_arrive_are_taken(mode):
    desk = Desk(max_staleness=1, at_max_staleness=mode)
    desk.issue(2, step=0)
    desk.issue(2, step=1)
    desk.arrive(2, 3, step=1)
    assert desk.form(step=1) == ["train:2", "train:3"]


def test_what_it_cost_to_wait_for_nobody_is_dropped():
    desk = overtaken(at_max_staleness="drop")
    assert desk.form(step=2) is None
    assert desk.ledger.take_unrecorded() == {"train:0": ["stale", "over max_staleness"]}
    desk.issue(1, step=2)
    assert desk.ledger.position(TicketId("train:4")) == 4


def test_its_question_is_asked_again_by_the_next_ticket_when_requeued():
    desk = overtaken(at_max_staleness="requeue")
    assert desk.form(step=2) is None
    ends = desk.ledger.take_unrecorded()
    assert ends == {"train:0": ["stale", "over max_staleness, its question is asked again"]}
    desk.issue(2, step=2)
    assert [desk.ledger.position(TicketId(f"train:{number}")) for number in (4, 5)] == [0, 4]
    desk.arrive(4, step=2)
    assert desk.form(step=2) == ["train:1", "train:4"]


def test_a_group_with_one_token_over_the_bound_is_set_aside_when_asked_for():
    for over_lag, expected in [("mask", ["train:0", "train:1"]), ("set_aside", None)]:
        desk = Desk(at_max_staleness="requeue", over_lag=over_lag)
        desk.issue(2, step=0)
        desk.arrive(0, spans=[(0, 1), (2, 5)])
        desk.arrive(1, spans=[(1, 6)])
        assert desk.form(step=2) == expected
    assert desk.ledger.totals["stale"] == 1
    desk.issue(1, step=2)
    assert desk.ledger.position(TicketId("train:2")) == 0


def test_what_was_dropped_is_reported_beside_what_was_trained():
    desk = overtaken(at_max_staleness="drop")
    desk.intake.form(2)
    desk.arrive(2, step=2)
    groups = desk.intake.form(2)
    metrics = group_metrics(groups, desk.intake.take_arrivals(), {"accuracy": 1.0})
    assert (metrics["dropped/groups"], metrics["dropped/total_groups"]) == (1, 1)
    assert (metrics["dropped/reward"], metrics["dropped/mean_length"]) == (0.75, 7.0)
    assert (metrics["trained/reward"], metrics["trained/mean_length"]) == (0.5, 3.0)
    assert (metrics["reward"], metrics["completions/mean_length"]) == (0.5, 3.0)
    later = group_metrics(groups, desk.intake.take_arrivals(), {"accuracy": 1.0})
    assert (later["dropped/groups"], later["dropped/total_groups"]) == (0, 1)
    assert "dropped/reward" not in later


def test_metrics_without_values_are_left_out():
    filtered = Verdict(
        "train:1", "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (3, 5), {}, "q", "5"
    )
    metrics = group_metrics([], Arrivals(filtered=[filtered]), {"accuracy": 1.0})
    assert (metrics["reward"], metrics["completions/max_length"]) == (0.0, 5)
    assert "completions/clipped_ratio" not in metrics
    metrics = group_metrics([], Arrivals(), {"accuracy": 1.0})
    assert set(metrics.values()) == {0}
    assert not [name for name in metrics if name.startswith(("completions/", "reward_", "trained/"))]


def test_dropped_groups_say_nothing_against_the_questions():
    desk = Desk(max_staleness=0, max_resample_times=0, at_max_staleness="drop")
    desk.issue(3, step=0)
    desk.arrive(0, 1, 2, step=0)
    desk.issue(2, step=1)
    assert desk.form(step=1) is None
    assert desk.ledger.total_dropped == 3
    desk.intake.fold(make_verdict(TicketId("train:3")))
    desk.arrive(4, step=1)
    assert desk.form(step=1) == ["train:4"]


@pytest.mark.parametrize("over_lag", ["mask", "set_aside"])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_arrival_order_trains_every_question_once_and_none_too_late(order, bound, over_lag):
    desk = Desk(max_staleness=bound, at_max_staleness="requeue", over_lag=over_lag)
    trained, step = [], 0
    while step < 12:
        desk.issue(desk.settings.credit - desk.ledger.train_open, step)
        out = sorted(int(name[6:]) for name in desk.ledger.open if name not in desk.intake.held)
        assert out, "nothing is out and no batch can be formed: stuck"
        number = out[next((place for place in order if place < len(out)), 0)]
        desk.arrive(number, step=desk.ledger.open[f"train:{number}"].step)
        groups = desk.intake.form(step)
        for scored in groups or ():
            name = scored.group.ticket.id
            assert step - scored.group.ticket.version.step <= bound
            trained.append(desk.ledger.position(name))
            desk.ledger.close(name, "trained")
        step += groups is not None
    waiting = [desk.ledger.position(name) for name in desk.ledger.open]
    waiting += desk.ledger.snapshot()["to_repeat"]
    assert sorted(trained + waiting) == list(range(len(trained) + len(waiting)))


def test_a_repeat_is_not_answered_by_the_question_that_its_number_stands_for():
    desk = overtaken(at_max_staleness="requeue")
    desk.form(step=2)
    desk.issue(1, step=2)
    desk.intake.fold(make_outcome(desk.plan, TicketId("train:4"), 2, position=4))
    assert desk.form(step=2) is None
    assert desk.ledger.take_unrecorded()["train:4"][0] == "stale"
