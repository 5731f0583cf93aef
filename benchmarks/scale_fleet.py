"""A fleet of simulated actors: the protocol is the product's and real, generation is a drawn time.

Each actor has a connection of its own, takes tickets, renews its leases as often as a real one, and
hands each group off when its time is over. Rewarders and a learner without a policy do the rest. One
loop makes the calls of all actors and rewarders, each when it is due; the learner has a thread.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.intake import GENERATIONS, Learner, make_group, make_plan
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.settings import RunSettings
from penstock.common.monitor.snapshot import read_audit
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Group, Rollout, ScoredGroup, Ticket

LEASE_S = float(RunSettings().lease_s)
RENEW_S = LEASE_S / 4
_ATTEMPTS, _WAIT_S = 3, 60.0
_SIGMA = 0.3
_LAG = 3
"""So twice as many tickets are open as the actors hold: they find one whenever they have room."""
_LOOK_S, _LOOK_FOR_TICKETS_S = 0.05, 1.0
"""Between two looks of a rewarder, and of an actor with room: a real one looks every 0.15 s."""
_ACTORS_PER_REWARDER = 50
_SCORED_AT_ONCE = 32


class Worker(Protocol):
    """Something that makes calls when they are due."""

    def work(self, now: float) -> float:
        """Make the calls that are due; return the time at which the next ones are."""
        ...


class Rollouts:
    """Random rollouts of a length, the same for all groups that a version sampled."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._made: dict[Version, tuple[Rollout, ...]] = {}

    def of(self, ticket: Ticket) -> tuple[Rollout, ...]:
        """The rollouts of a ticket."""
        if ticket.version not in self._made:
            scored = make_group(ticket, self._tokens, np.random.default_rng(1))
            self._made = {ticket.version: scored.group.rollouts, **self._made}
        return self._made[ticket.version]


@dataclass(slots=True)
class Job:
    """A ticket that an actor holds, and when its group is ready."""

    entry: Entry
    ticket: Ticket
    ready_at: float


class Actor:
    """Holds `places` tickets, each for a lognormal time with the mean `mean_s`."""

    def __init__(
        self, connection: Connection, keys: Keys, name: str, places: int, mean_s: float,
        rollouts: Rollouts, begin: float,
    ) -> None:  # fmt: skip
        self._stream = WorkStream(connection, keys, keys.tickets, name, LEASE_S, _ATTEMPTS)
        self._to, self._name, self._places, self._rollouts = keys.rollouts, name, places, rollouts
        self._draw = random.Random(name)
        self._mean_s = mean_s
        self._jobs: list[Job] = []
        self._renew_at = self._renewed_at = begin + self._draw.random() * RENEW_S
        self.handed_off = self.renewals = self.renewed = 0
        self.longest_s = 0.0
        """The longest time between two renewals."""

    def work(self, now: float) -> float:
        """Hand off what is ready, take tickets for the free places, renew the leases if that is due."""
        if ready := [job for job in self._jobs if job.ready_at <= now]:
            groups = [Group(job.ticket, self._rollouts.of(job.ticket), self._name) for job in ready]
            finished = [(job.entry, encode(made)) for job, made in zip(ready, groups, strict=True)]
            self.handed_off += sum(self._stream.handoff_all(finished, self._to))
            self._jobs = [job for job in self._jobs if job.ready_at > now]
        if room := self._places - len(self._jobs):
            self._jobs += [self._begin(entry, now) for entry in self._stream.take(room)]
        if now >= self._renew_at:
            self._renew(now)
        look = [now + _LOOK_FOR_TICKETS_S] if len(self._jobs) < self._places else []
        return min([self._renew_at, *look, *(job.ready_at for job in self._jobs)])

    def _begin(self, entry: Entry, now: float) -> Job:
        time_s = self._mean_s * self._draw.lognormvariate(-(_SIGMA**2) / 2, _SIGMA)
        if not self.renewals:  # the first ones end at any time, as in a fleet that has worked for long
            time_s *= self._draw.random()
        return Job(entry, decode(entry.payload, Ticket), now + time_s)

    def _renew(self, now: float) -> None:
        """Renew the leases of all held tickets in one call, if there are any."""
        if self._jobs:
            owned = self._stream.renew([job.entry.id for job in self._jobs])
            assert all(owned), "a lease was lost, which nobody takes over here"
            self.renewals += 1
            self.renewed += len(owned)
            self.longest_s = max(self.longest_s, now - self._renewed_at)
        self._renewed_at, self._renew_at = now, self._renew_at + RENEW_S


class Rewarder:
    """Scores what it takes at once: half of the completions get 1."""

    def __init__(self, connection: Connection, keys: Keys, name: str) -> None:
        self._stream = WorkStream(connection, keys, keys.rollouts, name, LEASE_S, _ATTEMPTS)
        self._to, self._name = keys.outcomes_for("train"), name
        self.scored = 0

    def work(self, now: float) -> float:
        """Take groups, and hand their scores on."""
        entries = self._stream.take(_SCORED_AT_ONCE)
        if entries:
            finished = [(entry, encode(self._score(decode(entry.payload, Group)))) for entry in entries]
            self.scored += sum(self._stream.handoff_all(finished, self._to))
        return now + (_LOOK_S if entries else 4 * _LOOK_S)

    def _score(self, group: Group) -> ScoredGroup:
        rewards = {"accuracy": tuple(float(number % 2) for number in range(GENERATIONS))}
        return ScoredGroup(group, rewards, ("a text",) * GENERATIONS, self._name)


