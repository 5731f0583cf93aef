"""The rewarder's loop: take groups from `rollouts`, score them, hand their outcomes to the learner.

Waits for: the learner's contract (RUN_JOIN_TIMEOUT_S), then a free scoring process and a group.
Unblocked by: actors handing off groups, and expired leases of lost rewarders.
Produces: a ScoredGroup or a Verdict per group on `scored` (training) or `evaluated` (evaluation).
Ends when: the run has ended or a signal came, after the groups in progress are scored.
"""

import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from penstock.common.broker.connection import BLOCK_MS, Connection
from penstock.common.broker.costs import CostReport, Load
from penstock.common.broker.keys import Keys
from penstock.common.broker.lease_keeper import LeaseKeeper
from penstock.common.broker.lease_watch import LOOKS_PER_LEASE
from penstock.common.broker.process_status import StatusWriter
from penstock.common.broker.run_view import RunView, wait_for_another_contract, wait_for_run
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.role_command import RewarderCommand
from penstock.common.deadline import GracePeriod
from penstock.common.errors import ContractMismatch, MalformedMessage, RunNotReady, ServerUnavailable
from penstock.common.log import get_logger
from penstock.common.monitor.learner_watch import LearnerWatch
from penstock.common.role import connect, consumer_name
from penstock.common.sandbox.starter import START_TIMEOUT_S
from penstock.common.transfer.model_folder import FetchStopped, ModelFetcher
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import Group, Outcome, ScoredGroup
from penstock.rewarders.failures import Failures
from penstock.rewarders.judges import longest_call_s
from penstock.rewarders.scoring import CurrentScorer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

_REPORT_EVERY_S = 10.0
_GRACE_S = 30.0  # for which one that is to stop waits for a server, to hand on what it has scored
_LOOK_EVERY_S = 0.2
"""To ask the server for the run's end with each group took a third of this process's time."""

log = get_logger(__name__)


def run(settings: RewarderCommand, stopping: threading.Event) -> None:
    """Work as a rewarder until the run ends or `stopping` is set, and finish the groups in progress.

    Wait up to RUN_JOIN_TIMEOUT_S for the learner's contract, if the run has ended for a learner that
    goes on with it, and start the scoring processes, which are killed at the end. If the server was
    emptied, wait as long for the learner to set the run up again, and go on. Without an error the
    connection is closed. Raise ConfigError if the server or a setting cannot be used, SandboxFailed if a
    scoring process does not start, ServerUnavailable, DeadlineExceeded without a learner,
    ContractMismatch or MalformedMessage for an unusable contract.
    """
    connection = connect(settings.redis_url, settings.run, stopping)
    view = RunView(connection, Keys(settings.run.name))
    contract = wait_for_run(view, settings.run.join_timeout_s, stopping)
    while contract is not None:
        contract = _serve(settings, connection, view, contract, stopping)
    connection.close()


def _serve(
    settings: RewarderCommand,
    connection: Connection,
    view: RunView,
    contract: bytes,
    stopping: threading.Event,
) -> bytes | None:
    """Serve the contract until the run ends or `stopping` is set, and return None.

    If this process cannot serve it, and a learner publishes another one, return that. Raise as `run`.
    """
    try:
        with (
            contextlib.suppress(FetchStopped),
            ScoringPool(settings.rewarder) as pool,
            Rewarder(settings, connection, pool, contract, stopping) as rewarder,
        ):
            rewarder.serve(stopping)
        return None
    except ContractMismatch as error:
        log.warning(
            "This contract cannot be served; an earlier learner may have left it.", cause=str(error)
        )
        other = wait_for_another_contract(view, contract, settings.run.join_timeout_s, stopping)
        if other is None and not stopping.is_set():
            raise
        return other


