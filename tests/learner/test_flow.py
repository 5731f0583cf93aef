"""The learner's side of the streams, on a real queue server."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
import structlog

from penstock.common import deadline
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.config.settings import RunSettings
from penstock.common.errors import (
    ConfigError,
    DeadlineExceeded,
    NoSignal,
    RunNotReady,
    RunTaken,
    ServerUnavailable,
)
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import read_chain
from penstock.common.journal.segments import read_journal
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Group, ScoredGroup, Ticket, Verdict, Version, Weights
from penstock.learner.algorithm.batch import token_staleness
from penstock.learner.report.eval_metrics import summarise
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams import intake, ticket_flow
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.ticket_flow import TicketFlow
from tests.common.builders import weights_hash
from tests.helpers import wait_until
from tests.learner.builders import claim_next, make_group, make_plan, make_settings
from tests.learner.whole import Killed


class Bench:
    """A learner without a policy, and a worker that answers its tickets."""

    def __init__(self, folder, connection: Connection, keys: Keys, **settings):
        self.folder, self.connection, self.keys = folder, connection, keys
        self.stopping = threading.Event()
        self.late: list[Callable[[], object]] = []
        self.asked: list[str] = []
        self.plan = make_plan(make_settings(**settings), steps=4, eval_questions=2)
        self.claim = claim_next(folder, known=RunView(connection, keys).incarnation())
        self.queue = LearnerQueue(connection, keys, self.claim.incarnation)
        self.ledger = Ledger()
        for _, record in read_chain(RunFolder(folder), self.claim):
            self.ledger.restore(record["ledger"])
        self.commit_log = CommitLog(
            self.ledger, Journal(LearnerFolder(folder, self.claim.incarnation)), self.queue
        )
        run = RunSettings(name="x", progress_timeout_s=0.3)
        self.flow = TicketFlow(self.queue, self.commit_log, self.plan, run, "nonce", self.stopping)
        self.flow.join()

    def publish(self, step, evaluate=False):
        version = Version(self.claim.incarnation, step)
        weights = Weights(version, "folder", weights_hash(version), "")
        self.flow.publish(weights, evaluate)

    def work(self, stream="tickets", limit=100, late=(), edit=lambda scored: scored):
        """Answer what lies on a ticket stream: a group per ticket, straight to the learner.

        Answers to the tickets in `late` wait in self.late, to be called. `edit` alters each group.
        """
        work = WorkStream(self.connection, self.keys, getattr(self.keys, stream), "w", 30.0, 3)
        for entry in work.take(limit):
            ticket = decode(entry.payload, Ticket)
            rewards = (1.0,) if ticket.purpose == "eval" else (1.0, 0.0)
            scored = encode(edit(make_group(ticket, rewards=rewards)))
            answer = partial(work.handoff, entry, self.keys.outcomes_for(ticket.purpose), scored)
            if ticket.id in late:
                self.late.append(answer)
            else:
                answer()

    def train(self, step):
        self.taken = self.flow.take_groups(step)
        assert self.taken is not None
        groups = self.taken.groups
        names = [group.group.ticket.id for group in groups]
        for name in names:
            self.ledger.close(name, "trained", f"step {step + 1}")
        self.asked += [group.group.ticket.columns["answer"] for group in groups]
        self.commit_log.record("batch", step=step + 1, groups=[encode(group) for group in groups])
        return names

    def balance(self):
        totals, places, _ = RunView(self.connection, self.keys).audit()
        assert all(place.exists for place in places)
        assert totals["issued"] == sum(totals.values()) - totals["issued"] + len(places)
        return totals, sorted(place.ticket for place in places)


@pytest.fixture
def bench(tmp_path, connection, keys):
    return Bench(tmp_path, connection, keys)


def test_credit_bounds_what_is_out_and_returns_with_the_batch(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    assert bench.ledger.train_open == 4  # (max_staleness + 1) x groups_per_step
    bench.work()
    assert len(bench.train(0)) == 2
    bench.flow.issue_tickets(1)
    assert bench.ledger.train_open == 4
    bench.balance()


def test_outcomes_are_read_beside_an_update(bench, queue_server, monkeypatch):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    reader, bench.connection = bench.connection, Connection(queue_server.url, 10, 10)
    with closing(bench.connection), bench.flow.reading_ahead(0):
        bench.work(limit=3)
        wait_until(lambda: len(bench.flow.intake._decoded) == 3, "three groups")
    bench.connection = reader
    assert not bench.flow.intake.held, "a kill before the journal's next record would lose it"
    monkeypatch.setattr(intake, "decode_outcome", None)
    assert bench.train(0) == ["train:0", "train:1"]
    assert list(bench.flow.intake.held) == ["train:2"]
    assert not bench.flow.intake._decoded


def test_what_ended_beside_an_update_is_counted_after_a_kill_too(tmp_path, connection, keys):
    """The record of the new version comes before the next batch; it must not hold ends of that batch."""
    bench = Bench(tmp_path, connection, keys)
    bench.publish(0)
    bench.flow.issue_tickets(0)
    with bench.flow.reading_ahead(0):
        work = WorkStream(connection, keys, keys.tickets, "w", 30.0, 3)
        for entry in work.take(2):
            verdict = Verdict(entry.ticket, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (3, 3))
            work.handoff(entry, keys.outcomes_for("train"), encode(verdict))
        wait_until(lambda: len(bench.flow._ahead) == 2, "two verdicts")
    bench.publish(1)
    again = Bench(tmp_path, connection, keys)
    again.flow._advance()
    assert len(again.flow.intake.take_arrivals().filtered) == 2


def filter_tickets(bench, count):
    """Answer `count` tickets by verdicts, in a connection of this thread; return their names."""
    work = WorkStream(bench.connection, bench.keys, bench.keys.tickets, "filterer", 30.0, 3)
    entries = work.take(count)
    for entry in entries:
        verdict = Verdict(entry.ticket, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (3, 3))
        work.handoff(entry, bench.keys.outcomes_for("train"), encode(verdict))
    return [entry.ticket for entry in entries]


def open_of(bench):
    return {str(ticket): str(version) for ticket, version in bench.ledger.open.items()}


@contextmanager
def own_connection(bench, queue_server):
    """While a flow reads ahead, its connection is that thread's."""
    theirs, bench.connection = bench.connection, Connection(queue_server.url, 10, 10)
    with closing(bench.connection):
        yield
    bench.connection = theirs


