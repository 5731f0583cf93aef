"""One stretch of an actor's work, from joining a run until it ends, is lost or the actor stops.

Side by side, in one event loop (calls to the queue server go through threads):

    take tickets   waits for room and for tickets; adds each to the held tickets
    follow         waits for an announcement; changes the engine's weights
    serve          one per running ticket: generate, hand off
    watch          ends the worker; fails it when the engine produces nothing any more
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from penstock.actors.engine import Aborted, Engine, PromptRefused
from penstock.actors.engine_watch import EngineWatch
from penstock.actors.held_tickets import HeldTickets, Job
from penstock.actors.join import has_ended
from penstock.actors.weight_follower import WeightFollower
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.learner_watch import LearnerWatch
from penstock.common.broker.lease_keeper import LeaseKeeper
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.role_command import ActorCommand
from penstock.common.errors import EngineFailed, MalformedMessage
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.ids import Purpose
from penstock.common.wire.messages import Group, Rollout, Ticket

_IDLE_S = 0.05
_BLOCK_MS = 100
_WATCH_S = 1.0
_DRAIN_S = 10.0
_ABORT_S = 5.0
_MOST_AT_ONCE = 32
"""Groups in one round trip: all are kept until the last is answered."""
_PURPOSES: tuple[Purpose, ...] = ("eval", "train")

log = get_logger(__name__)


class TicketWorker:
    """Turns tickets into groups with one engine under one contract."""

    def __init__(
        self,
        settings: ActorCommand,
        contract: Contract,
        engine: Engine,
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
        self._consumer = consumer
        self._stopping = stopping
        self._over = False
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
            engine, self._view, self._held, run.join_timeout_s, actor.start_timeout_s
        )
        self._engine_watch = EngineWatch(engine, self._held, self._follower, actor.stall_timeout_s)
        self._leases = LeaseKeeper(run.lease_s, self._engine_watch.progress, actor.stall_timeout_s)
        self._serving: set[asyncio.Task[None]] = set()
        self._finished: defaultdict[WorkStream, list[tuple[Entry, Group]]] = defaultdict(list)
        self._handing_off = asyncio.Lock()

    async def run(self) -> None:
        """Work until the run ends or `stopping` is set.

        Raises RunNotReady when the run is gone from the server or has another contract, and what
        ends an actor: EngineFailed, ServerUnavailable, DeadlineExceeded when the learner is gone.
        """
        self._loop = asyncio.get_running_loop()
        self._leases.start()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                taking = self._tasks.create_task(self._take_tickets())
                self._tasks.create_task(self._follow_weights())
                await self._watch_run()
                self._over = True
                await taking  # or it would take again what is given back
                await self._finish()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self._over = True
            await asyncio.to_thread(self._leases.stop)
        for stream in self._streams.values():
            await asyncio.to_thread(stream.leave)

    # Taking tickets

    async def _take_tickets(self) -> None:
        while not self._over:
            taken = [await self._take(purpose) for purpose in _PURPOSES]
            if not any(taken):
                await asyncio.sleep(_IDLE_S)

    async def _take(self, purpose: Purpose) -> bool:
        count = self._held.places(purpose, self._engine.room(), self._engine.version)
        if count == 0:
            return False
        entries = await asyncio.to_thread(self._claim, purpose, count)
        for entry in entries:
            await self._admit(purpose, entry)
        self._start_jobs()
        return bool(entries)

    def _claim(self, purpose: Purpose, count: int) -> list[Entry]:
        """Work whose lease ran out, looked for now and then, else new work."""
        stream = self._streams[purpose]
        if time.monotonic() >= self._reclaim_at[purpose]:
            late = stream.reclaim(count)
            if late:
                return late
            self._reclaim_at[purpose] = time.monotonic() + self._reclaim_every_s
        return stream.take(count, _BLOCK_MS if purpose == "train" else 0)

    async def _admit(self, purpose: Purpose, entry: Entry) -> None:
        stream = self._streams[purpose]
        if entry in self._held:  # reclaimed from ourselves after a hiccup: it is still at work
            return
        if entry.doomed:
            reason = "lost its lease while running alone"
            log.error("ticket buried", ticket=entry.ticket, reason=reason)
            await asyncio.to_thread(stream.bury, entry, purpose, reason)
            return
        try:
            ticket = decode(entry.payload, Ticket)
        except MalformedMessage as error:
            await asyncio.to_thread(stream.fail, entry, purpose, str(error))
            return
        job = Job(stream, entry, ticket, stream.runs_alone(entry))
        self._held.add(job)
        self._leases.hold(stream, entry, self._when_lost(job))

    def _when_lost(self, job: Job) -> Callable[[], None]:
        """What the lease thread is to call."""

        def lose() -> None:
            self._loop.call_soon_threadsafe(self._lose, job)

        return lose

    def _lose(self, job: Job) -> None:
        job.lost = True
        if self._over:
            return
        if job.running:
            self._tasks.create_task(self._engine.abort(job.request_id))
        else:
            self._held.remove(job)

    # Serving them

    def _start_jobs(self) -> None:
        for job in self._held.startable(self._engine.version, steady=not self._follower.taking):
            if self._over:
                return
            job.running = True
            task = self._tasks.create_task(self._serve(job))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, job: Job) -> None:
        ticket = job.ticket
        try:
            if job.alone and not await asyncio.to_thread(job.stream.mark_alone, job.entry):
                raise Aborted(job.request_id)  # somebody else has it by now
            rollouts = await self._engine.generate(
                job.request_id, ticket.prompt_ids, ticket.sampling, ticket.num_generations
            )
            self._leases.release(job.stream, job.entry)
            await self._hand_off(job, rollouts)
            self._engine_watch.completions += len(rollouts)
        except Aborted:
            await self._give_back(job)
        except EngineFailed:
            if not self._stopping.is_set():  # Ctrl-C reaches the engine's processes as well
                raise
            await self._give_back(job)
        except (PromptRefused, MalformedMessage) as error:
            log.warning("a ticket failed", ticket=ticket.id, reason=str(error))
            self._leases.release(job.stream, job.entry)
            await asyncio.to_thread(job.stream.fail, job.entry, ticket.purpose, str(error))
        finally:
            self._leases.release(job.stream, job.entry)
            self._held.remove(job)
        self._start_jobs()

    async def _hand_off(self, job: Job, rollouts: tuple[Rollout, ...]) -> None:
        """Groups that end together, or while others are being handed off, go in one call."""
        group = Group(job.ticket, rollouts, self._consumer)
        self._finished[job.stream].append((job.entry, group))
        async with self._handing_off:
            await asyncio.sleep(0)  # for what ends in this instant
            waiting = self._finished[job.stream]
            finished, self._finished[job.stream] = waiting[:_MOST_AT_ONCE], waiting[_MOST_AT_ONCE:]
            if (
                finished
            ):  # else it went with an earlier one's; had that failed, the worker would have ended
                await asyncio.to_thread(self._hand_off_all, job.stream, finished)

    def _hand_off_all(self, stream: WorkStream, finished: list[tuple[Entry, Group]]) -> None:
        encoded = [(entry, encode(group)) for entry, group in finished]
        first = stream.handoff_all(encoded, self._keys.rollouts)
        for (entry, _), was_first in zip(finished, first, strict=True):
            if not was_first:
                log.info("somebody else was first", ticket=entry.ticket)

    async def _give_back(self, job: Job) -> None:
        """Put an unfinished ticket back, without counting an attempt, unless others have it."""
        self._leases.release(job.stream, job.entry)
        self._held.remove(job)
        if not job.lost:
            await asyncio.to_thread(job.stream.give_back, job.entry)

    # Beside them

    async def _follow_weights(self) -> None:
        while not self._over:
            if await self._follower.poll():
                self._start_jobs()
            await asyncio.sleep(_IDLE_S)

    async def _watch_run(self) -> None:
        """Return when the run is over or the actor is to stop."""
        check_at = 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + _WATCH_S
                if await asyncio.to_thread(has_ended, self._view, self._contract):
                    log.info("the run has ended")
                    return
                self._engine_watch.check()
                self._engine_watch.report()
                await asyncio.to_thread(self._learner_watch.check)
            await asyncio.sleep(_IDLE_S)

    async def _finish(self) -> None:
        """Give back what has not begun, let the rest finish for a while, give back what is left."""
        for job in self._held.waiting:
            await self._give_back(job)
        if self._serving:
            await asyncio.wait(self._serving, timeout=_DRAIN_S)
        for job in self._held.running:
            await self._engine.abort(job.request_id)
        if self._serving:
            _, stuck = await asyncio.wait(self._serving, timeout=_ABORT_S)
            for task in stuck:
                task.cancel()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
