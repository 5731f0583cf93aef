"""Who should deliver, and whether the learner is alive, as the other processes see it."""

from __future__ import annotations

import re
import threading

import pytest
import structlog

from penstock.common import deadline
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView, wait_for_another_contract, wait_for_contract
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, RunTaken
from penstock.common.monitor.learner_watch import LearnerWatch
from penstock.common.monitor.waiting import describe_waiting
from penstock.common.wire.messages import Version, Weights
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.builders import Run
from tests.helpers import Clock, wait_until


def describe(run: Run, lease_s: float = 60.0) -> str:
    return describe_waiting(run.connection, run.keys, lease_s)


# Tickets, their holders, and roles that nobody fills


def test_tickets_nobody_took_are_counted_and_the_missing_role_is_named(run: Run) -> None:
    run.issue(1)
    assert re.fullmatch(
        r"no actor has joined yet \(vLLM takes a minute\), or all left; "
        r"1 ticket waits for an actor since \d+ s",
        describe(run),
    )
    run.issue(2)
    assert "; 2 tickets wait for an actor since" in describe(run)


def test_a_holder_is_named_with_the_number_of_its_tickets(run: Run) -> None:
    run.issue(1, 2, 3)
    (entry, *_) = run.actor("actor-a").take(3)
    run.actor("actor-a").fail(entry, "train", "broken")
    run.actor("actor-b").take(1)
    told = describe(run)
    assert re.fullmatch(r"actor-a holds 2 tickets since \d+ s; actor-b holds 1 ticket since \d+ s", told)


def test_a_server_without_room_is_named_before_those_who_wait_for_it(
    private_server: LocalServer, keys: Keys
) -> None:
    run = Run(Connection(private_server.url, 10, 10), keys)
    run.issue(1)
    run.actor("actor-a").take(1)
    run.connection.execute("CONFIG", "SET", "maxmemory", 1)
    assert re.match(r"The queue server's memory is full .*; actor-a holds 1 ticket since", describe(run))
    run.connection.close()


def test_each_open_ticket_is_logged_at_debug_level(run: Run) -> None:
    run.issue(1, 2)
    run.actor("actor-a").take(1)
    with structlog.testing.capture_logs() as logs:
        describe(run)
    assert [(log["log_level"], log["ticket"], log["holder"], log["attempt"]) for log in logs] == [
        ("debug", "train:1", "actor-a", 1),
        ("debug", "train:2", "", 1),
    ]


def test_a_role_whose_process_gave_no_sign_within_a_lease_is_not_running(run: Run) -> None:
    run.issue(1)
    run.actor().take(1)
    told = r"no actor is running, actor was last seen \d+ s ago; actor holds 1 ticket since \d+ s"
    wait_until(lambda: re.fullmatch(told, describe(run, lease_s=0.05)), "the actor to be silent")


def test_results_wait_for_the_learner(run: Run) -> None:
    run.issue(1, 2, 3, 4, 5)
    for entry in run.actor().take(5):
        run.actor().handoff(entry, run.keys.scored, b"scored")
    assert re.fullmatch(r"5 results wait for the learner since \d+ s", describe(run))


def test_without_a_ticket_that_is_said(run: Run) -> None:
    assert describe(run) == "no ticket is open"


# The learner's sign of life


