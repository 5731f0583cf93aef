"""An actor's work on one run: from joining the run until it ends, is lost, or the actor stops.

_take_tickets, _follow_weights, _watch_run, and _serve once per running ticket, run side by side in one
event loop. Calls to the queue server run in threads.
"""

import asyncio
import contextlib
import threading
import time
from collections import defaultdict

from penstock.actors.engine import Aborted, Engine, PromptRefused
from penstock.actors.engine_watch import EngineWatch
from penstock.actors.held_tickets import HeldTickets, Job
from penstock.actors.rollout_groups import Completions
from penstock.actors.weight_follower import WeightFollower
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.learner_watch import LearnerWatch
from penstock.common.broker.lease_keeper import LeaseKeeper
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.role_command import ActorCommand
from penstock.common.episodes.pool import EpisodeFailed
from penstock.common.errors import EngineFailed, MalformedMessage, RunNotReady
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, describe_difference
from penstock.common.wire.ids import Purpose
from penstock.common.wire.messages import Group, Rollout, Ticket

_IDLE_S = 0.05
_BLOCK_MS = 100
_WATCH_S = 1.0
_DRAIN_S = 10.0
_ABORT_S = 5.0
_MOST_AT_ONCE = 32
"""Groups in one round trip: all of them stay in memory until the last one is confirmed."""
_PURPOSES: tuple[Purpose, ...] = ("eval", "train")

log = get_logger(__name__)


