"""A learner's run under the users of `queues acl`, with an actor and a rewarder in this process."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.settings import RunSettings
from penstock.common.errors import MalformedMessage, RunNotReady
from penstock.common.phases import Phases
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Group, ScoredGroup, Ticket
from penstock.learner.streams.ticket_flow import TicketFlow
from tests.helpers import AclUsers
from tests.learner.builders import make_group
from tests.learner.test_flow import Bench

RUN = "injected"
KEYS = Keys(RUN)
LEASE_S = 0.05

Stage = Literal["claimed", "issued", "held", "generated", "scoring", "scored", "trained"]
"""When a write is made: the tickets lie on their streams, an actor holds them, their groups lie on
`rollouts`, the rewarder holds these, the answers lie on `scored`, a batch was trained."""


def honest(ticket: Ticket) -> ScoredGroup:
    """The answer of the run's own workers."""
    return make_group(ticket, rewards=(1.0,) if ticket.purpose == "eval" else (1.0, 0.0))


class Workers:
    """An actor and a rewarder, each with its user; `work` does all that there is to do."""

    def __init__(self, users: AclUsers) -> None:
        self._asked = [
            WorkStream(users.actor, KEYS, stream, "actor", LEASE_S, 3)
            for stream in (KEYS.tickets, KEYS.eval_tickets)
        ]
        self._rollouts = WorkStream(users.rewarder, KEYS, KEYS.rollouts, "rewarder", LEASE_S, 3)
        self.reclaims = False
        self._held: list[tuple[WorkStream, Entry]] = []
        self._scoring: list[Entry] = []

    def work(self) -> None:
        """Take, answer and score what lies on the streams, and what lost consumers held.

        As the roles do, give up work for which a key is unusable: the learner restores both.
        """
        for turn in (self.take_tickets, self.generate, self.take_groups, self.score):
            with contextlib.suppress(RunNotReady):
                turn()

    def bring_to(self, stage: Stage) -> None:
        """Work up to a stage."""
        steps = {
            "held": self.take_tickets, "generated": self.generate,
            "scoring": self.take_groups, "scored": self.score,
        }  # fmt: skip
        for name in get_args(Stage):
            if name in steps:
                steps[name]()
            if name == stage:
                return

    def take_tickets(self) -> None:
        """Hold all tickets."""
        for stream in self._asked:
            self._held += [(stream, entry) for entry in self._take(stream)]

    def generate(self) -> None:
        """Hand off a group for each ticket held."""
        while self._held:
            stream, entry = self._held.pop()
            try:
                ticket = decode(entry.payload, Ticket)
            except MalformedMessage as error:
                stream.fail(entry, entry.ticket.purpose, str(error))
            else:
                stream.handoff(entry, KEYS.rollouts, encode(honest(ticket).group))

    def take_groups(self) -> None:
        """Hold all groups."""
        self._scoring += self._take(self._rollouts)

    def score(self) -> None:
        """Hand off a scored group for each group held."""
        while self._scoring:
            entry = self._scoring.pop()
            purpose = entry.ticket.purpose
            try:
                group = decode(entry.payload, Group)
            except MalformedMessage as error:
                self._rollouts.fail(entry, purpose, str(error))
                continue
            rewards: Any = {"accuracy": (1.0, 0.0)[: len(group.rollouts)]}
            made = ScoredGroup(group, rewards, ("x",) * len(group.rollouts), "rewarder")
            self._rollouts.handoff(entry, KEYS.outcomes_for(purpose), encode(made))

    def _take(self, stream: WorkStream) -> list[Entry]:
        """Entries to work on; those that ran alone when their lease was lost are buried."""
        found = stream.take(100)
        if self.reclaims:
            found += stream.reclaim(100)
        for entry in found:
            if entry.doomed:
                stream.bury(entry, entry.ticket.purpose, "lost its lease while running alone")
        return [entry for entry in found if not entry.doomed]


class Turns(Phases):
    """Phases whose polls give others a turn: the workers each time, the heartbeat each fourth time."""

    def __init__(self, run: InjectedRun) -> None:
        super().__init__()
        self._run = run

    def poll(self) -> None:
        """Note progress, and let the others go on."""
        super().poll()
        self._run.workers.reclaims = rarely = self.progress % 4 == 0
        self._run.workers.work()
        if rarely:
            self._run.beat()


class InjectedRun(Bench):
    """A learner with its own user, and its workers with theirs."""

    def __init__(self, folder: Path, users: AclUsers) -> None:
        super().__init__(folder, users.learner, KEYS)
        self.workers = Workers(users)
        self.phases = Turns(self)
        for ticket in self.ledger.eval_open():  # as learner/loop.py does
            self.ledger.close(ticket, "stale", "the learner that asked was restarted")
        run = RunSettings(name=RUN, progress_timeout_s=120)
        self.flow = TicketFlow(
            self.queue, self.commit_log, self.plan, run, "nonce", self.stopping, self.phases
        )
        self.flow.join()
        self.payloads: dict[TicketId, bytes] = {}
        self.refused: Counter[str] = Counter()

    def bring_to(self, stage: Stage) -> None:
        """Let the run come as far as a stage of its first step."""
        if stage == "claimed":
            return
        self.publish(0, evaluate=True)
        self.flow.issue_tickets(0)
        if stage == "trained":
            self.train(0)
            self.publish(1)
            self.flow.issue_tickets(1)
        else:
            self.workers.bring_to(stage)

    def train(self, step: int) -> list[TicketId]:
        """Train a step, and keep what was trained."""
        names: list[TicketId] = super().train(step)
        self.payloads |= dict(zip(names, map(encode, self.taken.groups), strict=True))
        self.refused += self.taken.arrivals.refused
        return names

    def settle(self) -> None:
        """Wait for what fails three times before it is dead, and record it."""
        for _ in range(4):
            self.flow._advance()
        self.commit_log.record("settled")

    def beat(self) -> None:
        """What the learner's heartbeat does four times per lease; its main loop then does its part."""
        self.queue.beat(60.0, self.phases.name)
        self.queue.restore()
        self.flow._check_at = 0.0

    def ask(self, name: TicketId) -> Ticket:
        """A ticket of step 0 as the learner issues it."""
        if name.purpose == "eval":
            return self.plan.source.evaluation(Version(1, 0), name.number)
        return self.plan.source.train(name, Version(1, 0))

    def known(self) -> dict[str, str]:
        """The run's keys by name, and the place, entry and version of train:2."""
        place = self.connection.execute("HGET", KEYS.open, "train:2") or b"||"
        _, entry, version = place.decode().split("|")
        return {
            **vars(KEYS),
            "place": place.decode(),
            "entry": entry,
            "version": version,
            "server": self.connection.server_id,
        }
