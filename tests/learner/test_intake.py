"""The fold from outcomes to batches, and the pace that bounds the lag."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from penstock.common.broker.work_stream import Entry
from penstock.common.errors import NoSignal
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Verdict, Version
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams import intake
from penstock.learner.streams.intake import Intake
from tests.common.builders import weights_hash
from tests.learner.builders import make_group, make_outcome, make_plan, make_settings, make_verdict


class Desk:
    """An intake with its ledger, and tickets issued at will."""

    def __init__(self, **settings):
        self.settings = make_settings(**settings)
        self.plan = make_plan(self.settings)
        self.ledger = Ledger()
        made = (Version(1, step) for step in range(20))
        self.ledger.versions = {version: weights_hash(version) for version in made}
        self.intake = Intake(self.ledger, self.plan.source, self.plan.vocab_size)

    def issue(self, count, step=0):
        for _ in range(count):
            self.ledger.opened(self.ledger.next_train_ticket(), Version(1, step))

    def arrive(self, *numbers, step=0, **options):
        for number in numbers:
            ticket = TicketId.train(number)
            outcome = make_outcome(self.plan, ticket, step, self.ledger.position(ticket), **options)
            self.intake.fold(outcome)

    def form(self, step=0):
        groups = self.intake.form(step)
        if groups is None:
            return None
        names = [group.group.ticket.id for group in groups]
        for name in names:
            self.ledger.close(name, "trained")
        return names


@pytest.fixture
def desk_of_one():
    desk = Desk()
    desk.issue(1)
    return desk


def test_groups_join_in_the_order_they_arrived():
    desk = Desk()
    desk.issue(4)
    desk.arrive(2)
    assert desk.form() is None
    desk.arrive(0, 1)
    assert desk.form() == ["train:2", "train:0"]


def test_the_lag_of_a_held_group_is_looked_at_once_per_step(monkeypatch):
    looked_at = []

    def is_over_lag(scored, step, settings):
        looked_at.append((scored.group.ticket.id, step))
        return step == 2

    monkeypatch.setattr(intake, "is_over_lag", is_over_lag)
    desk = Desk(groups_per_step=4, max_staleness=2)
    desk.issue(9)
    desk.arrive(0)
    assert (desk.form(0), desk.form(0)) == (None, None)
    desk.arrive(1)
    assert (desk.form(0), desk.form(1), desk.form(1)) == (None, None, None)
    assert desk.form(2) is None
    both = ("train:0", "train:1")
    assert looked_at == [
        *((name, 0) for name in both),
        *((name, step) for step in (1, 2) for name in both),
    ]
    assert not desk.intake.held


def test_a_forged_group_without_a_sampled_token_ends_no_learner():
    desk = Desk(tools=["tools.py:add"])
    desk.issue(1)
    ticket = TicketId.train(0)
    scored = make_group(desk.plan.source.train(ticket, Version(1, 0)))
    silent = replace(scored.group.rollouts[0], mask=np.zeros(3, bool), spans=())
    forged = replace(scored, group=replace(scored.group, rollouts=(silent, silent)))
    assert desk.intake.fold(Entry("0-1", ticket, encode(forged)))


def test_a_duplicate_of_a_held_or_closed_ticket_changes_nothing():
    desk = Desk()
    desk.issue(4)
    desk.arrive(0, 0, 0)
    assert desk.form() is None
    desk.arrive(1)
    assert desk.form() == ["train:0", "train:1"]
    desk.arrive(0, 1)
    assert desk.form() is None
    assert desk.ledger.totals["trained"] == 2


def test_a_filtered_verdict_returns_its_credit_at_once():
    desk = Desk()
    desk.issue(4)
    desk.intake.fold(make_verdict(TicketId("train:3")))
    assert desk.ledger.train_open == 3
    assert desk.ledger.take_unrecorded() == {"train:3": ["filtered", "no spread"]}


def test_malformed_bytes_end_their_ticket_as_dead():
    desk = Desk()
    desk.issue(1)
    desk.intake.fold(Entry("1-1", TicketId("train:0"), b"\xc1nonsense"))
    assert desk.ledger.totals["dead"] == 1


def test_rewards_of_an_older_contract_do_not_reach_the_metrics(desk_of_one):
    verdict = Verdict("train:0", "filtered", "no spread", {"other": (0.0, 0.0)}, (3, 3))
    desk_of_one.intake.fold(Entry("1-1", TicketId("train:0"), encode(verdict)))
    assert desk_of_one.intake.take_arrivals().filtered == [replace(verdict, rewards={}, lengths=())]


def test_a_group_whose_tokens_are_all_over_the_bound_is_stale():
    desk = Desk(max_staleness=1)
    desk.issue(3, step=1)
    desk.arrive(0, step=1, spans=[(1, 4)])
    desk.arrive(1, step=1, spans=[(1, 2), (2, 2)])  # its younger half may still be trained
    desk.arrive(2, step=1, spans=[(3, 2)])
    assert desk.form(step=3) == ["train:1", "train:2"]
    assert desk.ledger.totals["stale"] == 1


def test_an_overtaken_ticket_is_waited_for_rather_than_trained_too_late():
    desk = Desk(max_staleness=1)
    desk.issue(2, step=0)
    desk.issue(2, step=1)
    desk.arrive(2, 3, step=1)
    assert desk.form(step=1) is None  # 0 and 1 are due now: taking 2 and 3 would make them too old
    desk.arrive(0, 1, step=0)
    assert desk.form(step=1) == ["train:0", "train:1"]
    assert desk.form(step=2) == ["train:2", "train:3"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_smaller_batch_waits_for_what_has_to_be_in_it(late):
    """Its empty room trains nobody: without this, what is due now would be too old afterwards."""
    desk = Desk(max_staleness=1, max_resample_times=1)
    desk.issue(2, step=0)
    desk.issue(4, step=1)
    desk.arrive(2, step=1)
    for number in (3, 4, 5):
        desk.intake.fold(make_verdict(TicketId(f"train:{number}")))
    desk.intake.fold(make_verdict(TicketId(f"train:{1 - late}")))
    assert desk.form(step=1) is None
    desk.arrive(late, step=0)
    assert desk.form(step=1) == ["train:2", f"train:{late}"]


def test_a_smaller_batch_does_not_wait_for_tickets_of_its_own_step():
    """As long as there is no batch, new ones go out: it would never be taken."""
    desk = Desk(max_staleness=0, max_resample_times=1)
    desk.issue(6, step=1)
    desk.arrive(0, step=1)
    for number in (1, 2, 3):
        desk.intake.fold(make_verdict(TicketId(f"train:{number}")))
    assert desk.form(step=1) == ["train:0"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_arrival_order_keeps_every_group_within_the_bound(order):
    """Credit alone would let an overtaken ticket be trained at lag 2 with a bound of 1."""
    desk = Desk(max_staleness=1)
    first_version: dict[str, int] = {}
    step = 0

    def refill():
        number = desk.ledger.next_number
        free = desk.settings.credit - desk.ledger.train_open
        desk.issue(free, step)
        first_version.update({f"train:{number + i}": step for i in range(free)})

    refill()
    while step < 12:
        out = sorted(int(name[6:]) for name in desk.ledger.open if name not in desk.intake.held)
        assert out, "nothing is out and no batch can be formed: stuck"
        number = out[next(place for place in order if place < len(out))]
        desk.arrive(number, step=first_version[f"train:{number}"])
        formed = desk.form(step)
        if formed:
            assert max(step - first_version[name] for name in formed) <= 1
            step += 1
            assert all(step - first_version[name] <= 1 for name in desk.ledger.open)
            refill()


def test_a_smaller_batch_is_taken_after_max_resample_times_without_signal():
    desk = Desk(max_resample_times=1)
    desk.issue(4)
    desk.arrive(0)
    for number in (1, 2, 3):
        desk.intake.fold(make_verdict(TicketId(f"train:{number}")))
    assert desk.form() == ["train:0"]


def test_a_group_with_signal_that_the_pace_holds_back_is_signal():
    desk = Desk(max_staleness=1, max_resample_times=1)
    desk.issue(2, step=0)
    desk.issue(9, step=1)
    desk.arrive(2, step=1)
    for number in range(3, 11):
        desk.intake.fold(make_verdict(TicketId(f"train:{number}")))
    assert desk.form(step=1) is None  # 0 and 1 are due now and on their way


def test_groups_of_an_older_contract_say_nothing_against_the_questions():
    desk = Desk(max_resample_times=1)
    desk.intake = Intake(desk.ledger, replace(desk.plan.source, contract="another"), 32)
    desk.issue(8)
    desk.ledger.publish(Version(2, 0), "that of a learner that was started with other settings")
    desk.arrive(*range(8))
    assert desk.ledger.totals["stale"] == 8
    assert desk.form() is None


def test_no_signal_at_all_ends_the_run_with_that_sentence():
    desk = Desk(max_resample_times=1, max_empty_updates=2)
    desk.issue(8)
    for number in range(8):  # two Updates, a round and another one, two groups each
        assert desk.form() is None
        desk.intake.fold(make_verdict(TicketId(f"train:{number}")))
    with pytest.raises(NoSignal, match="8 groups in a row had nothing to learn from"):
        desk.form()


def test_rewards_that_fail_are_named_before_the_questions():
    desk = Desk(max_resample_times=0, max_empty_updates=1)
    desk.issue(2)
    reason = "no spread; 3 of 8 completions could not be scored, the first: reward own: TypeError"
    desk.intake.fold(make_verdict(TicketId("train:0")))
    desk.intake.fold(make_verdict(TicketId("train:1"), reason=reason))
    with pytest.raises(NoSignal) as ending:
        desk.form()
    assert str(ending.value).startswith(
        f"rewards fail in 1 of these groups, such as train:1: {reason}. "
    )


def test_without_extra_rounds_the_first_one_is_waited_for():
    desk = Desk(max_resample_times=0)
    desk.issue(2)
    desk.intake.fold(make_verdict(TicketId("train:0")))
    assert desk.form() is None
    desk.arrive(1)
    assert desk.form() == ["train:1"]