class TicketWorker:
    """Turns tickets into groups under one contract. Made inside of an event loop.

    `groups` samples the rollouts of a ticket with `engine`, whose weights the worker keeps current.
    """

    def __init__(
        self,
        settings: ActorCommand,
        contract: Contract,
        engine: Engine,
        groups: Completions,
        *,
        connection: Connection,
        consumer: str,
        stopping: threading.Event,
    ) -> None:
        run, actor = settings.run, settings.actor
        self._keys = Keys(run.name)
        self._view = RunView(connection, self._keys)
        self._learner_watch = LearnerWatch(connection, self._keys, run)
        self._contract = contract
        self._engine = engine
        self._groups = groups
        self._consumer = consumer
        self._stopping = stopping
        self._ending = False
        self._reclaim_every_s = run.lease_s / 2
        self._streams: dict[Purpose, WorkStream] = {
            purpose: WorkStream(
                connection, self._keys, self._keys.tickets_for(purpose), consumer,
                run.lease_s, run.max_attempts,
            )
            for purpose in _PURPOSES
        }  # fmt: skip
        self._reclaim_at = dict.fromkeys(_PURPOSES, 0.0)
        self._held = HeldTickets(contract.credit)
        self._follower = WeightFollower(
            engine, self._view, self._held, run.folder, run.join_timeout_s, actor.start_timeout_s
        )
        self._engine_watch = EngineWatch(
            engine, groups, self._held, self._follower, actor.stall_timeout_s
        )
        self._leases = LeaseKeeper(run.lease_s, self._engine_watch.progress, actor.stall_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._serving: set[asyncio.Task[None]] = set()
        self._finished: defaultdict[WorkStream, list[tuple[Entry, Group]]] = defaultdict(list)
        self._handing_off = asyncio.Lock()

    async def run(self) -> None:
        """Work until the run ends or `stopping` is set. Call this once.

        Raise RunNotReady if the run is gone or has another contract. Raise what ends the actor:
        EngineFailed, ServerUnavailable, MalformedMessage, or DeadlineExceeded if the learner is gone.
        """
        self._leases.start()
        try:
            async with self._tasks:
                taking = self._tasks.create_task(self._take_tickets())
                self._tasks.create_task(self._follow_weights())
                await self._watch_run()
                self._ending = True
                await taking  # otherwise that loop would take the tickets again that are given back
                await self._finish()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self._ending = True
            await asyncio.to_thread(self._leases.stop)
        for stream in self._streams.values():
            with contextlib.suppress(RunNotReady):  # such as a key of another type
                await asyncio.to_thread(stream.leave)

    # Taking tickets

    async def _take_tickets(self) -> None:
        """Take tickets of both purposes and start those that are ready, until the worker is ending.

        Waits for: room in the engine, credit, and tickets.
        Unblocked by: the learner issuing tickets, tickets that end, expired leases of other actors.
        Produces: held tickets, whose leases are renewed. Raise what `_take` raises.
        """
        while not self._ending:
            taken = [await self._take(purpose) for purpose in _PURPOSES]
            if not any(taken):
                await asyncio.sleep(_IDLE_S)

    async def _take(self, purpose: Purpose) -> bool:
        """Take a ticket per place, start ready jobs; return if any came. Raise as `_claim`, `_admit`."""
        count = self._held.places(purpose, self._groups.room(), self._engine.version)
        if count == 0:
            return False
        entries = await asyncio.to_thread(self._claim, purpose, count)
        for entry in entries:
            await self._admit(purpose, entry)
        self._start_jobs()
        return bool(entries)

    def _claim(self, purpose: Purpose, count: int) -> list[Entry]:
        """Return up to `count` entries, twice per lease expired ones first. Raise as WorkStream.take."""
        stream = self._streams[purpose]
        if time.monotonic() >= self._reclaim_at[purpose]:
            late = stream.reclaim(count)
            if late:
                return late
            self._reclaim_at[purpose] = time.monotonic() + self._reclaim_every_s
        return stream.take(count, _BLOCK_MS if purpose == "train" else 0)

    async def _admit(self, purpose: Purpose, entry: Entry) -> None:
        """Hold a new ticket; bury a doomed, fail an unreadable one. Raise as Connection.call does."""
        stream = self._streams[purpose]
        if entry in self._held:  # reclaimed from ourselves after a pause: the job is still running
            return
        if entry.doomed:
            reason = "lost its lease while running alone"
            log.error(f"Ticket {entry.ticket} is dead: it {reason}.")
            await asyncio.to_thread(stream.bury, entry, purpose, reason)
            return
        try:
            ticket = decode(entry.payload, Ticket)
            if (ticket.id, str(ticket.version)) != (entry.ticket, entry.version):
                found = f"holds {ticket.id} of version {ticket.version}"
                raise MalformedMessage(
                    f"the entry of {entry.ticket}, issued at {entry.version}, {found}"
                )
        except MalformedMessage as error:
            await asyncio.to_thread(stream.fail, entry, purpose, str(error))
            return
        job = Job(stream, entry, ticket, stream.runs_alone(entry))
        self._held.add(job)

        def on_lost() -> None:  # runs in the lease thread
            """Call `_lose` in the event loop."""
            self._loop.call_soon_threadsafe(self._lose, job)

        self._leases.hold(stream, entry, on_lost)

    def _lose(self, job: Job) -> None:
        """Mark a job as lost; unless the worker is ending, abort it, or remove it if it waits."""
        job.lost = True
        if self._ending:
            return
        if job.running:
            self._tasks.create_task(self._groups.abort(job.request_id))
        else:
            self._held.remove(job)

    # Serving them

    def _start_jobs(self) -> None:
        """Start a `_serve` task for each job that may start now; none while the worker is ending."""
        for job in self._held.startable(self._engine.version, steady=not self._follower.taking):
            if self._ending:
                return
            job.running = True
            task = self._tasks.create_task(self._serve(job))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, job: Job) -> None:
        """Sample one ticket's group and hand it off, then start the jobs that have room now.

        Waits for: the engine's completions, then the queue server's confirmation.
        Unblocked by: the engine, or an abort when the lease is lost or the worker ends.
        Produces: a group on `rollouts`, or the ticket back on its stream, or a failed attempt.
        Ends when: the ticket is not held. Raise as Connection.call, or EngineFailed unless stopping.
        """
        ticket = job.ticket
        try:
            if job.alone and not await asyncio.to_thread(job.stream.mark_alone, job.entry):
                raise Aborted(job.request_id)  # another actor took the ticket over
            rollouts = await self._groups.generate(job.request_id, ticket)
            self._leases.release(job.stream, job.entry)
            await self._hand_off(job, rollouts)
        except Aborted:
            await self._give_back(job)
        except EngineFailed:
            if not self._stopping.is_set():  # Ctrl-C reaches the engine's processes as well
                raise
            await self._give_back(job)
        except (PromptRefused, EpisodeFailed, MalformedMessage) as error:
            log.warning(f"Ticket {ticket.id} failed an attempt.", reason=str(error))
            self._leases.release(job.stream, job.entry)
            await asyncio.to_thread(job.stream.fail, job.entry, ticket.purpose, str(error))
        finally:
            self._leases.release(job.stream, job.entry)
            self._held.remove(job)
        self._start_jobs()

    async def _hand_off(self, job: Job, rollouts: tuple[Rollout, ...]) -> None:
        """Send a job's group, with others that wait. Raise MalformedMessage, or as Connection.call."""
        group = Group(job.ticket, rollouts, self._consumer)
        self._finished[job.stream].append((job.entry, group))
        async with self._handing_off:
            await asyncio.sleep(0)  # lets jobs that end in this instant add their groups
            waiting = self._finished[job.stream]
            finished, self._finished[job.stream] = waiting[:_MOST_AT_ONCE], waiting[_MOST_AT_ONCE:]
            if finished:  # otherwise an earlier call sent this group too, or its failure ends the worker
                await asyncio.to_thread(self._hand_off_all, job.stream, finished)

    def _hand_off_all(self, stream: WorkStream, finished: list[tuple[Entry, Group]]) -> None:
        """Send groups in one round trip; log those that came too late. Raise as Connection.call does."""
        encoded = [(entry, encode(group)) for entry, group in finished]
        first = stream.handoff_all(encoded, self._keys.rollouts)
        for (entry, _), was_first in zip(finished, first, strict=True):
            if not was_first:
                log.info(f"Dropped a group: ticket {entry.ticket} had ended, or went to another actor.")

    async def _give_back(self, job: Job) -> None:
        """Put a ticket back, uncounted, unless another actor has it. Raise as Connection.call does."""
        self._leases.release(job.stream, job.entry)
        self._held.remove(job)
        if not job.lost:
            await asyncio.to_thread(job.stream.give_back, job.entry)

    # Beside the tickets

    async def _follow_weights(self) -> None:
        """Keep the engine at the announced version until the worker is ending.

        Waits for: an announcement by the learner, and the end of running eval tickets.
        Produces: new weights in the engine, and the start of jobs that waited for them.
        Raise what WeightFollower.poll raises.
        """
        while not self._ending:
            if await self._follower.poll():
                self._start_jobs()
            await asyncio.sleep(_IDLE_S)

    async def _watch_run(self) -> None:
        """Check the run, the engine and the learner once a second, and log the engine's speed.

        Ends when: the learner ended the run, or a signal set `stopping`. Raise RunNotReady if the run is
        lost, EngineFailed if the engine hangs, DeadlineExceeded without learner, or as RunView.weights.
        """
        check_at = 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + _WATCH_S
                if await asyncio.to_thread(self._has_ended):
                    log.info("The run has ended.")
                    return
                self._engine_watch.check()
                self._engine_watch.report()
                await asyncio.to_thread(self._learner_watch.check)
            await asyncio.sleep(_IDLE_S)

    def _has_ended(self) -> bool:
        """Return whether the run is over. Raise RunNotReady if it is gone or has another contract."""
        data = self._view.contract()
        if data is None:
            raise RunNotReady("the run is gone from the queue server")
        check_same(self._contract, data)
        return self._view.ended()

    async def _finish(self) -> None:
        """Give back waiting tickets, let running ones end for 10 s, abort others, cancel after 5 s."""
        for job in self._held.waiting:
            await self._give_back(job)
        if self._serving:
            await asyncio.wait(self._serving, timeout=_DRAIN_S)
        for job in self._held.running:
            await self._groups.abort(job.request_id)
        if self._serving:
            _, stuck = await asyncio.wait(self._serving, timeout=_ABORT_S)
            for task in stuck:
                task.cancel()


def check_same(joined: Contract, data: bytes) -> None:
    """Raise RunNotReady, with the differences, for another contract, or one that cannot be read."""
    try:
        published = decode(data, Contract)
    except MalformedMessage as error:
        raise RunNotReady(f"the contract on the queue server cannot be read: {error}") from error
    if published.hash != joined.hash:
        raise RunNotReady(
            "the learner published another contract, start the actor again:\n"
            + describe_difference(joined, published)
        )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a task group, without the groups around it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
