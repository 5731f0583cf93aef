"""Leases run out when nobody renewed them for a lease, whatever the server's clock says meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog

from penstock.common.broker import lease_watch
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.lease_keeper import KeeperThread, LeaseKeeper
from penstock.common.broker.lease_watch import Lease, LeaseWatch
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.errors import PenstockError, RunTaken, ServerUnavailable
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.builders import Run
from tests.helpers import Clock, wait_until

HOUR_MS = 3_600_000
LEASE_S = 1.0  # a keeper on a busy machine renews in time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_watch, "time", clock)
    return clock


def held(number: int, count: int = 1, holder: str = "actor") -> Lease:
    return Lease(f"{number}-0", holder, count)


# The watch


def test_a_lease_runs_out_after_its_length_without_a_renewal(clock: Clock) -> None:
    watch = LeaseWatch(10.0)
    out_at = []
    for second in range(1, 30):
        clock.now += 1.0
        renewals = min(second // 4, 2)  # the last one is seen in second 8
        if watch.look([held(1, count=1 + renewals), held(2, count=second)]):
            out_at.append(second)
    assert out_at == list(range(19, 30))


def test_another_holder_begins_anew(clock: Clock) -> None:
    watch = LeaseWatch(2.0)
    for second in range(20):
        clock.now += 1.0
        assert watch.look([held(1, holder=f"actor-{second // 2}")]) == []


def test_a_watcher_that_was_stopped_leaves_the_holders_time_to_renew(clock: Clock) -> None:
    watch = LeaseWatch(10.0)
    watch.look([held(1)])
    clock.now += HOUR_MS
    assert watch.look([held(1)]) == []
    clock.now += 4.0
    assert watch.look([held(1, count=2)]) == []
    for _ in range(3):
        clock.now += HOUR_MS
        out = watch.look([held(1, count=2)])
    assert out == [held(1, count=2)]


def test_a_time_without_the_server_is_left_out_and_no_other(clock: Clock) -> None:
    watch = LeaseWatch(10.0)
    out_at = []
    for second in range(1, 19):
        clock.now += 1.0
        if second % 3 == 0:  # a link that breaks again and again
            clock.now += 30.0
            watch.skip()
        if watch.look([held(1)]):
            out_at.append(second)
    assert out_at == [17, 18], "first seen in second 1, and of each three seconds two count"


# On a server whose clock is set


def step(run: Run, entry: Entry, holder: str, ms: int) -> None:
    """Set the lease's time as if the server's clock had been put forward since, or back."""
    seconds, microseconds = run.connection.execute("TIME")
    at = 1000 * int(seconds) + int(microseconds) // 1000 - ms
    script = (
        f"local p = redis.call('XPENDING', KEYS[1], '{GROUP}', ARGV[2], ARGV[2], 1)[1] "
        f"redis.call('XCLAIM', KEYS[1], '{GROUP}', ARGV[1], 0, ARGV[2], 'TIME', ARGV[3], "
        "'RETRYCOUNT', p[4], 'JUSTID')"
    )
    run.connection.execute("EVAL", script, 1, run.keys.tickets, holder, entry.id, at)


@contextmanager
def renewing(worker: WorkStream, entry: Entry) -> Iterator[None]:
    keeper = LeaseKeeper(LEASE_S, time.monotonic_ns, 60.0)
    keeper.start()
    keeper.hold(worker, entry, lambda: None)
    yield
    keeper.stop()


def test_a_step_forward_ends_no_lease_that_is_renewed(run: Run) -> None:
    run.issue(1, 2)
    owner, other = run.actor("owner", lease_s=LEASE_S), run.actor("other", lease_s=LEASE_S)
    kept, lost = owner.take(2)
    with renewing(owner, kept):
        assert other.reclaim(9) == []
        for entry in (kept, lost):
            step(run, entry, "owner", HOUR_MS)
        assert other.reclaim(9) == []
        found = wait_until(lambda: other.reclaim(9), "the lease that nobody renews to run out")
        assert [entry.ticket for entry in found] == ["train:2"]
        for _ in range(20):
            step(run, kept, "owner", HOUR_MS)
            assert [entry.ticket for entry in other.reclaim(9)] in ([], ["train:2"])
            time.sleep(0.05)


def test_a_step_back_keeps_no_lease_alive(run: Run) -> None:
    run.issue(1)
    (entry,) = run.actor("dead").take(1)
    step(run, entry, "dead", -HOUR_MS)
    other = run.actor("other", lease_s=0.2)
    (found,) = wait_until(lambda: other.reclaim(1), "the lease to run out")
    assert found.attempts == 1


def test_a_clock_that_is_put_back_by_days_costs_no_work(run: Run) -> None:
    run.issue(1)
    later = 1000 * run.connection.execute("TIME")[0] + 72 * HOUR_MS
    run.connection.execute("XSETID", run.keys.tickets, f"{later}-0")  # as if they were issued then
    run.learner.restore()
    assert not run.learner.damaged
    (entry,) = run.actor().take(1)
    assert entry.ticket == "train:1"


# While the server takes no writes


@pytest.mark.parametrize("setting", ["min-replicas-to-write", "maxmemory"])
def test_a_time_without_writes_counts_no_attempt(
    private_server: LocalServer, keys: Keys, setting: str
) -> None:
    run = Run(Connection(private_server.url, 10, 30), keys)
    run.issue(1)
    owner = run.actor("owner", lease_s=LEASE_S)
    (entry,) = owner.take(1)
    other = run.actor("other", lease_s=LEASE_S, connection=Connection(private_server.url, 10, 30))
    with renewing(owner, entry):
        other.reclaim(9)
        run.connection.execute("CONFIG", "SET", setting, 1)
        threading.Timer(1.5, run.connection.execute, ["CONFIG", "SET", setting, 0]).start()
        ends = time.monotonic() + 3.0
        while time.monotonic() < ends:
            assert other.reclaim(9) == []
            time.sleep(0.02)
    assert owner.handoff(entry, run.keys.rollouts, b"group")


def test_a_lease_that_a_restart_brought_back_is_watched_anew(
    private_server: LocalServer, keys: Keys
) -> None:
    run = Run(Connection(private_server.url, 10, 10), keys)
    run.issue(1)
    run.actor("dead").take(1)
    other = run.actor("other", lease_s=0.2)
    seen = other._connection.call("leases", other._lease_keys, [])
    wait_until(lambda: other._connection.execute("INFO")["aof_buffer_length"] == 0, "the file")
    old = run.connection.server_id
    private_server.kill()
    private_server.start()
    assert run.connection.execute("PING")
    lost = run.connection.call("reclaim", other._lease_keys, ["other", 3, old, *seen[0]])
    assert lost == []
    assert other.reclaim(1) == []
    (found,) = wait_until(lambda: other.reclaim(1), "a lease after the restart")
    assert found.attempts == 1


def test_a_lease_renewed_since_the_look_is_left(run: Run) -> None:
    run.issue(1)
    owner, other = run.actor("owner"), run.actor("other")
    (entry,) = owner.take(1)
    seen = run.connection.call("leases", other._lease_keys, [])
    assert owner.renew([entry.id]) == [True]
    again = ["other", 3, run.connection.server_id, *seen[0]]
    assert run.connection.call("reclaim", other._lease_keys, again) == []
    assert owner.renew([entry.id]) == [True]


@pytest.mark.parametrize("count", [10**17, 2**63 - 1])
def test_a_count_that_another_client_set_keeps_no_lease_from_its_renewal(run: Run, count: int) -> None:
    run.issue(1, 2)
    owner, other = run.actor("owner", lease_s=0.4), run.actor("other", lease_s=0.4)
    first, second = owner.take(2)
    claim = (
        f"redis.call('XCLAIM', KEYS[1], '{GROUP}', 'owner', 0, ARGV[1], 'RETRYCOUNT', ARGV[2], 'JUSTID')"
    )
    run.connection.execute("EVAL", claim, 1, run.keys.tickets, first.id, count)
    assert owner.renew([first.id, second.id]) == [True, True]
    assert owner.renew([first.id, second.id]) == [True, True]
    found = wait_until(lambda: other.reclaim(9), "both leases to run out")
    assert [entry.ticket for entry in found] == ["train:1", "train:2"]


# The learner's lease


@contextmanager
def beating(queue: LearnerQueue, lease_s: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            queue.beat(lease_s, "working")

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.parametrize("ms", [HOUR_MS, -HOUR_MS])
def test_a_learner_that_renews_its_lease_is_left_alone_by_any_clock(run: Run, ms: int) -> None:
    run.learner.claim("nonce", "first", lease_s=30.0)
    seen = int(run.connection.execute("HGET", run.keys.fence, "seen"))
    with beating(run.learner, 30.0):
        run.connection.execute("HSET", run.keys.fence, "seen", seen - ms)
        with pytest.raises(RunTaken, match=r"the learner first \(incarnation 1\) holds run"):
            LearnerQueue(run.connection, run.keys, 2).claim("nonce", "second", 30.0)


@pytest.mark.parametrize("ms", [HOUR_MS, -HOUR_MS])
def test_the_lease_of_a_dead_learner_runs_out_whatever_the_clock_says(run: Run, ms: int) -> None:
    run.learner.claim("nonce", "first", lease_s=0.5)
    seen = int(run.connection.execute("HGET", run.keys.fence, "seen"))
    run.connection.execute("HSET", run.keys.fence, "seen", seen - ms)
    began = time.monotonic()
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "second", 30.0)
    assert time.monotonic() - began > 0.5
    with pytest.raises(RunTaken, match="incarnation 2"):
        run.learner.beat(30.0, "back again")
    assert run.view.learner().holder == "second"


def test_a_learner_that_could_not_renew_its_lease_is_not_followed(
    private_server: LocalServer, keys: Keys
) -> None:
    first, waits, admin = (Connection(private_server.url, 10, 60) for _ in range(3))
    run = Run(first, keys)
    run.learner.claim("nonce", "first", 1.0)
    refused: list[RunTaken] = []

    def claim() -> None:
        try:
            LearnerQueue(waits, keys, 2).claim("nonce", "second", 1.0)
        except RunTaken as error:
            refused.append(error)

    second = threading.Thread(target=claim)
    with structlog.testing.capture_logs() as logs:
        second.start()
        wait_until(lambda: any("for a sign of" in log["event"] for log in logs), "the second learner")
        admin.execute("CONFIG", "SET", "min-replicas-to-write", 1)
        time.sleep(3.0)
        admin.execute("CONFIG", "SET", "min-replicas-to-write", 0)
        with beating(run.learner, 1.0):
            second.join(60)
    assert len(refused) == 1


# The threads


def test_no_error_ends_a_keeper() -> None:
    errors: list[Exception] = [ServerUnavailable("away"), KeyError("x"), RecursionError(), MemoryError()]
    calls = []

    def keep() -> None:
        calls.append(1)
        if errors:
            raise errors.pop(0)

    thread = KeeperThread("leases", 0.01, keep)
    with structlog.testing.capture_logs() as logs:
        thread.start()
        wait_until(lambda: len(calls) > 6, "calls after all errors")
        thread.check()
        thread.stop()
    thread.check()
    assert [line["log_level"] for line in logs] == ["warning", "error", "error", "error"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_keeper_that_died_is_noticed() -> None:
    def keep() -> None:
        raise SystemExit

    thread = KeeperThread("leases", 0.01, keep)
    thread.check()
    thread.start()
    wait_until(lambda: not thread._thread.is_alive(), "the end of the thread")
    with pytest.raises(PenstockError, match="the thread leases has died"):
        thread.check()


def test_what_is_being_handed_on_is_renewed_and_not_missed(run: Run) -> None:
    run.issue(1)
    owner, lost = run.actor("owner", lease_s=0.2), []
    (entry,) = owner.take(1)
    keeper = LeaseKeeper(0.2, time.monotonic_ns, 60.0)
    keeper.hold(owner, entry, lambda: lost.append(1))
    keeper.finish(owner, entry)
    with structlog.testing.capture_logs() as logs:
        keeper._renew()
        assert keeper.holds(owner, entry)
        owner.handoff(entry, run.keys.rollouts, b"group")
        keeper._renew()
    assert not keeper.holds(owner, entry)
    assert lost == logs == []


def test_a_learner_that_is_told_to_stop_while_it_waits_for_another_is_not_refused(run: Run) -> None:
    run.learner.claim("nonce", "other", 30.0)
    run.learner.beat(30.0, "working")
    run.connection.stopping.set()
    with pytest.raises(ServerUnavailable, match="told to stop while it waited for the learner other"):
        LearnerQueue(run.connection, run.keys, 2).claim("nonce", "next", 30.0)


def test_a_heartbeat_that_a_server_lost_is_no_sign_of_a_learner(run: Run) -> None:
    run.learner.claim("nonce", "dead", 0.3)
    run.learner.beat(0.3, "working")
    run.learner.beat(0.3, "working")
    connection = run.connection

    class Restarting(threading.Event):
        """A server that was killed, and is back without the last heartbeat, when it is asked again."""

        def wait(self, timeout: float | None = None) -> bool:
            if not connection.restarts:
                connection.restarts, connection.interruptions = 1, connection.interruptions + 1
                connection.execute("HSET", run.keys.fence, "beats", 1)
            return super().wait(timeout)

    connection.stopping = Restarting()
    LearnerQueue(connection, run.keys, 2).claim("nonce", "next", 0.3)
    assert connection.execute("HGET", run.keys.fence, "holder") == b"next"
