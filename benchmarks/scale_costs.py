"""What each kind of call costs the queue server: processor time of its main thread, by its INFO cpu.

The calls are the product's. They are made one after the other over many connections, which takes the
server more time per call than several at once would. `Bench` measures, `Costs` has what was found.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import intake
from benchmarks.intake import GENERATIONS, make_group
from benchmarks.scale_fleet import LEASE_S, RENEW_S, ServerMeter
from penstock.actors.ticket_worker import _BLOCK_MS, _IDLE_S, _WATCH_S
from penstock.common.broker.connection import Connection
from penstock.common.broker.costs import _SEND_S, CostReport
from penstock.common.broker.keys import Keys
from penstock.common.broker.lease_watch import LOOKS_PER_LEASE
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.process_status import StatusWriter
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import BEGINNING, WorkStream
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Sampling, Ticket, Weights
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.ticket_flow import _POLL_S

COMPLETIONS = 256
"""That an actor samples at a time: an assumption."""
HELD = COMPLETIONS // GENERATIONS
"""Tickets that an actor holds then."""
CONNECTIONS = 1000
WEIGHTS_S, LOOKS_S = 1 / _IDLE_S, LOOKS_PER_LEASE / LEASE_S
"""How often per second an actor looks for new weights, and at the leases of tickets of each purpose."""
WATCH_S, REPORTS_S, TICKETS_S = 1 / _WATCH_S, 1 / _SEND_S, 1 / (_IDLE_S + _BLOCK_MS / 1000)
"""How often it asks for the state of the run, tells of itself, and looks for tickets if it has none."""
OUTCOMES_S = 1 / _POLL_S
"""How often the learner looks for results while it waits."""
MOST_ROWS = 1000
"""Held tickets that a look at the leases returns at most."""
_CALLS, _GROUPS, _SLEEP_S = 2000, 256, 0.01
_ATTEMPTS, _WAIT_S, _INTAKE_TOKENS = 3, 60.0, 1 << 15
_NUMBERS = count()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupCost:
    """A group's way from ticket to trained: server's time, bytes in and out, the learner's time."""

    server_us: float
    bytes_in: float
    bytes_out: float
    learner_us: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of the server's main thread per call, and `idle_us` per second without any.

    `groups` is by tokens of a completion. A look at leases costs `look_us`, and `row_us` per held ticket
    that it returns; a renewal `renew_us`, and `renewed_us` per lease. `take_us` and `block_us` are takes
    that find nothing, without and with a wait. `weights_us` is a look at the announced version,
    `outcomes_us` one of the learner for results. `watch_us` and `report_us` are what an actor asks once
    a second, and tells every two. A call that wakes the server costs `wake_us` more: one that is full
    does not sleep.
    """

    groups: dict[int, GroupCost]
    idle_us: float
    renew_us: float
    renewed_us: float
    look_us: float
    row_us: float
    take_us: float
    block_us: float
    weights_us: float
    outcomes_us: float
    watch_us: float
    report_us: float
    wake_us: float

    def per_actor(self, actors: int, held: int) -> dict[str, float]:
        """By kind of call, microseconds per second and actor, of `actors` that hold `held` tickets."""
        rows = min(MOST_ROWS, actors * held)
        return {
            "look for new weights": self.weights_us * WEIGHTS_S,
            "look at leases": 2 * self.look_us * LOOKS_S,  # of both purposes
            "rows of held tickets": rows * self.row_us * LOOKS_S,  # evaluation's are few
            "contract, state, heartbeat": self.watch_us * WATCH_S,
            "costs and status": self.report_us * REPORTS_S,
            "renewals": (self.renew_us + held * self.renewed_us) / RENEW_S,
        }

    @property
    def unused_us(self) -> float:
        """Per second and actor, the looks for tickets of an actor for which there are none."""
        return (self.take_us + self.block_us) * TICKETS_S


class Bench:
    """A run with so many actors' connections, whose calls are measured one kind after the other."""

    def __init__(self, url: str, actors: int, stack: ExitStack) -> None:
        self._keys, self.actors = Keys(f"costs-{next(_NUMBERS)}"), actors
        self._connections = [
            stack.enter_context(closing(Connection(url, _WAIT_S, _WAIT_S))) for _ in range(actors)
        ]
        self._meter = ServerMeter(self._connections[0])
        self._queue = LearnerQueue(self._connections[0], self._keys, incarnation=1)
        self._queue.claim("nonce", "benchmark")
        self._queue.publish_contract(b"contract")
        self._queue.announce(Weights(Version(1, 0), "folder", "0" * 64, ""))
        self._queue.set_state("running")
        keys = self._keys
        self._tickets, self._evals, self._rollouts = (
            [
                WorkStream(one, keys, stream, f"actor-{number}", LEASE_S, _ATTEMPTS)
                for number, one in enumerate(self._connections)
            ]
            for stream in keys.work_streams
        )
        self._views = [RunView(one, keys) for one in self._connections]
        self._issued = 0
        self._held: list[list[str]] = []
        self._idle_us = 0.0
        self._idle_us = self._per_call(lambda _: time.sleep(1.0), 2)

    def _per_call(self, call: Callable[[int], object], calls: int) -> float:
        """The server's microseconds per call, without those that it takes when nobody calls.

        `call` gets the number of the actor whose turn it is.
        """
        before, began = self._meter.seconds(), time.monotonic()
        for number in range(calls):
            call(number % self.actors)
        took_us = 1e6 * (self._meter.seconds() - before)
        return (took_us - self._idle_us * (time.monotonic() - began)) / calls

    def measure(self, calls: int, groups: int, learner_us: Mapping[int, float]) -> Costs:
        """Measure each kind of call; `learner_us` has the learner's time per group, by its tokens."""
        found = {tokens: self._group_cost(groups, tokens, us) for tokens, us in learner_us.items()}
        take_us = self._per_call(lambda one: self._evals[one].take(1), calls)
        block_us = self._per_call(lambda one: self._tickets[one].take(1, block_ms=1), calls // 4)
        outcomes_us = self._per_call(lambda _: self._queue.outcomes("train", BEGINNING, 64), calls)
        look_us = self._per_call(self._look, calls)
        weights_us = self._per_call(lambda one: self._views[one].weights(), calls)
        slow_us = self._per_call(self._poll_slowly, calls // 8)
        watch_us = self._per_call(self._watch, calls)
        report_us = self._per_call(self._report, calls // 4)
        self._issue(MOST_ROWS, encode(make_ticket(0)))
        for stream in self._tickets[: MOST_ROWS // HELD]:
            self._held.append([one.id for one in stream.take(HELD)])
        rows = sum(map(len, self._held))
        row_us = (self._per_call(self._look, calls // 4) - look_us) / rows
        one_us, all_us = (self._per_call(self._renewal(most), calls) for most in (1, HELD))
        renewed_us = (all_us - one_us) / (HELD - 1)
        return Costs(
            found, self._idle_us, one_us - renewed_us, renewed_us, look_us, row_us, take_us, block_us,
            weights_us, outcomes_us, watch_us, report_us, slow_us - weights_us,
        )  # fmt: skip

    def _poll_slowly(self, actor: int) -> None:
        """Look for new weights when the server has slept for a while."""
        time.sleep(_SLEEP_S)
        self._views[actor].weights()

    def _look(self, actor: int) -> None:
        """Look which leases have expired."""
        self._tickets[actor].has_expired()

    def _renewal(self, most: int) -> Callable[[int], object]:
        """A call that renews so many leases of one of the actors that hold tickets."""

        def renew(number: int) -> None:
            """Renew them. All are held."""
            holder = number % len(self._held)
            assert all(self._tickets[holder].renew(self._held[holder][:most]))

        return renew

    def _issue(self, groups: int, payload: bytes) -> None:
        """Issue so many tickets."""
        first, self._issued = self._issued, self._issued + groups
        names = [TicketId.train(number) for number in range(first, self._issued)]
        self._queue.issue("train", [(name, Version(1, 0), payload) for name in names])

    def _group_cost(self, groups: int, tokens: int, learner_us: float) -> GroupCost:
        """Take `groups` tickets from issue to trained; groups go one by one, as from slow actors."""
        ticket = make_ticket(0)
        scored = make_group(ticket, tokens, np.random.default_rng(1))
        payloads = encode(scored.group), encode(scored)
        before = self._meter.transferred()

        def move(_: int) -> None:
            """All groups, from issue to trained."""
            self._issue(groups, encode(ticket))
            for number in range(groups):
                self._pass_on(number % self.actors, payloads)
            self._train(groups)

        took_us = self._per_call(move, 1)
        moved = [now - then for now, then in zip(self._meter.transferred(), before, strict=True)]
        return GroupCost(took_us / groups, moved[0] / groups, moved[1] / groups, learner_us)

    def _pass_on(self, actor: int, payloads: tuple[bytes, bytes]) -> None:
        """One group on its way from an actor by a rewarder to the learner."""
        (entry,) = self._tickets[actor].take(1)
        assert self._tickets[actor].handoff(entry, self._keys.rollouts, payloads[0])
        (entry,) = self._rollouts[actor].take(1)
        assert self._rollouts[actor].handoff(entry, self._keys.scored, payloads[1])

    def _train(self, groups: int) -> None:
        """Read all groups as the learner does, and end their tickets."""
        after, found = BEGINNING, 0
        while found < groups:
            entries = self._queue.outcomes("train", after, 64)
            found, after = found + len(entries), entries[-1].id
            ends = dict.fromkeys((entry.ticket for entry in entries), "trained")
            self._queue.close("train", ends, [entry.id for entry in entries])  # type: ignore[arg-type]

    def _watch(self, actor: int) -> None:
        """What an actor asks once a second: contract, state and the learner's heartbeat."""
        view = self._views[actor]
        view.contract()
        view.ended()
        view.learner()

    def _report(self, actor: int) -> None:
        """What an actor tells of itself: times by phase, and its status."""
        connection = self._connections[actor]
        name, key = f"actor-{actor}", self._keys.processes
        status = StatusWriter(connection, key, name, "actor", lambda: ("1.0", 1))
        report = CostReport(connection, self._keys.costs, "actor", status)
        report.note("generating")
        report.note("generating")
        report.send()


def make_ticket(number: int) -> Ticket:
    """A ticket with a prompt of 200 tokens."""
    return Ticket(
        TicketId.train(number), "train", np.arange(200, dtype="<i4"), GENERATIONS,
        Sampling(1.0, 1.0, 0, 0.0, 2048, 42), Version(1, 0), 0, "0" * 64, {"solution": "12"},
    )  # fmt: skip


def intake_us(server: LocalServer, folder: Path, tokens: int, rounds: int = 3) -> float:
    """The learner's microseconds per group, from the socket to packed tensors; the median."""
    groups = max(4, _INTAKE_TOKENS // tokens)
    took = [
        intake.measure(server, folder, next(_NUMBERS), groups, tokens)["learner"]
        for _ in range(rounds + 1)
    ]
    return 1000 * statistics.median(took[1:])  # the first round warms up


def measure_costs(url: str, learner_us: Mapping[int, float]) -> Costs:
    """Measure the costs once, with new connections."""
    with ExitStack() as stack:
        return Bench(url, CONNECTIONS, stack).measure(_CALLS, _GROUPS, learner_us)


def median(rounds: list[Costs]) -> Costs:
    """The median of each cost."""
    groups = {
        tokens: _median(GroupCost, [one.groups[tokens] for one in rounds]) for tokens in rounds[0].groups
    }
    return _median(Costs, rounds, groups=groups)


def _median(kind: type[T], rounds: Sequence[T], **known: Any) -> T:
    """An object of dataclass `kind` with the median of each field but those that are `known`."""
    names = [one.name for one in fields(kind) if one.name not in known]  # type: ignore[arg-type]
    medians = {name: statistics.median(getattr(one, name) for one in rounds) for name in names}
    return kind(**known, **medians)
