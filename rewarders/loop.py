"""The rewarder's loop: take groups from `rollouts`, score them, hand their outcomes to the learner.

Waits for: the learner's contract (RUN_JOIN_TIMEOUT_S), then a free scoring process and a group.
Unblocked by: actors handing groups in, leases of lost rewarders running out.
Produces: a ScoredGroup or a Verdict per group on `scored` (training) or `evaluated` (evaluation).
Ends when the run has ended or a signal came, after finishing what it holds.
"""

import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from penstock.common.broker.connection import BLOCK_MS, Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.learner_watch import LearnerWatch
from penstock.common.broker.lease_keeper import LeaseKeeper
from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.role_command import RewarderCommand
from penstock.common.errors import MalformedMessage, RunNotReady, ServerUnavailable
from penstock.common.log import get_logger
from penstock.common.role import connect, consumer_name
from penstock.common.sandbox.pool import START_TIMEOUT_S
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import Group, Outcome, ScoredGroup
from penstock.rewarders.join import CurrentScorer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

_REPORT_EVERY_S = 10.0

log = get_logger(__name__)


def run(settings: RewarderCommand, stopping: threading.Event) -> None:
    """Serve a run until it ends or `stopping` is set."""
    connection = connect(settings.redis_url, settings.run, stopping)
    view = RunView(connection, Keys(settings.run.name))
    contract = wait_for_contract(view, settings.run.join_timeout_s, stopping)
    if contract is not None:
        with (
            ScoringPool(settings.rewarder) as pool,
            Rewarder(settings, connection, pool, contract) as rewarder,
        ):
            rewarder.serve(stopping)
    connection.close()


class Rewarder:
    """Takes as many groups as it has free scoring processes, and serves each in a thread.

    As a context: at the end finishes what it holds, stops its processes and leaves.
    """

    def __init__(
        self, settings: RewarderCommand, connection: Connection, pool: ScoringPool, contract: bytes
    ) -> None:
        name = consumer_name("rewarder")
        self._settings = settings
        self._keys = Keys(settings.run.name)
        self._view = RunView(connection, self._keys)
        self._stream = WorkStream(
            connection, self._keys, self._keys.rollouts, name,
            settings.run.lease_s, settings.run.max_attempts,
        )  # fmt: skip
        self._pool = pool
        self._scorer = CurrentScorer(self._view, pool, name, contract)
        longest_s = settings.rewarder.timeout_s + START_TIMEOUT_S  # of one reward: the pool ends it then
        self._keeper = LeaseKeeper(settings.run.lease_s, lambda: pool.finished, 2 * longest_s)
        self._learner_watch = LearnerWatch(connection, self._keys, settings.run)
        self._threads = ThreadPoolExecutor(settings.rewarder.workers, "score")
        self._busy: set[Future[None]] = set()
        self._reclaim_at = 0.0
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reported = (0, time.monotonic())

    def __enter__(self) -> "Rewarder":
        self._keeper.start()
        log.info("joined the run", run=self._settings.run.name, rewarder=self._stream.consumer)
        return self

    def __exit__(self, *_: object) -> None:
        """1. finish what is held, 2. let no lease be renewed, 3. kill the processes, 4. leave."""
        self._threads.shutdown()
        self._keeper.stop()
        self._pool.close()
        with contextlib.suppress(RunNotReady, ServerUnavailable):  # the run's server may be gone too
            self._stream.leave()
        log.info("left the run", **self._counts)

    def serve(self, stopping: threading.Event) -> None:
        """Score groups until the run has ended or `stopping` is set.

        Raises DeadlineExceeded when the learner is gone.
        """
        while not stopping.is_set() and not self._view.ended():
            try:
                self._start_work()
            except RunNotReady as error:  # the server came back empty: the learner sets it up again
                log.warning("waiting for the learner", cause=str(error))
                stopping.wait(1.0)
                self._scorer.rejoin(self._settings.run.join_timeout_s, stopping)
            self._settle()
            self._report()
            self._learner_watch.check()
        self._settle(wait_for_all=True)

    def _start_work(self) -> None:
        """Give every free process an entry; waits a moment if none is free or nothing is there."""
        free = self._settings.rewarder.workers - len(self._busy)
        if not free:
            wait(self._busy, BLOCK_MS / 1000, FIRST_COMPLETED)
            return
        entries = self._next_entries(free)
        for entry in entries:
            self._keeper.hold(self._stream, entry, on_lost=lambda: None)  # the first to finish wins
        for entry in entries:
            self._start(entry)

    def _next_entries(self, count: int) -> list[Entry]:
        """What others lost comes first: at each half lease, and whenever nothing new was there."""
        now = time.monotonic()
        if now >= self._reclaim_at:
            self._reclaim_at = now + self._settings.run.lease_s / 2
            if entries := self._stream.reclaim(count):
                return entries
        entries = self._stream.take(count, BLOCK_MS)
        if not entries:
            self._reclaim_at = now
        return entries

    def _start(self, entry: Entry) -> None:
        """A last attempt is made alone: if the rewarder dies of it, nothing else is blamed."""
        alone = self._stream.runs_alone(entry) and not entry.doomed
        if alone:
            self._settle(wait_for_all=True)
            if not self._stream.mark_alone(entry):
                self._keeper.release(self._stream, entry)
                return
        self._busy.add(self._threads.submit(self._serve_entry, entry))
        if alone:
            self._settle(wait_for_all=True)

    def _settle(self, wait_for_all: bool = False) -> None:
        """Forget finished work; raises what went wrong beyond a single group."""
        if wait_for_all:
            wait(self._busy)
        done = {future for future in self._busy if future.done()}
        self._busy -= done
        for future in done:
            future.result()

    def _serve_entry(self, entry: Entry) -> None:
        try:
            self._score_entry(entry)
        except RunNotReady:
            log.warning("a group was lost with the server", ticket=entry.ticket)  # issued again
        finally:
            self._keeper.release(self._stream, entry)

    def _score_entry(self, entry: Entry) -> None:
        purpose = entry.ticket.purpose
        if entry.doomed:
            self._count("failed")
            self._stream.bury(entry, purpose, "the rewarder was lost while it scored only this")
            return
        try:
            outcome = self._outcome_of(entry)
        except (ScoringFailed, MalformedMessage) as error:
            self._count("failed")
            reason = f"{error}, says {self._stream.consumer}"
            buried = self._stream.fail(entry, purpose, reason)
            log.warning("not scored", ticket=entry.ticket, reason=str(error), dead=buried)
            return
        if self._stream.handoff(entry, self._keys.outcomes_for(purpose), encode(outcome)):
            self._count("scored" if isinstance(outcome, ScoredGroup) else "filtered")

    def _outcome_of(self, entry: Entry) -> Outcome:
        group = decode(entry.payload, Group)
        if group.ticket.id != entry.ticket:
            raise MalformedMessage(f"the entry of {entry.ticket} holds {group.ticket.id}")
        return self._scorer.for_group(group).score_group(group)

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1

    def _report(self) -> None:
        total, since = self._reported
        now = time.monotonic()
        if now - since >= _REPORT_EVERY_S and self._counts.total() != total:
            self._reported = (self._counts.total(), now)
            log.info("scoring", **self._counts)
