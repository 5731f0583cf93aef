"""The learner's side of the streams: tickets out within the credit, groups in, versions out.

The queue server holds only work in flight. `join` restores from the ledger what the server lost: at
the start, and whenever the server was restarted.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from penstock.common.broker.work_stream import Entry
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import (
    DeadlineExceeded,
    NoSignal,
    RunNotReady,
    ServerUnavailable,
    ValueTooLarge,
)
from penstock.common.files.lock import holder_name
from penstock.common.log import get_logger, shorten
from penstock.common.monitor.waiting import describe_waiting
from penstock.common.phases import WAITING_FOR_GROUPS, Phases
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import EndState, ScoredGroup, Weights
from penstock.learner.data.plan import Plan
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.evaluation import Evaluator
from penstock.learner.streams.intake import Arrivals, Intake
from penstock.learner.streams.learner_queue import LearnerQueue, OpenPlaces

log = get_logger(__name__)

_POLL_S, _POLL_AHEAD_S = 0.01, 0.05
_SLICE = 1000  # tickets that are closed in one call
_ENGINE_STARTS_S = 60.0  # a wait for the first groups is no warning before


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """The groups of the next batch, and the counts of all outcomes since the batch before."""

    groups: list[ScoredGroup]
    arrivals: Arrivals


class TicketFlow:
    """Issues tickets, takes groups and announces versions. `join` comes before all other calls.

    `queue` and `commit_log` are those of this learner, `plan` has data, contract and steps. Of `run`,
    lease_s and progress_timeout_s count. `nonce` is the random text of the run's folder. Waits end when
    `stopping` is set, and name themselves in `phases`. Each is in a context of `lending`, during which
    actors may use the learner's device. Creating a flow calls nothing.
    """

    def __init__(
        self,
        queue: LearnerQueue,
        commit_log: CommitLog,
        plan: Plan,
        run: RunSettings,
        nonce: str,
        stopping: threading.Event,
        phases: Phases | None = None,
        lending: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._lending = lending
        self._ledger = commit_log.ledger
        self.intake = Intake(self._ledger, plan.source, plan.vocab_size)
        self.evaluator = Evaluator(commit_log, queue, plan.source, self.intake.check)
        self._connection = queue.connection
        self._queue = queue
        self._commit_log = commit_log
        self._plan = plan
        self._run = run
        self._nonce = nonce
        self._stopping = stopping
        self._weights: Weights | None = None
        self._ahead: list[Entry] = []  # outcomes that were read during an Update
        self._restarts = queue.connection.restarts
        self._phases = phases or Phases()
        self._announced_at = time.monotonic()
        self._check_at = 0.0
        self._deadline = Deadline(run.progress_timeout_s)

    def join(self) -> None:
        """Set the run up on the server and restore what the server lacks. Idempotent.

        Claim the run, store contract, state "running" and announced version, write ends that the journal
        lacks to it, open the tickets that the server has since the journal's last record, issue all open
        ones, end others as stale, and correct the totals. The next read begins with the first outcome.
        Raise RunTaken if a newer incarnation has claimed the run, ServerUnavailable or another error of
        Connection.call, DiskFull, MalformedMessage for a wrong text on the server, DataError if a ticket
        is too large or the data set unusable, or ConfigError if a chat template rejects a streamed row.
        """
        self._restarts, self._queue.damaged = self._connection.restarts, False
        self._queue.claim(self._nonce, holder_name())
        self._queue.own()
        self._queue.publish_contract(encode(self._plan.contract))
        self._queue.set_state("running")
        if self._ledger.unrecorded:
            # Closed before its end is in the journal, a ticket would be issued again after a kill.
            self._commit_log.record("rejoin")
        places = self._queue.places()
        self._adopt(places)
        self._withdraw(places)
        # Also tickets whose group the intake holds: these count as in flight until they are trained.
        self._issue([ticket for ticket in self._ledger.open if ticket.purpose == "train"])
        self.evaluator.issue_missing()
        self._queue.set_totals(self._ledger.snapshot()["totals"])
        self._commit_log.read_again()
        if self._weights is not None:
            self._queue.announce(self._weights)

    def _adopt(self, places: OpenPlaces) -> None:
        """Open the tickets of `places` (on the server) that were issued after the journal's last record.

        They have the next numbers without a gap, entries of their own, versions that this run can have,
        and are no more than a learner issues between two records. Others were written by another client.
        Raise MalformedMessage for a text that is no version. Example: the ledger ends at train:4, the
        server has 5, 6 and 999: train:5 and train:6 are opened.
        """
        ledger = self._ledger
        for _ in range(self._most_issued):
            text, exists = places.tickets.get(TicketId.train(ledger.next_number), ("", False))
            if not exists:
                return
            version = Version.parse(text)
            if version.incarnation > self._queue.incarnation or version.step > self._plan.steps:
                return
            ledger.opened(ledger.next_train_ticket(), version)

    @property
    def _most_issued(self) -> int:
        """The most tickets that a learner issues between two records of the journal."""
        settings = self._plan.source.settings
        rounds = (1 + settings.max_resample_times) * settings.max_empty_updates
        return 2 * settings.credit + rounds * settings.groups_per_step

    def _withdraw(self, places: OpenPlaces) -> None:
        """End as stale, on the server, the tickets of `places` that the ledger does not have there.

        They are not open in the ledger, or were first issued at another version. Names that are no
        tickets are ended too. Raise RunTaken, ServerUnavailable or another error of Connection.call.
        """
        ended = [name for name, (first, _) in places.tickets.items() if self._is_other(name, first)]
        stale: EndState = "stale"
        for purpose in ("train", "eval"):
            names = [name for name in ended if name.purpose == purpose]
            for start in range(0, len(names), _SLICE):
                self._queue.close(purpose, dict.fromkeys(names[start : start + _SLICE], stale))
        for start in range(0, len(places.strange), _SLICE):
            self._queue.close("train", dict.fromkeys(places.strange[start : start + _SLICE], stale))

    def _is_other(self, ticket: TicketId, first: str) -> bool:
        """Return whether a ticket on the server is not open in the ledger since the version `first`.

        `first` is the version of first issue that the server has, as text.
        """
        return ticket not in self._ledger.open or str(self._ledger.open[ticket]) != first

    def _check_server(self) -> None:
        """Compare the server with the ledger, at most 4 times per lease; if they differ, join again.

        Log each difference. Another client made it: this loop alone issues and ends tickets. If no
        outcome came for a quarter of the lease, the next read begins with the first outcome. Raise
        ConfigError if the server may evict keys by now, or the errors of `join`, such as RunTaken and
        ServerUnavailable.
        """
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + self._run.lease_s / 4
        self._connection.check_eviction()
        if self._deadline.waited_s > self._run.lease_s / 4:  # ids may have begun again, in a new stream
            self._commit_log.read_again()
        cause = self._difference(self._queue.places())
        if cause and self._connection.restarts == self._restarts:
            self._queue.report(f"Another client changed {cause}: restored from the ledger.")
            self.join()

    def _difference(self, places: OpenPlaces) -> str:
        """Return what in `places`, read from the server, differs from the ledger; "" if nothing does.

        Tickets whose end is not in the journal yet may still be open on the server.
        """
        ledger, there = self._ledger, places.tickets
        expected = Counter(ledger.snapshot()["totals"])
        expected.subtract(state for state, _ in ledger.unrecorded.values())
        if places.strange or any(
            self._is_other(name, there[name][0]) for name in there.keys() - ledger.unrecorded.keys()
        ):
            return f"the open tickets in {self._queue.keys.open}"
        if not all(name in there and there[name][1] for name in ledger.open):
            return "the entries of open tickets"
        return "" if +expected == +Counter(places.totals) else f"the totals in {self._queue.keys.ledger}"

    def _issue(self, tickets: list[TicketId]) -> None:
        """Issue tickets: open ones at the version of their first issue, others at the announced one.

        The ledger opens the others; before any announcement their version is 0.0. Raise DataError if a
        ticket is too large for the server, RunTaken, or another error that `issue_tickets` names.
        """
        ledger, source = self._ledger, self._plan.source
        version = self._weights.version if self._weights else Version(0, 0)
        asked = [
            source.train(name, ledger.open.get(name, version), ledger.position(name)) for name in tickets
        ]
        if asked:
            try:
                items = [(ticket.id, ticket.version, encode(ticket)) for ticket in asked]
                firsts = self._queue.issue("train", items)
            except ValueTooLarge as error:
                raise source.too_large(asked, ledger.position, error) from error
            for one, first in zip(asked, firsts, strict=True):
                # A later version is another client's; the next `_check_server` withdraws it.
                ledger.opened(one.id, min(first, one.version) if self._weights else first)

    def issue_tickets(self, step: int) -> None:
        """Issue new tickets, after `step` Updates, as far as the credit and the rest of the run allow.

        The credit is the most training tickets that may be open. Example: credit 4 and 1 step of 2
        groups left: at most 2 tickets are open. That a question is asked again is journalled before its
        new ticket is issued. After a kill between the two, a resumed learner would otherwise take that
        ticket for another question. A record is written too before more than `_most_issued` tickets are
        issued since the last one, while a batch waits long for one group. Raise DiskFull, DataError if a
        ticket is too large or a streamed data set unusable, ConfigError if a chat template rejects a
        row, MalformedMessage for an empty prompt or a wrong version, RunTaken, ServerUnavailable or
        another error of Connection.call.
        """
        ledger, settings = self._ledger, self._plan.source.settings
        issued = ledger.next_number - self._commit_log.recorded["next_number"]
        if ledger.owes_record or issued + settings.credit > self._most_issued:
            self._commit_log.record("tickets")
        wanted = min(settings.credit, (self._plan.steps - step) * settings.groups_per_step)
        self._issue([ledger.next_train_ticket() for _ in range(wanted - ledger.train_open)])

    def take_groups(self, step: int) -> TakenGroups | None:
        """Issue tickets, wait for evaluation and batch, return the batch; None when asked to stop.

        `step` is the number of Updates made. The groups are in order of arrival; those over
        max_staleness were dropped. Their tickets stay open: the caller ends them. Unblocked by outcomes
        from the rewarders. Raise DeadlineExceeded after RUN_PROGRESS_TIMEOUT_S without any outcome, and
        NoSignal, which the journal then records, when too many groups in a row had nothing to learn
        from. Raise the errors of `join` and `issue_tickets`, such as RunTaken, DiskFull and DataError.
        """
        self._deadline.restart()
        with self._phases.enter(WAITING_FOR_GROUPS), self._lending():
            while not self._stopping.is_set():
                self.issue_tickets(step)
                self._advance()
                if self.evaluator.running:
                    continue  # a resume past this step would not evaluate the version again
                try:
                    groups = self.intake.form(step)
                except NoSignal:
                    # Without this record the next start would read the same outcomes and end again.
                    self._commit_log.record("no signal")
                    raise
                if groups is not None:
                    return TakenGroups(groups, self.intake.take_arrivals())
        return None

    def _advance(self) -> None:
        """Join again after a server restart, read outcomes and answers; sleep 10 ms if none was there.

        Groups go to the intake, answers to the evaluator. Each outcome of an open ticket restarts the
        deadline. Raise DeadlineExceeded after RUN_PROGRESS_TIMEOUT_S without one, and the errors of
        `join`, such as RunTaken, ServerUnavailable, DiskFull and DataError.
        """
        self._phases.poll()
        if self._has_lost_data():
            self.join()
        self._check_server()
        arrived = self._read_outcomes()
        if self.evaluator.poll() or any(arrived):  # entries of other clients are no progress
            self._deadline.restart()
            return
        self._check_deadline()
        if not arrived:
            time.sleep(_POLL_S)

    def _read_outcomes(self) -> list[bool]:
        """Give the outcomes that were read ahead, and at most 64 later ones, to the intake.

        Return for each whether its ticket was open; [] if none was there. Raise RunTaken,
        ServerUnavailable or another error of Connection.call, DataError or ConfigError if a streamed
        data set is unusable.
        """
        ahead, self._ahead = self._ahead, []
        return [self.intake.fold(entry) for entry in [*ahead, *self._commit_log.read("train")]]

    @contextmanager
    def reading_ahead(self, step: int) -> Iterator[None]:
        """Read and decode outcomes in a thread during the block, which must not use this object.

        The block is Update `step` + 1. What arrives meanwhile need not be read after it, and a ticket
        that comes back without a group is replaced at once, so that generation goes on. The outcomes are
        given to the intake by the next wait for groups: what a kill loses is read again. An unavailable
        server ends the reading. Raise RunTaken, another error of Connection.call, or an error of
        `issue_tickets` when the block has ended, unless the block raises.
        """
        ended = threading.Event()
        with ThreadPoolExecutor(1, "read-ahead") as thread:
            reading = thread.submit(self._read_until, ended, step)
            try:
                yield
            finally:
                ended.set()
        reading.result()

    def _read_until(self, ended: threading.Event, step: int) -> None:
        """Read and decode outcomes until `ended` is set, or the server has lost data or is away.

        The next wait for groups deals with that. Replace tickets that came back without a group, as
        `_replace` does. Raise RunTaken, another error of Connection.call, or one of `issue_tickets`.
        """
        came: dict[TicketId, bool] = {}  # whether a ticket's first outcome is a verdict
        while not (ended.is_set() or self._has_lost_data()):
            self._replace(sum(came.values()), step)  # at first those that the wait before has folded
            try:
                entries = self._commit_log.read("train")
            except ServerUnavailable:
                return
            for entry in entries:
                came.setdefault(entry.ticket, self.intake.decode_ahead(entry))
            self._ahead += entries
            if not entries:
                ended.wait(_POLL_AHEAD_S)

    def _replace(self, lost: int, step: int) -> None:
        """Issue tickets in the place of `lost` open ones that end without a group, during an Update.

        After Update `step` + 1 there are as many open tickets without the lost ones as without any
        verdict: the credit less a batch, so that all can still be trained within max_staleness. Fewer
        than twice the credit are issued, which `_adopt` relies on. Raise the errors of `issue_tickets`.
        """
        ledger, settings = self._ledger, self._plan.source.settings
        size = settings.groups_per_step
        wanted = min(settings.credit - size, (self._plan.steps - step - 1) * size)
        live = ledger.train_open - min(lost, settings.credit)
        self._issue([ledger.next_train_ticket() for _ in range(wanted - live)])

    def _has_lost_data(self) -> bool:
        """Return whether the server was restarted, or a stream was found damaged, since `join`."""
        return self._connection.restarts != self._restarts or self._queue.damaged

    def publish(self, weights: Weights, evaluate: bool) -> Weights:
        """Record `weights` in the journal, wait for the running evaluation, then announce them.

        Return them as they were announced. With `evaluate` start their evaluation. A stop ends only the
        wait. No actor can load weights whose hash the journal lacks: otherwise a learner that resumes
        after a kill would refuse the tokens of its predecessor's last version. Raise DeadlineExceeded
        after RUN_PROGRESS_TIMEOUT_S without an outcome, DiskFull, DataError if a ticket is too large,
        RunTaken, ServerUnavailable or another error of Connection.call.
        """
        self._ledger.publish(weights.version, weights.hash)
        self._commit_log.record("version", version=str(weights.version), hash=weights.hash)
        self.finish_evaluation()
        self._weights, self._announced_at = weights, time.monotonic()
        announced = self._queue.announce(weights)
        if evaluate:
            self.evaluator.start(weights.version)
        return announced

    def finish_evaluation(self) -> None:
        """Wait until no evaluation is running, or the learner is asked to stop.

        No new training tickets are issued: their staleness would count from a version that is about to
        be replaced. Outcomes of earlier ones are read. Raise DeadlineExceeded after
        RUN_PROGRESS_TIMEOUT_S without an outcome, or the errors of `join`, such as RunTaken,
        ServerUnavailable and DiskFull.
        """
        self._deadline.restart()
        lending = self._lending if self.evaluator.running else nullcontext
        with self._phases.enter(WAITING_FOR_GROUPS), lending():
            while self.evaluator.running and not self._stopping.is_set():
                self._advance()

    def close_rest(self) -> None:
        """End all open tickets as unused, and write the last record, "end", to the journal.

        Tickets of evaluations are ended too. The server ends them after the journal. Raise DiskFull,
        RunTaken, ServerUnavailable or another error of Connection.call.
        """
        for ticket in list(self._ledger.open):
            self._ledger.close(ticket, "unused", "the run ended")
        self._commit_log.record("end")

    def release_workers(self) -> None:
        """Set the run's state to "ended", at which actors and rewarders leave.

        If the server was restarted, `join` and set the lost state again. Raise the errors of `join`,
        such as RunTaken, ServerUnavailable and DiskFull.
        """
        self._queue.set_state("ended")
        while self._connection.restarts != self._restarts:
            self.join()
            self._queue.set_state("ended")

    def _check_deadline(self) -> None:
        """Log a warning every 30 s of the wait, with what `_missing` returns.

        Raise DeadlineExceeded after RUN_PROGRESS_TIMEOUT_S without an outcome.
        """
        waited_s = f"{self._deadline.waited_s:.0f} s"
        if self._deadline.expired():
            missing = f"{self._missing()}. Start what is missing, or raise RUN_PROGRESS_TIMEOUT_S"
            raise DeadlineExceeded(f"no results for {waited_s}: {missing}")
        if self._deadline.report_due():
            if self.intake.newest_version is None and self._deadline.waited_s < _ENGINE_STARTS_S:
                log.info(f"Waiting for the first groups since {waited_s}: vLLM takes a minute to start.")
            else:
                log.warning(shorten(f"Waiting for groups since {waited_s}: {self._missing()}."))

    def _missing(self) -> str:
        """Return, for people, who holds tickets, and whether the announced weights lack results.

        A key of a wrong type on the server, or a missing one, is named instead of the holders. Raise
        ServerUnavailable or another error of Connection.call.
        """
        try:
            held = describe_waiting(self._connection, self._queue.keys, self._run.lease_s)
        except RunNotReady as error:
            held = str(error)
        newest = self.intake.newest_version
        if self._weights is None or newest == self._weights.version:
            return held
        published_s = time.monotonic() - self._announced_at
        return (
            f"{held}; no results from weights {self._weights.version} yet "
            f"(published {published_s:.0f} s ago, newest: {newest or 'none'})"
        )
