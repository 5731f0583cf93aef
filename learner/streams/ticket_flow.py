"""The learner's side of the streams: tickets out under the credit rule, groups in, versions out.

Redis holds only work in flight. Whatever it lost is put back from the books by `join`: at the start,
and whenever another server process answers than before.
"""

import threading
import time
from collections.abc import Callable

from penstock.common.broker.connection import Connection
from penstock.common.broker.run_view import Place, RunView
from penstock.common.broker.waiting import describe_waiting
from penstock.common.broker.work_stream import BEGINNING
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, NoSignal
from penstock.common.files.lock import holder_name
from penstock.common.log import get_logger
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import ScoredGroup, Weights
from penstock.learner.data.plan import Plan
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.evaluation import Evaluated, Evaluator
from penstock.learner.streams.intake import Intake
from penstock.learner.streams.learner_queue import LearnerQueue

log = get_logger(__name__)

_READ = 64
_POLL_S = 0.01


def ignore_phase(_phase: str) -> None:
    """For a learner that nobody watches."""


class TicketFlow:
    """Keeps tickets going out and groups coming in."""

    def __init__(
        self,
        connection: Connection,
        queue: LearnerQueue,
        commit_log: CommitLog,
        plan: Plan,
        run: RunSettings,
        nonce: str,
        stopping: threading.Event,
        enter_phase: Callable[[str], None] = ignore_phase,
    ) -> None:
        self.intake = Intake(commit_log.ledger, plan.source, plan.vocab_size)
        self.evaluated: list[Evaluated] = []
        self._evaluator = Evaluator(commit_log, queue, plan.source)
        self._connection = connection
        self._queue = queue
        self._view = RunView(connection, queue.keys)
        self._commit_log = commit_log
        self._plan = plan
        self._run = run
        self._nonce = nonce
        self._stopping = stopping
        self._weights: Weights | None = None
        self._position = BEGINNING
        self._restarts = connection.restarts
        self._enter_phase = enter_phase
        self._announced_at = time.monotonic()
        self._deadline = Deadline(run.progress_timeout_s)

    def join(self) -> None:
        """Set the run up on the server and put back what it lacks; may be repeated at any time."""
        self._restarts = self._connection.restarts
        self._queue.claim(self._nonce, holder_name())
        self._queue.publish_contract(encode(self._plan.contract))
        self._queue.set_state("running")
        if (
            self._commit_log.ledger.has_unrecorded
        ):  # what is not in the journal yet must not be withdrawn
            self._commit_log.record("rejoin")
        _, places = self._view.audit()
        self._adopt(places)
        self._withdraw(places)
        self._reissue()
        self._evaluator.issue_missing()
        self._queue.set_totals(self._commit_log.ledger.snapshot()["totals"])
        self._position = BEGINNING
        if self._weights is not None:
            self._queue.announce(self._weights)

    def _adopt(self, places: list[Place]) -> None:
        """Enter tickets that were issued after the journal's last record, and the gaps between."""
        ledger = self._commit_log.ledger
        ahead = {
            place.ticket.number: Version.parse(place.first_version)
            for place in places
            if place.ticket.purpose == "train" and not ledger.was_issued(place.ticket)
        }
        oldest = min(ahead.values(), default=Version(0, 0))
        while ahead and ledger.next_number <= max(ahead):
            ledger.opened(ledger.next_train_ticket(), ahead.get(ledger.next_number - 1, oldest))

    def _withdraw(self, places: list[Place]) -> None:
        """Take from the server what the books know as ended (it lost the acknowledgement)."""
        ledger = self._commit_log.ledger
        ended = [place.ticket for place in places if place.ticket not in ledger.open]
        self._queue.close("train", {name: "stale" for name in ended if name.purpose == "train"})
        self._queue.close("eval", {name: "stale" for name in ended if name.purpose == "eval"})

    def _reissue(self) -> None:
        """Issue every open ticket again; a no-op for those alive.

        Also those whose group is held: the audit counts them as in flight until they are trained.
        """
        self._issue([ticket for ticket in self._commit_log.ledger.open if ticket.purpose == "train"])

    def _issue(self, tickets: list[TicketId]) -> None:
        ledger, source = self._commit_log.ledger, self._plan.source
        version = self._weights.version if self._weights else Version(0, 0)
        batch = [
            (name, first, encode(source.train(name, first, ledger.position(name))))
            for name, first in ((name, ledger.open.get(name, version)) for name in tickets)
        ]
        if batch:
            firsts = self._queue.issue("train", batch)
            for name, first in zip(tickets, firsts, strict=True):
                ledger.opened(name, first)

    def issue_tickets(self, step: int) -> None:
        """Issue new tickets as far as the credit and the rest of the run allow.

        A question to be asked again is written down first: were it issued first, a crash between would
        leave a ticket on the server whose question the resumed learner takes for another.
        """
        ledger, settings = self._commit_log.ledger, self._plan.source.settings
        if ledger.owes_record:
            self._commit_log.record("ask again")
        wanted = min(settings.credit, (self._plan.steps - step) * settings.groups_per_step)
        free = wanted - ledger.train_open
        self._issue([ledger.next_train_ticket() for _ in range(free)])

    def take_groups(self, step: int) -> list[ScoredGroup] | None:
        """Wait for the next batch's groups: fresh, with signal, in order.

        Unblocked by outcomes from the rewarders. Returns None when the learner is told to stop;
        raises DeadlineExceeded when nothing came back for RUN_PROGRESS_TIMEOUT_S, NoSignal when too
        much came back that nothing can be learned from.
        """
        self._deadline.restart()
        while not self._stopping.is_set():
            self.issue_tickets(step)
            self._advance(step)
            if self._evaluator.running:  # once a batch is written down, its version is not asked again
                continue
            try:
                groups = self.intake.form(step)
            except NoSignal:
                self._commit_log.record("no signal")  # or the next start would read the same and end too
                raise
            if groups is not None:
                return groups
        return None

    def _advance(self, step: int) -> None:
        """One round: repair after a server restart, read, evaluate; sleeps if nothing came."""
        self._enter_phase("waiting for groups")
        if self._connection.restarts != self._restarts:
            self.join()
        entries = self._queue.outcomes("train", self._position, _READ)
        for entry in entries:
            self._position = entry.id
            self._commit_log.saw(entry)
            self.intake.fold(entry, step)
        answered, result = self._evaluator.poll()
        if result is not None:
            self.evaluated.append(result)
        if entries or answered:
            self._deadline.restart()
        else:
            self._check_deadline()
            time.sleep(_POLL_S)

    def publish(self, weights: Weights, step: int, evaluate: bool) -> None:
        """Announce a version, once the evaluation of the one before is done; maybe evaluate it."""
        self.finish_evaluation(step)
        self._weights, self._announced_at = weights, time.monotonic()
        self._queue.announce(weights)
        if evaluate:
            self._evaluator.start(weights.version)

    def finish_evaluation(self, step: int) -> None:
        """Wait for the running evaluation, if there is one; same deadline as `take_groups`.

        Issues no training tickets: the version they would count from is about to be replaced.
        """
        self._deadline.restart()
        while self._evaluator.running and not self._stopping.is_set():
            self._advance(step)

    def close_rest(self) -> None:
        """Close what is left over as unused: the run's last record."""
        ledger = self._commit_log.ledger
        for ticket in list(ledger.open):
            ledger.close(ticket, "unused", "the run ended")
        self._commit_log.record("end")

    def release_workers(self) -> None:
        """Let actors and rewarders leave; they look for this. A server that lost it is told again."""
        self._queue.set_state("ended")
        while self._connection.restarts != self._restarts:
            self.join()
            self._queue.set_state("ended")

    def _check_deadline(self) -> None:
        if self._deadline.expired():
            raise DeadlineExceeded(
                f"nothing came back for {self._deadline.waited_s:.0f} s (RUN_PROGRESS_TIMEOUT_S): "
                f"{self._missing()}"
            )
        if self._deadline.report_due():
            log.warning("waiting", waited_s=round(self._deadline.waited_s), what=self._missing())

    def _missing(self) -> str:
        """Who holds the tickets that are waited for, and whether the last weights were taken."""
        held = describe_waiting(self._connection, self._queue.keys, self._run.lease_s)
        newest = self.intake.newest_version
        if self._weights is None or newest == self._weights.version:
            return held
        announced_s = time.monotonic() - self._announced_at
        return (
            f"{held}; version {self._weights.version} was announced {announced_s:.0f} s ago, and no "
            f"group sampled by it has come (the newest is of {newest or 'none'})"
        )