def watch(run: Run, limit_s: float) -> LearnerWatch:
    return LearnerWatch(run.connection, run.keys, RunSettings(progress_timeout_s=limit_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)
    return clock


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.common.monitor.learner_watch._POLL_EVERY_S", 0.0)


@pytest.mark.usefixtures("looks_at_once")
def test_a_learner_that_stops_is_named_with_what_it_did_and_what_waits_for_it(run: Run) -> None:
    run.learner.claim("nonce", "process 7 on here", lease_s=30.0)
    run.learner.beat(30.0, "making an Update")
    run.learner.announce(Weights(Version(1, 4), "path", "hash", ""))
    run.issue(1)
    (entry,) = run.actor().take(1)
    run.actor().handoff(entry, run.keys.scored, b"scored")
    watching = watch(run, limit_s=0.1)

    def check_until_it_ends() -> DeadlineExceeded | None:
        try:
            watching.check()
        except DeadlineExceeded as error:
            return error
        return None

    told = str(wait_until(check_until_it_ends, "the end of the deadline"))
    assert re.search(r"no heartbeat from the learner for \d+ s \(RUN_PROGRESS_TIMEOUT_S\)", told)
    assert "process 7 on here (incarnation 1, when last seen: making an Update)" in told
    assert "weights 1.4 are announced; 1 result waits for the learner since" in told


@pytest.mark.usefixtures("looks_at_once")
def test_a_learner_that_gives_signs_of_life_is_waited_for(run: Run, clock: Clock) -> None:
    watching = watch(run, limit_s=6.0)
    for number in range(3):
        run.learner.beat(30.0, f"making Update {number}")
        watching.check()
        clock.now += 4.0
        watching.check()
    clock.now += 4.0
    with pytest.raises(DeadlineExceeded, match="no heartbeat from the learner for 8 s"):
        watching.check()


@pytest.mark.usefixtures("looks_at_once")
def test_the_wait_for_a_silent_learner_is_reported(run: Run, clock: Clock) -> None:
    watching = watch(run, limit_s=600.0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(7):
            clock.now += 5.0
            watching.check()
    (report,) = logs
    assert report["event"] == (
        "No heartbeat from the learner for 30 s: the learner is test (incarnation 1), no weights are "
        "announced; no ticket is open"
    )


@pytest.mark.usefixtures("looks_at_once")
def test_the_report_of_a_wait_has_at_most_160_letters(run: Run, clock: Clock) -> None:
    run.issue(*range(9))
    for number in range(9):
        run.actor(f"actor-a-host-with-a-long-name-{number}").take(1)
    watching = watch(run, limit_s=600.0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(7):
            clock.now += 5.0
            watching.check()
    (report,) = [log for log in logs if log["log_level"] == "warning"]
    assert report["event"].startswith("No heartbeat from the learner for 30 s: the learner is test")
    assert report["event"].endswith(" ...")
    assert len(f"12:00:00 [warning  ] {report['event']}") <= 160


def test_a_run_that_is_being_set_up_is_waited_for_while_its_learner_lives(run: Run) -> None:
    class Beating:
        """Sets `stopping` after a few looks; each comes with a sign of life."""

        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            run.learner.beat(30.0, f"reading data {self.looks}")
            return self.looks > 5

        def wait(self, _timeout_s: float) -> None:
            pass

    assert wait_for_contract(run.view, 1e-9, Beating()) is None  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded, match=r"the learner is test .* reading data"):
        wait_for_contract(run.view, 1e-9, Silent())  # type: ignore[arg-type]


class Silent:
    """Never set, and never waits."""

    def is_set(self) -> bool:
        return False

    def wait(self, _timeout_s: float) -> None:
        pass


# Counting the wait


def test_a_gap_between_two_polls_counts_as_5_seconds_at_most(clock: Clock) -> None:
    waiting = Deadline(60.0)
    clock.now += 3600.0  # stopped, or the server was away
    assert not waiting.expired()
    assert waiting.waited_s == 5.0


def test_a_deadline_expires_at_its_limit_and_restarts_when_something_came(clock: Clock) -> None:
    waiting = Deadline(6.0)
    for expected in (False, False, True):
        clock.now += 3.0
        assert waiting.expired() is expected
    waiting.restart()
    clock.now += 3.0
    assert not waiting.expired()


def test_a_wait_in_vain_is_reported_every_30_seconds(clock: Clock) -> None:
    waiting = Deadline(600.0)
    reports = []
    for second in range(100):
        clock.now += 1.0
        waiting.expired()
        if waiting.report_due():
            reports.append(second + 1)
    assert reports == [30, 60, 90]


# One learner, also on other hosts


def test_a_second_learner_is_refused_while_the_first_ones_lease_lives(run: Run) -> None:
    run.learner.claim("nonce", "process 7 on here", lease_s=30.0)
    threading.Timer(0.5, run.learner.beat, [30.0, "waiting"]).start()
    with pytest.raises(RunTaken, match=r"process 7 on here \(incarnation 1\) holds run .* 30 s lives"):
        LearnerQueue(run.connection, run.keys, 2).claim("nonce", "process 7 on there", 30.0)
    assert run.view.incarnation() == 1
    run.learner.beat(30.0, "waiting")


def test_a_server_that_went_back_to_the_lease_before_does_not_end_its_successor(run: Run) -> None:
    run.learner.claim("nonce", "first", lease_s=3600.0)
    kept = run.connection.execute("HGETALL", run.keys.fence)
    second = LearnerQueue(run.connection, run.keys, 2)
    second.claim("nonce", "second", 30.0, ["first"])
    for name, value in kept.items():  # kill -9 of the server, with its last writes not on disk
        run.connection.execute("HSET", run.keys.fence, name, value)
    second.claim("nonce", "second")
    second.beat(30.0, "waiting for groups")
    assert run.view.learner().holder == "second"


def test_a_learner_that_left_lets_the_next_one_in_at_once(run: Run) -> None:
    run.learner.claim("nonce", "first", lease_s=3600.0)
    run.learner.beat(0.0, "ended")
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "second", 30.0)


def test_the_successor_of_a_learner_that_is_gone_for_certain_need_not_wait(run: Run) -> None:
    run.learner.claim("nonce", "first", lease_s=3600.0)
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "third", 30.0, ["second", "first"])


def test_the_next_learner_may_publish_the_same_contract(run: Run) -> None:
    run.learner.publish_contract(b"old")
    run.learner.beat(0.0, "leaving")
    following = LearnerQueue(run.connection, run.keys, 2)

    class Following(Silent):
        """The next learner claims the run between two looks."""

        def wait(self, _timeout_s: float) -> None:
            following.claim("nonce", "the next one", 30.0)
            following.beat(30.0, "loading the model")

    found = wait_for_another_contract(RunView(run.connection, run.keys), b"old", 60.0, Following())  # type: ignore[arg-type]
    assert found == b"old"


@pytest.mark.parametrize(
    ("phase", "contract", "found"),
    [("reading data and model", b"new", b"new"), ("working", b"old", None)],
)
def test_a_contract_is_an_earlier_learners_until_one_is_past_its_setup(
    run: Run, phase: str, contract: bytes, found: bytes | None
) -> None:
    """What a learner left does not change that it left, nor does a new one that still reads its data."""
    run.learner.publish_contract(b"old")
    run.learner.beat(0.0, "leaving")
    view, answers = RunView(run.connection, run.keys), []
    waiting = threading.Thread(
        target=lambda: answers.append(wait_for_another_contract(view, b"old", 600.0, threading.Event()))
    )
    waiting.start()
    for told in ("reading data and model", phase):
        waiting.join(0.5)
        assert not answers
        run.learner.beat(30.0, told)
    run.learner.publish_contract(contract)
    waiting.join(60)
    assert answers == [found]