def test_a_ticket_that_ends_beside_an_update_without_a_group_is_replaced_at_once(bench, queue_server):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=2)
    assert bench.train(0) == ["train:0", "train:1"]
    with own_connection(bench, queue_server), bench.flow.reading_ahead(0):
        assert filter_tickets(bench, 2) == ["train:2", "train:3"]
        wait_until(lambda: bench.ledger.train_open == 4, "two new tickets")
        assert filter_tickets(bench, 1) == ["train:4"]
        wait_until(lambda: bench.ledger.train_open == 5, "one more")
    assert set(open_of(bench)) == {f"train:{number}" for number in range(2, 7)}
    assert set(open_of(bench).values()) == {"1.0"}, "as if they had been issued before the Update"
    bench.publish(1)
    bench.work()
    assert bench.train(1) == ["train:5", "train:6"], "they come in time for max_staleness 1"
    assert len(bench.taken.arrivals.filtered) == 3
    assert not bench.taken.arrivals.dropped
    totals, _ = bench.balance()
    assert (totals["trained"], totals["filtered"], totals.get("stale", 0)) == (4, 3, 0)


def test_verdicts_that_came_with_the_last_groups_of_a_batch_are_replaced_too(bench, queue_server):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    filter_tickets(bench, 2)
    bench.work(limit=2)
    assert bench.train(0) == ["train:2", "train:3"]
    assert bench.ledger.train_open == 0
    with own_connection(bench, queue_server), bench.flow.reading_ahead(0):
        wait_until(lambda: bench.ledger.train_open == 2, "tickets for the next batch")
    bench.publish(1)
    bench.work()
    assert bench.train(1) == ["train:4", "train:5"]
    bench.balance()