class Rewarder:
    """Takes as many groups as there are free scoring processes, and scores each group in a thread.

    The RUN_* and REWARDER_* parts of `settings` count. `connection` is to the queue server, `pool`
    computes the rewards, `contract` is the run's, encoded. Use the rewarder as a context, which closes
    the pool. Creating it loads each reward in the pool, and takes no group yet. Raise ContractMismatch,
    ConfigError or SandboxFailed if this process cannot serve the contract.
    """

    def __init__(
        self,
        settings: RewarderCommand,
        connection: Connection,
        pool: ScoringPool,
        contract: bytes,
        stopping: threading.Event,
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
        fetcher = ModelFetcher(self._view, settings.run, stopping)
        self._scorer = CurrentScorer(self._view, pool, name, contract, fetcher)
        longest_s = START_TIMEOUT_S + max(  # of one reward: the pool ends it then
            settings.rewarder.timeout_s,
            settings.rewarder.reward_model_timeout_s,
            longest_call_s(settings.rewarder),
        )
        self._keeper = LeaseKeeper(settings.run.lease_s, lambda: pool.finished, 2 * longest_s)
        self._learner_watch = LearnerWatch(connection, self._keys, settings.run)
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        status = StatusWriter(
            connection, self._keys.processes, name, "rewarder", lambda: ("", self._counts.total())
        )
        self._load = Load(settings.rewarder.workers)
        self._costs = CostReport(connection, self._keys.costs, "rewarder", status, self._load)
        self._threads = ThreadPoolExecutor(settings.rewarder.workers, "score")
        self._busy: set[Future[None]] = set()
        connection.stopping = GracePeriod(stopping, self._busy, _GRACE_S)
        self._reclaim_at = self._look_at = 0.0
        self._late = False
        self._failures = Failures()
        self._reported = (0, time.monotonic())

    def __enter__(self) -> "Rewarder":
        """Start the thread that renews the leases of held groups, log the joining, and return self."""
        self._keeper.start()
        log.info(f"{self._stream.consumer} joined run {self._settings.run.name}.")
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the groups in progress, stop renewing leases, kill the scoring processes, and leave.

        To leave is to remove the consumer from the stream on the server, unless it still holds groups or
        the server is lost. Then the counts are logged. An error of the `with` block, `_`, goes on. Raise
        ConfigError if the server refuses the removal.
        """
        self._threads.shutdown()
        self._keeper.stop()
        self._pool.close()
        with contextlib.suppress(RunNotReady, ServerUnavailable):  # the server may be gone too
            self._costs.leave()
            self._stream.leave()
        log.info(f"{self._stream.consumer} left run {self._settings.run.name}: {self._progress()}.")

    def serve(self, stopping: threading.Event) -> None:
        """Score groups until the run has ended or `stopping` is set; then wait for those in progress.

        The counts are logged every 10 s. If the server was emptied, log that, and wait up to
        RUN_JOIN_TIMEOUT_S for the learner to set the run up again. Raise DeadlineExceeded if the learner
        is gone, ServerUnavailable if the server is, ContractMismatch or ConfigError for a new contract
        that cannot be served, SandboxFailed, or MalformedMessage for a contract or ticket id.
        """
        while not stopping.is_set() and not self._has_ended():
            try:
                self._keeper.check()
                self._learner_watch.check()
                self._start_work()
            except RunNotReady as error:  # the server came back empty: the learner sets it up again
                log.warning("Waiting for the learner to set up the run again.", cause=str(error))
                stopping.wait(1.0)
                with contextlib.suppress(RunNotReady):  # the contract changed meanwhile: once more
                    self._scorer.rejoin(self._settings.run.join_timeout_s, stopping)
            self._settle()
            self._report()
            self._costs.note("scoring" if self._busy else "waiting for groups")
            self._costs.send_if_due()
        self._settle(wait_for_all=True)

    def _has_ended(self) -> bool:
        """Return whether the learner has ended the run, as the server says; False between two questions.

        The server is asked every 0.2 s. Raise ServerUnavailable or another error of Connection.execute.
        """
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        return self._view.ended()

    def _start_work(self) -> None:
        """Take at most one group per free scoring process, and start a thread that scores each group.

        If no process is free, wait at most 1 s for one, and take nothing: only look, twelve times a
        lease, which leases of others expire. Else wait at most 1 s for
        groups. Their leases are renewed from now on. A group that runs alone, see `_start`, is waited
        for without limit. Raise RunNotReady or ServerUnavailable if the server is lost, and the error of
        an earlier thread.
        """
        free = self._settings.rewarder.workers - len(self._busy)
        if free <= 0:  # after a lost reply there may be more groups than processes
            look_every_s = self._settings.run.lease_s / LOOKS_PER_LEASE
            if time.monotonic() >= self._reclaim_at:
                self._reclaim_at = time.monotonic() + look_every_s
                self._late = self._stream.has_expired()
            wait(self._busy, min(BLOCK_MS / 1000, look_every_s), FIRST_COMPLETED)
            return
        entries = [
            entry for entry in self._next_entries(free) if not self._keeper.holds(self._stream, entry)
        ]
        for entry in entries:
            self._keeper.hold(self._stream, entry, on_lost=lambda: None)  # the first outcome counts
        for entry in entries:
            self._start(entry)

    def _next_entries(self, count: int) -> list[Entry]:
        """Take up to `count` groups from the stream; [] if none comes within 1 s.

        Groups whose lease expired, such as those of a killed rewarder, are looked for twelve times a
        lease, and after each call that found nothing. If there are any, they alone are returned. Raise
        RunNotReady or ServerUnavailable if the server is lost.
        """
        now = time.monotonic()
        if self._late or now >= self._reclaim_at:
            self._late = False
            self._reclaim_at = now + self._settings.run.lease_s / LOOKS_PER_LEASE
            if entries := self._stream.reclaim(count):
                return entries
        entries = self._stream.take(count, BLOCK_MS)
        if not entries:
            self._reclaim_at = now
        return entries

    def _start(self, entry: Entry) -> None:
        """Start a thread that scores the group of `entry`, and add it to `_busy`.

        The last attempt of a ticket that failed before runs alone: wait until all other threads have
        ended, mark the entry on the server, start the thread, and wait for its end. If this process dies
        meanwhile, the entry is `doomed`: known to be the cause. A doomed entry waits for no thread. If
        the lease of the group was lost before the mark, no thread is started and the lease is renewed no
        longer. Raise the error of a thread that ended, or RunNotReady or ServerUnavailable.
        """
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
        """Remove ended threads from `_busy`, and raise the error of one of them, if any has one.

        `wait_for_all`: wait first, without limit, until all threads have ended. A thread has an error
        only if more than its own group is concerned, such as a lost server.
        """
        if wait_for_all:
            wait(self._busy)
        done = {future for future in self._busy if future.done()}
        self._busy -= done
        for future in done:
            future.result()

    def _serve_entry(self, entry: Entry) -> None:
        """Score the group of `entry`, hand on the outcome, and in any case stop renewing its lease.

        If the server was emptied meanwhile, log that the ticket is issued again. Raise ContractMismatch
        or ConfigError for a new contract that cannot be served, SandboxFailed, or ServerUnavailable.
        """
        try:
            with self._load.use():
                self._score_entry(entry)
        except RunNotReady:
            log.warning(f"Ticket {entry.ticket} was lost with the queue server and is issued again.")
        finally:
            self._keeper.release(self._stream, entry)

    def _score_entry(self, entry: Entry) -> None:
        """Score the group of `entry`, hand its outcome to the learner, and count it: scored or filtered.

        Nothing is counted if the ticket has ended meanwhile. A group that cannot be scored counts as
        failed, is logged, and put back or, after its last attempt, dead. A `doomed` entry, whose last
        attempt ended its rewarder, counts as failed and is dead, unscored. Raise ContractMismatch or
        ConfigError for a new contract, SandboxFailed, RunNotReady, ServerUnavailable.
        """
        purpose = entry.ticket.purpose
        if entry.doomed:
            self._count("failed")
            self._stream.bury(entry, purpose, "the rewarder was lost while it scored only this")
            return
        try:
            outcome = self._outcome_of(entry)
        except (ScoringFailed, MalformedMessage) as error:
            self._keeper.finish(self._stream, entry)
            self._fail(entry, str(error))
            return
        self._keeper.finish(self._stream, entry)
        if self._stream.handoff(entry, self._keys.outcomes_for(purpose), encode(outcome)):
            self._count("scored" if isinstance(outcome, ScoredGroup) else "filtered")

    def _fail(self, entry: Entry, reason: str) -> None:
        """Put back the group of `entry`, or after its last attempt make its ticket dead, with `reason`.

        Count the failure and log it. The reason that is stored for a dead ticket names this rewarder
        too. Raise RunNotReady, ServerUnavailable or another error of Connection.call.
        """
        self._count("failed")
        reported = f"{reason} (reported by {self._stream.consumer})"
        fate = "dead" if self._stream.fail(entry, entry.ticket.purpose, reported) else "retried"
        self._failures.tell(reason, f"the group of {entry.ticket} was not scored and is {fate}")

    def _outcome_of(self, entry: Entry) -> Outcome:
        """Decode and score the group of `entry`; return a ScoredGroup, or a Verdict if it is filtered.

        Raise ScoringFailed if the group cannot be scored, MalformedMessage if it cannot be decoded or is
        another ticket's. Raise ContractMismatch or ConfigError if this process cannot serve a new
        contract, SandboxFailed if no scoring process starts, RunNotReady or ServerUnavailable.
        """
        group = decode(entry.payload, Group)
        if group.ticket.id != entry.ticket:
            found = f"the entry of ticket {entry.ticket} holds a group of {group.ticket.id}"
            raise MalformedMessage(
                f"{found}, which no actor sends: see who else writes to the queue server"
            )
        return self._scorer.for_group(group).score_group(group)

    def _count(self, what: str) -> None:
        """Add 1 to the count of `what`: scored, filtered or failed. Any thread may call this."""
        with self._counting:
            self._counts[what] += 1

    def _progress(self) -> str:
        """Return the counts, such as "7 groups scored, 2 groups filtered, 0 groups failed"."""
        names = ("scored", "filtered", "failed")
        return ", ".join(f"{self._counts[name]} groups {name}" for name in names)

    def _report(self) -> None:
        """Log the counts since the begin, and the groups per second since the last such line.

        There is such a line at most every 10 s, and only if a count has changed. Groups that failed or
        were filtered count in the speed too.
        """
        before, since = self._reported
        total, now = self._counts.total(), time.monotonic()
        if now - since >= _REPORT_EVERY_S and total != before:
            self._reported = (total, now)
            speed = (total - before) / (now - since)
            log.info(f"Scoring {speed:.1f} groups/s: {self._progress()} so far.")