class ServerMeter:
    """The processor time of the queue server's main thread, which does all commands, and its bytes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def seconds(self) -> float:
        """Processor seconds since the server's start."""
        found = self._connection.execute("INFO", "cpu")
        return sum(float(found[f"used_cpu_{kind}_main_thread"]) for kind in ("user", "sys"))

    def calls(self, command: str) -> int:
        """How often clients sent a command since the server's start."""
        found = self._connection.execute("INFO", "commandstats")
        return int(found.get(f"cmdstat_{command}", {"calls": 0})["calls"])

    def transferred(self) -> tuple[int, int]:
        """The bytes that came in and went out since the server's start."""
        found = self._connection.execute("INFO", "stats")
        return int(found["total_net_input_bytes"]), int(found["total_net_output_bytes"])


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What a fleet did. `seconds` are wall time, `server_s` and `simulator_s` processor time.

    `longest_s` is the longest time between two renewals of an actor, `late_s` the median of how much
    later than due a call was made. `renewals` are calls, for `renewed` leases. `takes` and `functions`
    are all calls of XREADGROUP and of the server's functions, also those that found nothing.
    """

    actors: int
    groups: int
    handed_off: int
    trained: int
    left_open: int
    faults: tuple[str, ...]
    renewals: int
    renewed: int
    takes: int
    functions: int
    seconds: float
    server_s: float
    simulator_s: float
    longest_s: float
    late_s: float
    connections: int

    @property
    def balances(self) -> bool:
        """Whether each group was handed off and trained once, and no ticket is open."""
        return self.handed_off == self.trained == self.groups and not self.left_open and not self.faults


@dataclass(slots=True)
class Fleet:
    """`actors` actors that hold `places` tickets each, and hand off a group every `group_s` seconds.

    A completion has `tokens` tokens. The learner trains `groups` groups or a few more, in whole steps.
    """

    actors: int
    groups: int
    tokens: int
    places: int = 2
    group_s: float = 10.0
    deadline_s: float = 1800.0
    lates: list[float] = field(default_factory=list)

    def run(self, url: str, folder: Path) -> FleetRun:
        """Simulate on the server at `url`; the run's folder is made in `folder`."""
        with ExitStack() as stack:
            name = f"fleet-{self.actors}-{self.tokens}"
            connections = self._connect(url, stack)
            own, learners = next(connections), next(connections)
            size = max(1, self.actors * self.places // 2)
            steps = -(-self.groups // size)
            plan = make_plan(size, self.tokens, steps, max_staleness=_LAG)
            learner = Learner(learners, folder / name, name, plan)
            begin, rollouts = time.monotonic(), Rollouts(self.tokens)
            mean_s = self.group_s * self.places
            keys = learner.keys
            actors = [
                Actor(next(connections), keys, f"actor-{n}", self.places, mean_s, rollouts, begin)
                for n in range(self.actors)
            ]
            rewarders = [
                Rewarder(next(connections), keys, f"rewarder-{n}")
                for n in range(1 + self.actors // _ACTORS_PER_REWARDER)
            ]
            with measured(ServerMeter(own)) as took, ThreadPoolExecutor(1, "learner") as thread:
                training = thread.submit(lambda: [learner.commit(step) for step in range(steps)])
                try:
                    self._drive([*actors, *rewarders], training.done)
                finally:
                    learner.stopping.set()
                training.result()
            return self._result(own, name, actors, steps * size, took)

    def _connect(self, url: str, stack: ExitStack) -> Iterator[Connection]:
        while True:
            yield stack.enter_context(closing(Connection(url, _WAIT_S, _WAIT_S)))

    def _drive(self, workers: Sequence[Worker], ended: Callable[[], bool]) -> None:
        """Let each worker work when it is due, until `ended`."""
        begin, order = time.monotonic(), count()
        due = [(begin, next(order), worker) for worker in workers]
        while not ended():
            at, _, worker = due[0]
            now = time.monotonic()
            assert now < begin + self.deadline_s, "the fleet makes no progress"
            if at > now:
                time.sleep(min(at - now, _LOOK_S))
                continue
            self.lates.append(now - at)
            heapq.heapreplace(due, (worker.work(now), next(order), worker))

    def _result(
        self, own: Connection, run: str, actors: list[Actor], groups: int, took: dict[str, Any]
    ) -> FleetRun:
        audit = read_audit(own, run)
        return FleetRun(
            **took, actors=self.actors, groups=groups, trained=audit.ended["trained"],
            left_open=audit.open, faults=audit.faults,
            handed_off=sum(one.handed_off for one in actors),
            renewals=sum(one.renewals for one in actors), renewed=sum(one.renewed for one in actors),
            longest_s=max(one.longest_s for one in actors), late_s=statistics.median(self.lates),
            connections=int(own.execute("INFO", "clients")["connected_clients"]),
        )  # fmt: skip


@contextmanager
def measured(meter: ServerMeter) -> Iterator[dict[str, Any]]:
    """What a FleetRun says of the block's time and calls."""
    took: dict[str, Any] = {}
    server_s, simulator_s, began = meter.seconds(), time.process_time(), time.monotonic()
    takes, functions = meter.calls("xreadgroup"), meter.calls("fcall")
    yield took
    took["server_s"] = meter.seconds() - server_s
    took["simulator_s"] = time.process_time() - simulator_s
    took["seconds"] = time.monotonic() - began
    took["takes"] = meter.calls("xreadgroup") - takes
    took["functions"] = meter.calls("fcall") - functions