def test_a_long_wait_for_one_group_loses_no_ticket_to_a_kill(tmp_path, connection, keys):
    """A smaller batch waits for an older ticket, and each verdict lets another ticket out meanwhile."""
    settings = {"max_resample_times": 0, "max_empty_updates": 1}
    bench = Bench(tmp_path, connection, keys, **settings)
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=2)
    bench.train(0)
    bench.publish(1)
    bench.flow.issue_tickets(1)
    bench.work(limit=1, late=["train:2"])
    for _ in range(12):
        filter_tickets(bench, 3)
        bench.flow._advance()
        assert bench.flow.intake.form(1) is None, "train:2 has to be in this batch"
        bench.flow.issue_tickets(1)
    assert bench.ledger.next_number == 42
    again = Bench(tmp_path, connection, keys, **settings)
    assert again.ledger.next_number == 42
    assert again.ledger.open.keys() >= bench.ledger.open.keys()
    again.balance()


def test_a_killed_learner_finds_what_was_issued_beside_its_update(bench, queue_server, tmp_path, keys):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=2)
    bench.train(0)
    with own_connection(bench, queue_server), bench.flow.reading_ahead(0):
        filter_tickets(bench, 2)
        wait_until(lambda: bench.ledger.train_open == 4, "two new tickets")
    again = Bench(tmp_path, bench.connection, keys)  # killed before the record of the next version
    assert open_of(again) == {f"train:{number}": "1.0" for number in range(2, 6)}
    again.publish(1)
    again.work()
    assert again.train(1) == ["train:4", "train:5"]
    again.balance()


def test_no_more_than_the_credit_is_issued_beside_an_update(bench, queue_server):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=2)
    bench.train(0)
    with own_connection(bench, queue_server), bench.flow.reading_ahead(0):
        for _ in range(4):  # all are filtered, again and again
            wait_until(lambda: filter_tickets(bench, 1), "a ticket")
        wait_until(lambda: bench.ledger.train_open == 6, "four new tickets")
        assert filter_tickets(bench, 4)
        wait_until(lambda: len(bench.flow._ahead) == 6, "six verdicts")
    assert bench.ledger.next_number == 8
    bench.flow._advance()
    bench.flow.issue_tickets(1)
    assert bench.ledger.train_open == 4
    bench.balance()


@pytest.mark.parametrize(("settings", "step"), [({"max_staleness": 0}, 0), ({}, 3)])
def test_nothing_is_replaced_that_the_next_step_could_not_train(
    settings, step, tmp_path, connection, keys, queue_server
):
    bench = Bench(tmp_path, connection, keys, **settings)
    bench.publish(step)
    bench.flow.issue_tickets(step)
    before = bench.ledger.next_number
    with own_connection(bench, queue_server), bench.flow.reading_ahead(step):
        filter_tickets(bench, 1)
        wait_until(lambda: len(bench.flow._ahead) == 1, "a verdict")
    assert bench.ledger.next_number == before


def test_a_group_before_a_verdict_of_the_same_ticket_is_not_replaced(bench, queue_server):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=2)
    bench.train(0)
    with own_connection(bench, queue_server), bench.flow.reading_ahead(0):
        bench.work(limit=1)
        verdict = Verdict(TicketId("train:2"), "filtered", "no", {"accuracy": (0.0, 0.0)}, (3, 3))
        outcomes = bench.keys.outcomes_for("train")
        bench.connection.execute("XADD", outcomes, "*", "t", "train:2", "d", encode(verdict))
        wait_until(lambda: len(bench.flow._ahead) == 2, "both")
    assert bench.ledger.next_number == 4


