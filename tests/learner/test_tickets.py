"""Which question a ticket asks, when some are asked again."""

from __future__ import annotations

import json
import random

from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Version
from penstock.learner.state.ledger import Ledger
from tests.learner.builders import make_plan, make_settings


def issue(ledger: Ledger) -> str:
    ticket = ledger.next_train_ticket()
    ledger.opened(ticket, Version(1, 0))
    return ticket


def issue_positions(ledger: Ledger, count: int) -> list[int]:
    return [ledger.position(issue(ledger)) for _ in range(count)]


def test_a_dropped_question_is_asked_again_before_new_ones_and_costs_no_new_one():
    ledger = Ledger()
    issue_positions(ledger, 4)
    ledger.drop(TicketId("train:2"), ask_again=True)
    ledger.drop(TicketId("train:1"), ask_again=True)
    assert issue_positions(ledger, 4) == [2, 1, 4, 5]
    ledger.drop(TicketId("train:4"), ask_again=True)  # the repeat of 2, dropped too
    assert issue_positions(ledger, 2) == [2, 6]


def test_a_question_that_is_only_dropped_is_not_asked_again():
    ledger = Ledger()
    issue_positions(ledger, 2)
    ledger.drop(TicketId("train:1"), ask_again=False)
    assert issue_positions(ledger, 2) == [2, 3]


def test_the_question_is_the_same_and_its_sampling_is_new():
    source = make_plan(make_settings()).source
    first = source.train(TicketId("train:1"), Version(1, 0))
    again = source.train(TicketId("train:9"), Version(1, 3), position=1)
    assert again.prompt_ids.tolist() == first.prompt_ids.tolist()
    assert (again.columns, again.id) == (first.columns, "train:9")
    assert again.sampling.seed != first.sampling.seed


def test_whatever_is_dropped_every_question_ends_exactly_once_and_the_table_stays_small():
    chance, ledger, done = random.Random(1), Ledger(), []
    for _ in range(500):
        while len(ledger.open) < 8:
            issue(ledger)
        ticket = chance.choice(list(ledger.open))
        if chance.random() < 0.3:
            ledger.drop(ticket, ask_again=True)
        else:
            done.append(ledger.position(ticket))
            ledger.close(ticket, "trained")
        ledger.take_unrecorded()
        assert len(json.dumps(ledger.snapshot())) < 1000
    left = [ledger.position(ticket) for ticket in ledger.open] + ledger.snapshot()["to_repeat"]
    assert sorted(done + left) == list(range(len(done) + len(left)))


def test_a_restored_table_asks_the_same_from_there_on():
    ledger = Ledger()
    issue_positions(ledger, 6)
    ledger.drop(TicketId("train:3"), ask_again=True)
    issue(ledger)
    ledger.drop(TicketId("train:0"), ask_again=True)
    ledger.drop(TicketId("train:5"), ask_again=True)
    again = Ledger()
    again.restore(json.loads(json.dumps(ledger.snapshot())))
    assert again.position(TicketId("train:6")) == 3
    assert issue_positions(again, 4) == issue_positions(ledger, 4) == [0, 5, 6, 7]
    assert again.total_dropped == 3
