"""The learner's real parts for tickets and books, without a policy and on a journal in memory."""

from __future__ import annotations

import threading
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import Entry
from penstock.common.config.settings import RunSettings
from penstock.common.journal.claims import Position
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import EndState, Purpose, Version, Weights
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.ticket_flow import TicketFlow
from tests.common.protocol_model import Killed, is_train, number_of
from tests.learner.builders import make_plan, make_settings

PLAN = make_plan(make_settings(groups_per_step=1, max_staleness=999), steps=1000, eval_questions=2)


class MemoryJournal:
    """A journal whose records outlive the learner, not the test; kills the learner on demand."""

    def __init__(self, incarnation: int, ledgers: list[dict]) -> None:
        self.incarnation = incarnation
        self.ledgers = ledgers
        self.kills = False

    def append(self, kind: str, **fields: Any) -> Position:
        self.ledgers.append(fields["ledger"])
        if self.kills:
            raise Killed
        return Position(self.incarnation, len(self.ledgers))


class Learner:
    """Issues, reads, decides as it is told, writes down, repairs."""

    def __init__(
        self, connection: Connection, keys: Keys, incarnation: int, ledgers: list[dict]
    ) -> None:
        self.incarnation = incarnation
        self.queue = LearnerQueue(connection, keys, incarnation)
        self.ledger = Ledger()
        if ledgers:
            self.ledger.restore(ledgers[-1])
        self.journal = MemoryJournal(incarnation, ledgers)
        self.commit_log = CommitLog(self.ledger, self.journal, self.queue)  # type: ignore[arg-type]
        self.flow = TicketFlow(
            self.queue, self.commit_log, PLAN, RunSettings(name="x"), "nonce", threading.Event()
        )

    def issue(self, count: int) -> None:
        """As many new tickets: credit is what the rest of the run needs."""
        self.flow.issue_tickets(PLAN.steps - self.ledger.train_open - count)

    def announce(self, version: str) -> None:
        self.flow.publish(Weights(Version.parse(version), "folder", "hash", ""), evaluate=False)

    def evaluate(self, version: str) -> None:
        """As the Evaluator starts."""
        tickets = [
            TicketId.evaluation(Version.parse(version), index)
            for index in range(len(PLAN.source.eval_questions))
        ]
        for ticket in tickets:
            self.ledger.opened(ticket, Version.parse(version))
        self.commit_log.record("evaluation")
        self._issue_evals(tickets)

    def join(self) -> None:
        """Repair; the evaluation's tickets are issued again by the Evaluator, which has its own test."""
        self.flow.join()
        if evals := list(self.ledger.eval_open()):
            self._issue_evals(evals)
            self.queue.set_totals(self.ledger.snapshot()["totals"])

    def read(self, purpose: Purpose, count: int) -> list[Entry]:
        return self.commit_log.read(purpose, count)

    def end(self, ticket: str, state: EndState) -> None:
        self.ledger.close(TicketId(ticket), state)

    def _issue_evals(self, tickets: list[TicketId]) -> None:
        versions = [self.ledger.open[ticket] for ticket in tickets]
        batch = [(name, v, ask(name, str(v))) for name, v in zip(tickets, versions, strict=True)]
        self.queue.issue("eval", batch)


def ask(ticket: str, version: str) -> bytes:
    """What a ticket holds: it follows from its id and version."""
    first = Version.parse(version)
    if is_train(ticket):
        return encode(PLAN.source.train(ticket, first, number_of(ticket)))
    return encode(PLAN.source.evaluation(first, int(ticket.rpartition(":")[2])))