def test_an_error_of_issuing_beside_an_update_is_raised_after_it(bench, queue_server, monkeypatch):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=2)
    bench.train(0)
    failed = threading.Event()

    def fail(*_):
        failed.set()
        raise ServerUnavailable("away")

    monkeypatch.setattr(bench.queue, "issue", fail)

    def update():
        with bench.flow.reading_ahead(0):
            filter_tickets(bench, 1)
            assert failed.wait(60)

    with own_connection(bench, queue_server), pytest.raises(ServerUnavailable, match="away"):
        update()


def fail_to_read(bench, monkeypatch, error):
    """Raise the error at each reading of outcomes; return an event that the first reading sets."""
    begun = threading.Event()

    def fail(*_):
        begun.set()
        raise error

    monkeypatch.setattr(bench.queue, "outcomes", fail)
    return begun


def test_an_error_of_reading_beside_an_update_is_raised_after_it(bench, monkeypatch):
    begun = fail_to_read(bench, monkeypatch, RunTaken("another learner"))
    with pytest.raises(RunTaken, match="another learner"), bench.flow.reading_ahead(0):
        assert begun.wait(60)
    with pytest.raises(ZeroDivisionError), bench.flow.reading_ahead(0):
        raise ZeroDivisionError


def test_a_server_that_is_away_during_an_update_ends_only_the_reading(bench, monkeypatch):
    begun = fail_to_read(bench, monkeypatch, ServerUnavailable("away"))
    with bench.flow.reading_ahead(0):
        assert begun.wait(60)


def test_the_last_steps_issue_no_more_than_they_need(bench):
    bench.publish(3)
    bench.flow.issue_tickets(3)
    assert bench.ledger.train_open == 2


def test_what_was_trained_is_gone_from_the_server_and_the_rest_waits(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work()
    trained = bench.train(0)
    totals, open_tickets = bench.balance()
    assert totals["trained"] == 2
    assert not set(trained) & set(open_tickets)


def test_a_resumed_learner_goes_on_with_the_tickets_that_are_out(tmp_path, connection, keys):
    first = Bench(tmp_path, connection, keys)
    first.publish(0)
    first.flow.issue_tickets(0)
    first.work()
    trained = first.train(0)
    first.flow.issue_tickets(1)  # issued after the journal's last record
    second = Bench(tmp_path, connection, keys)
    assert second.ledger.open.keys() == first.ledger.open.keys()
    second.publish(1)
    again = second.train(1)
    assert not set(again) & set(trained)
    second.balance()


def test_after_the_server_lost_everything_each_open_ticket_is_issued_again_as_itself(
    tmp_path, connection, keys
):
    first = Bench(tmp_path, connection, keys)
    first.publish(0)
    first.flow.issue_tickets(0)
    first.work()
    trained = first.train(0)
    connection.execute("DEL", *keys.all)
    second = Bench(tmp_path, connection, keys)
    second.publish(1)
    totals, open_tickets = second.balance()
    assert open_tickets == sorted({"train:0", "train:1", "train:2", "train:3"} - set(trained))
    assert (totals["issued"], totals["trained"]) == (4, 2)
    second.work()
    assert not set(second.train(1)) & set(trained)


def test_a_lost_acknowledgement_is_made_good_and_trains_nothing_twice(tmp_path, connection, keys):
    first = Bench(tmp_path, connection, keys)
    first.publish(0)
    first.flow.issue_tickets(0)
    first.work()
    lost = {name: connection.execute("HGET", keys.open, name) for name in ("train:0", "train:1")}
    trained = first.train(0)
    for name, place in lost.items():  # as if the server had lost its last writes
        connection.execute("HSET", keys.open, name, place)
    first.flow.join()
    totals, open_tickets = first.balance()
    assert not set(trained) & set(open_tickets)
    assert totals["trained"] == 2


def test_a_server_that_lost_the_claim_does_not_end_the_run(tmp_path, connection, keys):
    Bench(tmp_path, connection, keys)
    second = Bench(tmp_path, connection, keys)
    second.publish(0)
    connection.execute("HSET", keys.fence, "incarnation", 1)
    connection.restarts += 1  # a server that was killed may have lost more
    with pytest.raises(RunNotReady, match="lost this learner's claim"):
        second.queue.beat(1.0, "busy")  # exit code 75: started again, it claims again
    connection.restarts -= 1
    second.queue.beat(1.0, "busy")
    assert connection.execute("HGET", keys.fence, "incarnation") == b"2"


def test_the_books_balance_after_the_server_lost_a_ticket_whose_group_is_held(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=1)
    with pytest.raises(DeadlineExceeded):
        bench.flow.take_groups(0)
    assert bench.flow.intake.held.keys() == {"train:0"}
    bench.connection.execute(
        "DEL", bench.keys.open, bench.keys.ledger, bench.keys.tickets, bench.keys.scored
    )
    bench.flow.join()
    bench.balance()
    bench.work()
    bench.train(0)
    bench.balance()


def test_after_no_signal_the_next_start_begins_with_new_questions(tmp_path, connection, keys):
    first = Bench(tmp_path, connection, keys, max_resample_times=1, max_empty_updates=1)
    first.publish(0)
    first.flow.issue_tickets(0)
    work = WorkStream(connection, keys, keys.tickets, "w", 30.0, 3)
    for entry in work.take(10):
        verdict = Verdict(entry.ticket, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (1, 1))
        work.handoff(entry, keys.scored, encode(verdict))
    with pytest.raises(NoSignal):
        first.flow.take_groups(0)
    second = Bench(tmp_path, connection, keys, max_resample_times=1, max_empty_updates=1)
    second.publish(0)
    second.flow.issue_tickets(0)
    second.work()
    assert len(second.train(0)) == 2


def test_an_older_incarnation_is_refused(tmp_path, connection, keys):
    first = Bench(tmp_path, connection, keys)
    Bench(tmp_path, connection, keys)
    with pytest.raises(RunTaken, match="incarnation 2"):
        first.publish(0)


def test_what_a_superseded_learner_still_writes_is_no_part_of_the_run(tmp_path, connection, keys):
    first = Bench(tmp_path, connection, keys)
    first.publish(0)
    first.flow.issue_tickets(0)
    first.work()
    for group in first.flow.take_groups(0).groups:  # then it is stopped until a successor took over
        first.ledger.close(group.group.ticket.id, "trained")
    second = Bench(tmp_path, connection, keys)
    with pytest.raises(RunTaken, match="incarnation 2"):
        first.commit_log.record("batch", step=1, groups=[])
    assert [record["kind"] for _, record in read_journal(RunFolder(tmp_path), 1)] == ["version", "batch"]
    with pytest.raises(RunTaken, match="incarnation 2 of the learner holds the run's folder"):
        LearnerFolder(tmp_path, first.claim.incarnation).check_not_superseded()
    LearnerFolder(tmp_path, second.claim.incarnation).check_not_superseded()
    second.publish(0)
    trained = second.train(0)
    assert len(trained) == 2
    second.balance()
    kinds = [record["kind"] for _, record in read_chain(RunFolder(tmp_path), claim_next(tmp_path))]
    assert kinds.count("batch") == 1


def test_a_run_of_the_same_name_from_another_folder_is_refused(bench):
    stranger = LearnerQueue(bench.connection, bench.keys, 99)
    with pytest.raises(ConfigError, match="another folder"):
        stranger.claim("another nonce", "me")


def test_held_out_questions_are_answered_and_never_trained(bench):
    bench.publish(0, evaluate=True)
    bench.work("eval_tickets")
    bench.flow.finish_evaluation()
    (result,) = bench.flow.evaluator.take_ended()
    assert summarise(result.answers, "accuracy")["eval/pass@1"] == 1.0
    assert [answer.index for answer in result.answers] == [0, 1]
    totals, _ = bench.balance()
    assert totals["evaluated"] == 2


def test_no_batch_is_formed_while_an_evaluation_runs(bench):
    """Between forming and writing down, a restarted server would hand the same groups out again."""
    bench.publish(0, evaluate=True)
    bench.flow.issue_tickets(0)
    bench.work()
    with pytest.raises(DeadlineExceeded, match="2 evaluation tickets wait for an actor since"):
        bench.flow.take_groups(0)
    bench.connection.restarts += 1
    bench.work("eval_tickets")
    trained = bench.train(0)
    totals, open_tickets = bench.balance()
    assert (totals["trained"], totals["evaluated"]) == (2, 2)
    assert not set(trained) & (bench.flow.intake.held.keys() | set(open_tickets))


def test_a_dead_question_is_counted_and_the_evaluation_ends(bench):
    bench.publish(0, evaluate=True)
    work = WorkStream(bench.connection, bench.keys, bench.keys.eval_tickets, "w", 30.0, 3)
    for entry in work.take(1):
        work.bury(entry, "eval", "broken")
    bench.work("eval_tickets")
    bench.flow.finish_evaluation()
    (result,) = bench.flow.evaluator.take_ended()
    assert [answer.reason for answer in result.answers] == ["broken", ""]
    assert [answer.finish_reasons for answer in result.answers] == [(), ("stop",)]


def test_what_is_left_at_the_end_is_unused_and_nothing_is_in_flight(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work(limit=1)
    bench.flow.close_rest()
    bench.flow.release_workers()
    totals, open_tickets = bench.balance()
    assert (totals["unused"], open_tickets) == (4, [])
    assert RunView(bench.connection, bench.keys).ended()


def test_a_wait_in_vain_ends_with_who_holds_what(bench):
    bench.publish(0)
    with pytest.raises(DeadlineExceeded, match="or all left; 4 tickets wait for an actor since"):
        bench.flow.take_groups(0)


def test_a_wait_in_vain_is_reported_with_who_holds_what(bench, monkeypatch):
    monkeypatch.setattr(deadline, "REPORT_EVERY_S", 0.001)
    monkeypatch.setattr(ticket_flow, "_ENGINE_STARTS_S", 0.0)
    bench.publish(0)
    with structlog.testing.capture_logs() as logs, pytest.raises(DeadlineExceeded):
        bench.flow.take_groups(0)
    (first, *_) = [log["event"] for log in logs if log["event"].startswith("Waiting for groups")]
    told = (
        r"Waiting for groups since \d+ s: no actor has joined yet \(vLLM takes a minute\), or all left; "
        r"4 tickets wait for an actor since \d+ s"
    )
    assert re.match(told, first)
    assert len(first) <= 135


def test_the_start_of_the_engines_is_no_warning(bench, monkeypatch):
    monkeypatch.setattr(deadline, "REPORT_EVERY_S", 0.001)
    bench.publish(0)
    with structlog.testing.capture_logs() as logs, pytest.raises(DeadlineExceeded):
        bench.flow.take_groups(0)
    (first, *_) = [log for log in logs if log["event"].startswith("Waiting for the first groups")]
    assert (first["log_level"], "vLLM takes a minute" in first["event"]) == ("info", True)


def test_a_version_that_no_actor_takes_is_named(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work()
    bench.train(0)
    bench.publish(1)
    bench.train(1)  # what was sampled by the version before
    with pytest.raises(
        DeadlineExceeded, match=r"no results from weights 1\.1 yet \(published .* newest: 1\.0\)"
    ):
        bench.flow.take_groups(2)


def test_a_dead_ticket_is_named_when_nothing_is_left_to_train(tmp_path, connection, keys):
    bench = Bench(tmp_path, connection, keys, max_resample_times=0, max_empty_updates=1)
    bench.publish(0)
    bench.flow.issue_tickets(0)
    work = WorkStream(connection, keys, keys.tickets, "w", 30.0, 3)
    for entry in work.take(2):
        work.bury(entry, "train", "it hangs, says rewarder-x")
    with pytest.raises(
        NoSignal, match=r"train:1: it hangs, says rewarder-x\. Like this ticket, most died"
    ):
        bench.flow.take_groups(0)


def test_a_verdict_without_payload_counts_and_frees_its_credit(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    work = WorkStream(bench.connection, bench.keys, bench.keys.tickets, "w", 30.0, 3)
    filtered, *_ = work.take(1)
    verdict = Verdict(filtered.ticket, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (1, 1))
    work.handoff(filtered, bench.keys.scored, encode(verdict))
    bench.work()
    assert filtered.ticket not in bench.train(0)
    assert bench.taken.arrivals.filtered == [verdict]
    assert bench.balance()[0]["filtered"] == 1


def test_groups_ride_with_their_columns(bench):
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work()
    groups = bench.flow.take_groups(0).groups
    assert all(isinstance(group, ScoredGroup) for group in groups)
    assert all(isinstance(group.group, Group) for group in groups)
    assert all("answer" in group.group.ticket.columns for group in groups)


def test_with_max_staleness_0_the_run_is_synchronous(tmp_path, connection, keys):
    bench = Bench(tmp_path, connection, keys, max_staleness=0)
    view = RunView(connection, keys)
    work = WorkStream(connection, keys, keys.tickets, "w", 30.0, 3)

    def answer(ends_filtered):
        """Sample what is out with the announced version, which has to be the one it was issued at."""
        for entry in work.take(10):
            ticket, announced = decode(entry.payload, Ticket), view.weights().version
            assert ticket.version == announced
            assert ticket.min_step == announced.step
            outcome = make_group(ticket, spans=[(announced.step, 3)])
            if ends_filtered:
                outcome = Verdict(ticket.id, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (1, 1))
            work.handoff(entry, keys.scored, encode(outcome))

    for step in range(4):
        bench.publish(step, evaluate=True)  # waits for the evaluation of the version before
        bench.flow.issue_tickets(step)
        answer(ends_filtered=True)
        bench.work("eval_tickets")
        bench.flow.finish_evaluation()
        bench.flow.issue_tickets(step)
        answer(ends_filtered=False)
        groups = bench.flow.take_groups(step).groups
        for group in groups:
            assert all(np.all(token_staleness(made, step) == 0) for made in group.group.rollouts)
            bench.ledger.close(group.group.ticket.id, "trained")
        bench.commit_log.record("batch", step=step + 1)
        assert not view.audit()[1], "a ticket of the next step is out before its version is announced"
    assert bench.balance()[0]["trained"] == 8


def test_no_ticket_goes_out_while_an_evaluation_holds_the_next_version_back(bench):
    bench.publish(0, evaluate=True)
    bench.work("eval_tickets")
    bench.publish(1)
    assert bench.flow.evaluator.take_ended()
    assert bench.ledger.train_open == 0


def kill(*_args, **_fields):
    raise Killed


def kill_before_writing(bench):
    bench.commit_log.record = kill


def kill_before_issuing(bench):
    bench.queue.issue = kill


def kill_after_issuing(bench):
    issue = bench.queue.issue
    bench.queue.issue = lambda *args: kill(issue(*args))


@pytest.mark.parametrize("strike", [kill_before_writing, kill_before_issuing, kill_after_issuing, None])
def test_a_dropped_question_is_trained_once_whenever_the_learner_is_killed(
    strike, tmp_path, connection, keys
):
    first = second = Bench(tmp_path, connection, keys, at_max_staleness="requeue")
    for step in (0, 1):
        first.publish(step)
        first.flow.issue_tickets(step)
        first.work(late=["train:0"])
        first.train(step)
    first.publish(2)
    first.flow.issue_tickets(2)
    first.late.pop()()  # the answer to train:0, two versions old
    if strike:
        strike(first)
        with pytest.raises(Killed):
            first.flow.take_groups(2)
        second = Bench(tmp_path, connection, keys, at_max_staleness="requeue")
        second.asked += first.asked
        second.publish(2)
    second.work()
    second.train(2)
    second.publish(3)
    second.flow.issue_tickets(3)
    second.work()
    assert second.train(3) == ["train:7", "train:8"]
    source = second.plan.source
    questions = [source.train(TicketId(f"train:{number}"), Version(1, 0)).columns for number in range(8)]
    assert sorted(second.asked) == sorted(question["answer"] for question in questions)
    assert second.balance()[0]["stale"] == 1
