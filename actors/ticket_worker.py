"""An actor's work on one run: from joining the run until it ends, is lost, or the actor stops.

_take_tickets, _follow_weights, _watch_run, and _serve once per running ticket, run side by side in one
event loop. Calls to the queue server run in threads.
"""

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from penstock.actors.device_user import DeviceUser
from penstock.actors.engine import Aborted, Engine, PromptRefused
from penstock.actors.engine_watch import EngineWatch
from penstock.actors.held_tickets import HeldTickets, Job
from penstock.actors.partial_groups import Begun, count_tokens, read_partial, write_partial
from penstock.actors.rollout_groups import Completions
from penstock.actors.weights.follower import WeightFollower
from penstock.actors.weights.probing import probe_limit
from penstock.actors.weights.source import WeightSource
from penstock.common.broker.connection import Connection
from penstock.common.broker.costs import LOST_TOKENS, CostReport
from penstock.common.broker.keys import Keys
from penstock.common.broker.lease_keeper import LeaseKeeper
from penstock.common.broker.lease_watch import LOOKS_PER_LEASE
from penstock.common.broker.process_status import StatusWriter
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import GracePeriod
from penstock.common.episodes.pool import EpisodeFailed
from penstock.common.errors import (
    Disagreement,
    EngineFailed,
    MalformedMessage,
    RunNotReady,
    ValueTooLarge,
)
from penstock.common.log import get_logger
from penstock.common.monitor.learner_watch import LearnerWatch
from penstock.common.transfer.model_folder import ModelFetcher
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, describe_difference
from penstock.common.wire.ids import Purpose
from penstock.common.wire.messages import Group, Rollout, Ticket

_IDLE_S = 0.05
_BLOCK_MS = 100
_WATCH_S = 1.0
_ABORT_S, _STORE_S = 5.0, 5.0
"""The engine stops both before the grace period's end: to return its tokens, and to store them."""
_BEHIND_S = 60.0  # without new weights, after which others get the tickets that wait for them
_RESTORED_S = 2.0
"""The learner's heartbeat restores its claim sooner than that."""
_MOST_AT_ONCE = 32
"""Groups in one round trip: all of them stay in memory until the last one is confirmed."""
_PURPOSES: tuple[Purpose, ...] = ("eval", "train")

log = get_logger(__name__)


class TicketWorker:
    """Turns the tickets of a run into groups, by `run`. Make a worker inside of a running event loop.

    `settings.run` has the run's name, folder, lease, most attempts and timeouts, `settings.actor` the
    engine's timeouts. `contract` is the one that the actor joined with. `groups` samples the rollouts of
    a ticket with `engine`, whose weights the worker changes to each announced version. `device` lets the
    engine sleep while the learner uses their device. `consumer` is
    this actor's name on the queue server behind `connection`. The worker ends when `stopping` is set.
    """

    def __init__(
        self,
        settings: ActorCommand,
        contract: Contract,
        engine: Engine,
        groups: Completions,
        device: DeviceUser,
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
        self._stopping, self._ending, self._lost = stopping, False, 0  # tokens that were given up
        self._last_error: Disagreement | RunNotReady | None = None  # raised once all is given back
        self._give_up_at = 0.0  # when a ticket that the server does not take back is given up
        self._look_every_s = run.lease_s / LOOKS_PER_LEASE
        self._streams = _streams(connection, self._keys, consumer, run, contract.largest_group)
        self._look_at = dict.fromkeys(_PURPOSES, 0.0)
        self._late = dict.fromkeys(_PURPOSES, False)
        self._held = HeldTickets(contract.credit)
        self._grace = connection.stopping = GracePeriod(stopping, self._held, actor.grace_s)
        copy = ModelFetcher(self._view, run, stopping, actor.weights_from)
        self._follower = WeightFollower(
            engine, self._view, self._held, WeightSource(run.folder, copy, actor.weights_from),
            run.join_timeout_s, actor.start_timeout_s,
            probe_limit(actor, contract), self._discard_running, run.lease_s,
        )  # fmt: skip
        self._device = device
        self._engine_watch = EngineWatch(
            engine, groups, self._held, self._follower, actor.stall_timeout_s
        )
        status = StatusWriter(connection, self._keys.processes, consumer, "actor", self._tell)
        self._costs = CostReport(connection, self._keys.costs, "actor", status)
        self._leases = LeaseKeeper(run.lease_s, self._engine_watch.progress, actor.stall_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._serving: set[asyncio.Task[None]] = set()
        self._finished: defaultdict[WorkStream, list[tuple[Entry, Group]]] = defaultdict(list)
        self._handing_off = asyncio.Lock()
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Turn tickets into groups until the learner ends the run or `stopping` is set. Call this once.

        Then waiting tickets are given back, running ones may end within the grace period and are else
        given back with their tokens, and the consumer leaves its streams. All of this comes, without a
        grace period, also before a Disagreement is raised, if the engine stays wrong, or a RunNotReady,
        if the run is gone or has another contract. Raise DeadlineExceeded if the learner's heartbeat is
        missing too long, EngineFailed, or ServerUnavailable and the other errors of Connection.call.
        """
        self._leases.start()
        try:
            async with self._tasks:
                taking = self._tasks.create_task(self._take_tickets())
                following = self._tasks.create_task(self._follow_weights())
                ended = False
                with self._giving_back_first():
                    ended = await self._watch_run()
                self._ending = True
                await taking  # otherwise that loop would take the tickets again that are given back
                await self._finish(0.0 if ended or self._last_error else self._grace.left_s())
                if not self._follower.taking:  # it may be fetching weights, which takes long
                    following.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self._ending = True
            await asyncio.to_thread(self._leases.stop)
        await asyncio.to_thread(self._costs.leave)
        for stream in self._streams.values():
            with contextlib.suppress(RunNotReady):  # such as a key of another type
                await asyncio.to_thread(stream.leave)
        if self._last_error:
            raise self._last_error

    @contextlib.contextmanager
    def _giving_back_first(self) -> Iterator[None]:
        """Keep a RunNotReady of the block, for `run` to raise once all tickets are given back.

        Another client may have deleted a key that the learner restores soon. A ticket that is not given
        back loses an attempt and its tokens.
        """
        try:
            yield
        except RunNotReady as error:
            self._last_error = self._last_error or error

    # Taking tickets

    async def _take_tickets(self) -> None:
        """Take tickets of both purposes and start those that are ready, until the worker is ending.

        Waits for: room in the engine, credit, and tickets, which are looked for at least every 0.05 s.
        Unblocked by: the learner issuing tickets, tickets that are sampled, expired leases of others.
        Produces: held tickets, whose leases are renewed.
        A RunNotReady ends the worker. Raise ServerUnavailable and the other errors of Connection.call.
        """
        with self._giving_back_first():
            while not self._ending and self._last_error is None:
                self._has_room.clear()
                taken = [await self._take(purpose) for purpose in _PURPOSES]
                if not any(taken):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._has_room.wait(), _IDLE_S)

    async def _take(self, purpose: Purpose) -> bool:
        """Take as many tickets of a purpose as there is room for, then start each job that may start.

        Return whether the queue server gave an entry, also if it was not held as a ticket; False as well
        without room, or at `stuck_at`. Twelve times a lease look for expired leases, also without room:
        holders may be stopped. Wait up to 0.1 s for training tickets. Raise Connection.call's errors.
        """
        if time.monotonic() >= self._look_at[purpose]:
            self._late[purpose] = await asyncio.to_thread(self._streams[purpose].has_expired)
            self._look_at[purpose] = time.monotonic() + self._look_every_s
        count = self._held.places(purpose, self._groups.room(), self._engine.version)
        if count == 0 or self._engine.version == self._held.stuck_at:
            self._start_jobs()
            return False
        entries = await asyncio.to_thread(self._claim, purpose, count)
        for entry in entries:
            await self._admit(purpose, entry)
        self._start_jobs()
        await asyncio.sleep(0)  # from now on the engine's room is without the started requests
        return bool(entries)

    def _claim(self, purpose: Purpose, count: int) -> list[Entry]:
        """Take up to `count` entries of a purpose: those whose lease expired, else new ones.

        Expired ones are taken until none is left, once `_take` has seen one. Any actor held them, also
        this one, whose job may still run. Block up to 0.1 s for new training tickets, not for
        eval tickets; [] if none came. Raise ServerUnavailable and other errors of Connection.call.
        """
        stream = self._streams[purpose]
        if self._late[purpose]:
            late = stream.reclaim(count)
            if late:
                return late
            self._late[purpose] = False
        return stream.take(count, _BLOCK_MS if purpose == "train" else 0)

    async def _admit(self, purpose: Purpose, entry: Entry) -> None:
        """Hold the ticket of a taken entry as a waiting job, and renew its lease from now on.

        Nothing happens if the entry is held already. A doomed entry, whose lease expired while its
        ticket ran alone, is logged and its ticket ends as dead. A payload that is no ticket counts as a
        failed attempt. An entry with another ticket or version than its place is deleted, and issued
        again by the learner. Raise ServerUnavailable and the other errors of Connection.call.
        """
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
        except MalformedMessage as error:
            await asyncio.to_thread(stream.fail, entry, purpose, str(error))
            return
        if (ticket.id, str(ticket.version)) != (entry.ticket, entry.version):
            await asyncio.to_thread(stream.discard, entry, "another ticket or version than its place's")
            return
        alone, begun = stream.runs_alone(entry), self._begun(entry, ticket)
        if alone:  # what others sampled may be what ends an actor
            self._note_lost(count_tokens(begun))
        job = Job(stream, entry, ticket, alone, () if alone else begun)
        self._held.add(job)

        def on_lost() -> None:  # runs in the lease thread
            """Let the event loop call `_lose` for the job soon. The lease thread calls this."""
            self._loop.call_soon_threadsafe(self._lose, job)

        self._leases.hold(stream, entry, on_lost)

    def _begun(self, entry: Entry, ticket: Ticket) -> Begun:
        """Return what another actor gave back with the entry of a ticket; () for nothing usable.

        What is too large or no partial group of the ticket is dropped with a warning.
        """
        if not entry.partial:
            return ()
        try:
            if len(entry.partial) > self._contract.largest_group:
                raise MalformedMessage(f"{len(entry.partial):,} bytes are over LEARNER_MAX_GROUP_MIB")
            return read_partial(entry.partial, ticket, self._contract.episodes.active)
        except MalformedMessage as error:
            log.warning(
                f"Ticket {ticket.id} begins anew: what came with it is refused.", reason=str(error)
            )
            return ()

    def _lose(self, job: Job) -> None:
        """Set `job.lost`, because another actor took the ticket over, and stop the work on the ticket.

        A running job's request is aborted in a task of its own, a waiting job is not held any more.
        While the worker is ending only `job.lost` is set.
        """
        job.lost = True
        if self._ending:
            return
        if job.running:
            self._tasks.create_task(self._groups.abort(job.request_id))
        else:
            self._held.remove(job)

    # Serving them

    def _start_jobs(self) -> None:
        """Set `running` of each held job that may start now, and start a `_serve` task for it.

        A job may start with the version of the engine's weights that its ticket asks for, if no job has
        to run alone. None starts while the worker is ending, or the engine sleeps or has
        wrong weights.
        """
        for job in self._held.startable(self._engine.version, steady=not self._follower.taking):
            if self._ending or self._follower.wrong or not self._device.awake:
                return
            job.running = True
            task = self._tasks.create_task(self._serve(job))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, job: Job) -> None:
        """Sample a running job's group and send it to the rewarders, then start jobs that fit now.

        Waits for: the engine's completions and tools, the proof of new weights, then the queue server's
        confirmation. Unblocked by: the engine, or an abort when the lease is lost or the worker ends.
        Produces: a group on the stream `rollouts`. After an abort, or if the engine fails while
        `stopping` is set, the ticket is back on its stream, uncounted, unless another actor has it;
        after an abort with what was sampled. A refused prompt, broken episodes or a malformed completion
        are logged, and count as a failure. Ends when: the job is no longer held, nor its lease renewed;
        an error ends both too. Raise EngineFailed unless `stopping` is set, ServerUnavailable or another
        error of Connection.call.
        """
        try:
            with self._giving_back_first():
                await self._sample(job)
        finally:
            self._leases.release(job.stream, job.entry)
            self._held.remove(job)
        self._start_jobs()

    async def _sample(self, job: Job) -> None:
        """Sample a job's group and hand it on, or give its ticket back, as `_serve` says.

        Raise RunNotReady, once the ticket is given back, and what `_serve` raises.
        """
        ticket, rollouts = job.ticket, tuple[Rollout, ...]()
        try:
            if job.alone and not await asyncio.to_thread(job.stream.mark_alone, job.entry):
                raise Aborted(job.request_id)  # another actor took the ticket over
            if job.discarded:
                raise Aborted(job.request_id)
            rollouts = await self._groups.generate(job.request_id, ticket, job.begun)
            self._has_room.set()
            self._end_sampling(job)
            job.unsent = count_tokens(rollouts)
            if not await self._follower.proven() or job.discarded:
                raise Aborted(job.request_id)
            job.unsent = 0
            await self._hand_off(job, rollouts)
        except Aborted as aborted:
            await self._give_back(job, aborted)
        except EngineFailed:
            if not self._stopping.is_set():  # what ends this actor may have ended it
                raise
            await self._give_back(job)
        except (PromptRefused, EpisodeFailed, MalformedMessage) as error:
            log.warning(f"Ticket {ticket.id} failed an attempt.", reason=str(error))
            self._end_sampling(job)
            await asyncio.to_thread(job.stream.fail, job.entry, ticket.purpose, str(error))
        except RunNotReady:
            await self._give_back(job, Aborted(job.request_id, rollouts))
            raise

    def _end_sampling(self, job: Job) -> None:
        """Note that the engine is done with a job. Its lease is renewed until the server answers."""
        job.over = True
        self._leases.finish(job.stream, job.entry)

    async def _hand_off(self, job: Job, rollouts: tuple[Rollout, ...]) -> None:
        """Send a job's rollouts to the rewarders, in one round trip with up to 31 other groups.

        Return once the group is sent, by this call or by another job's. Raise MalformedMessage for a
        group that cannot be encoded, ServerUnavailable and the other errors of Connection.call.
        """
        group = Group(job.ticket, rollouts, self._consumer)
        self._finished[job.stream].append((job.entry, group))
        async with self._handing_off:
            await asyncio.sleep(0)  # lets jobs that end in this instant add their groups
            waiting = self._finished[job.stream]
            finished, self._finished[job.stream] = waiting[:_MOST_AT_ONCE], waiting[_MOST_AT_ONCE:]
            if finished:  # otherwise an earlier call sent this group too, or its failure ends the worker
                try:
                    await asyncio.to_thread(self._hand_off_all, job.stream, finished)
                except RunNotReady:  # the others' jobs try it too, to give their tickets back
                    others = [one for one in finished if one[0] is not job.entry]
                    self._finished[job.stream] = [*others, *self._finished[job.stream]]
                    raise

    def _hand_off_all(self, stream: WorkStream, finished: list[tuple[Entry, Group]]) -> None:
        """Replace entries of `stream` by their groups on the stream `rollouts`, in one round trip.

        `finished` has the entries with their groups. A group is dropped, and this is logged, if its
        ticket has ended, is another actor's, or died because the group is too large. Block until the
        server answers. Raise MalformedMessage for a group that cannot be encoded, ServerUnavailable and
        the other errors of Connection.call.
        """
        encoded = [(entry, encode(group)) for entry, group in finished]
        first = stream.handoff_all(encoded, self._keys.rollouts)
        for (entry, _), was_first in zip(finished, first, strict=True):
            if not was_first:
                log.info(f"Dropped a group: ticket {entry.ticket} had ended, or went to another actor.")

    async def _give_back(self, job: Job, aborted: Aborted | None = None) -> None:
        """Put a job's ticket back on its stream, uncounted, then hold the job and its lease no longer.

        What was sampled until it was `aborted` goes with it. A job that is `lost` is not put back,
        because another actor has the ticket. Raise ServerUnavailable and the other errors of
        Connection.call.
        """
        self._end_sampling(job)
        if not job.lost:
            await self._put_back(job, aborted)
        self._leases.release(job.stream, job.entry)
        self._held.remove(job)

    async def _put_back(self, job: Job, aborted: Aborted | None) -> None:
        """Put a job's ticket back on its stream, with the tokens sampled before it was `aborted`.

        Try again while a key is missing or of another type. The worker gives up 2 s after its first such
        answer, and counts the tokens as lost. Raise ServerUnavailable and the other errors of
        Connection.call but RunNotReady.
        """
        partial: bytes | None = None
        while True:
            with contextlib.suppress(RunNotReady):
                if partial is None:
                    partial = await self._partial(job, aborted) if aborted else b""
                await asyncio.to_thread(job.stream.give_back, job.entry, partial)
                return
            self._give_up_at = self._give_up_at or time.monotonic() + _RESTORED_S
            if time.monotonic() >= self._give_up_at:
                break
            await asyncio.sleep(_IDLE_S)
        self._note_lost(count_tokens(aborted.partial) if aborted and partial else 0)

    async def _partial(self, job: Job, aborted: Aborted) -> bytes:
        """Return the bytes of what was sampled of an aborted job, b"" if nothing may be kept.

        Tokens of weights that are not proven may not be kept, nor over LEARNER_MAX_GROUP_MIB. What is
        lost is counted. Raise ServerUnavailable and the other errors of Connection.call.
        """
        partial, job.unsent = b"", aborted.lost + count_tokens(aborted.partial)
        if any(aborted.partial) and await self._follower.proven() and not job.discarded:
            try:
                partial = write_partial(job.ticket, aborted.partial, self._consumer)
                what = f"the partial group of ticket {job.ticket.id}"
                await asyncio.to_thread(job.stream.check_size, partial, what)
                job.unsent = aborted.lost
            except ValueTooLarge as error:
                log.warning(f"Ticket {job.ticket.id} goes back without its tokens.", reason=str(error))
                partial = b""
        self._note_lost(job.unsent)
        job.unsent = 0
        return partial

    def _note_lost(self, tokens: int) -> None:
        """Count tokens that were sampled and that no actor continues, for the log and the metrics."""
        self._lost += tokens
        self._costs.add(LOST_TOKENS, tokens)

    # Beside the tickets

    async def _follow_weights(self) -> None:
        """Keep the engine at the announced version until the worker is ending, with a look every 0.05 s.

        Waits for: an announcement by the learner, the end of running eval tickets, and a shared device.
        Produces: new weights in the engine, and the start of jobs that waited for them; an engine that
        sleeps while the learner uses the device.
        Raise EngineFailed if the engine breaks, WeightsRejected without usable weights and
        DeadlineExceeded without a heartbeat for RUN_JOIN_TIMEOUT_S, and Connection.execute's errors.
        """
        while not self._ending:
            woke = await self._device.poll(lambda: bool(self._held.running), lambda: self._ending)
            try:
                if self._device.awake and (await self._follower.poll() or woke):
                    self._start_jobs()
            except Disagreement as error:
                self._last_error = error
                return
            await asyncio.sleep(_IDLE_S)

    async def _discard_running(self) -> None:
        """End what is being sampled: its tokens may be of wrong weights. The tickets go back, uncounted.

        Return once their `_serve` tasks have ended, or after 5 s. What ends later goes back too.
        """
        serving, running = set(self._serving), self._held.running
        for job in running:
            job.discarded = True
        for job in running:
            await self._groups.abort(job.request_id)
        if serving:
            await asyncio.wait(serving, timeout=_ABORT_S)

    async def _leave_to_others(self) -> None:
        """Give tickets back that wait for weights which this actor cannot get, and take no more.

        Otherwise their leases are renewed for ever. Raise as `_give_back`.
        """
        for job in self._held.waiting if self._follower.behind_s > _BEHIND_S else ():
            if not job.running and not job.is_ready(self._engine.version, steady=True):
                job.running = True  # so that nothing starts it meanwhile
                self._held.stuck_at = self._engine.version
                log.warning(f"Ticket {job.ticket.id} goes to others: its weights cannot be had here.")
                await self._give_back(job)

    async def _watch_run(self) -> bool:
        """Check run, engine and learner once a second until the run has ended or `stopping` is set.

        Return whether the run has ended. Raise RunNotReady if the run is gone or has another contract,
        EngineFailed if the engine stalls, DeadlineExceeded without the learner's heartbeat, and
        Connection.call's errors.
        """
        check_at = 0.0
        while not self._stopping.is_set() and self._last_error is None:
            self._costs.note(self._phase())
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + _WATCH_S
                if await asyncio.to_thread(self._has_ended):
                    log.info("The run has ended.")
                    return True
                self._leases.check()
                self._engine_watch.check()
                self._engine_watch.report()
                await self._leave_to_others()
                await asyncio.to_thread(self._learner_watch.check)
                await asyncio.to_thread(self._costs.send_if_due)
            await asyncio.sleep(_IDLE_S)
        return False

    def _phase(self) -> str:
        """Return what the actor is doing, one of the phases of CostReport."""
        if not self._device.awake and not self._held.running:
            return "waiting for the device"
        if self._follower.taking:
            return "changing weights"
        return "generating" if self._held.running else "waiting for tickets"

    def _tell(self) -> tuple[str, int]:
        """Return the version of the engine's weights, "" before any, and the tokens sampled so far."""
        return str(self._engine.version or ""), self._engine.tokens_generated()

    def _has_ended(self) -> bool:
        """Return whether the learner has ended the run, as the queue server says. The call blocks.

        Raise RunNotReady if the server has no contract of the run, or another one than the worker's, and
        ServerUnavailable or another error of Connection.execute.
        """
        data = self._view.contract()
        if data is None:
            raise RunNotReady(
                f"the run's contract, {self._keys.contract}, is gone from the queue server: the actor "
                "joins again; start the learner if it does not run, to set the run up again"
            )
        check_same(self._contract, data)
        return self._view.ended()

    async def _finish(self, grace_s: float) -> None:
        """Give waiting tickets back; let running ones end until 10 s before the grace period's end.

        What runs then is aborted within 5 s, and given back by its `_serve` with its tokens in 5 s more.
        What does not return, as for a tool that runs or weights that are not proven yet, is given back
        without them. Raise ServerUnavailable and the other errors of Connection.call.
        """
        for job in self._held.waiting:
            await self._give_back(job)
        sampling_s = max(0.0, grace_s - _ABORT_S - _STORE_S)
        if self._serving and sampling_s:
            log.info(
                f"Stopping: {len(self._serving)} tickets run. What is unfinished in {sampling_s:.0f} s "
                "goes back with its tokens (ACTOR_GRACE_S)."
            )
            await asyncio.wait(self._serving, timeout=sampling_s)
        unfinished, deadline = self._held.running, time.monotonic() + _ABORT_S
        while self._held.sampling and time.monotonic() < deadline:
            for job in self._held.running:  # again and again: a request may not have reached the engine
                await self._groups.abort(job.request_id)
            await asyncio.wait(self._serving, timeout=_ABORT_S / 10)
        if self._serving:
            await asyncio.wait(self._serving, timeout=_STORE_S)
        for task in self._serving:
            task.cancel()
        for job in self._held.running:
            self._note_lost(max(job.unsent, self._groups.sampled(job.request_id)))
            await self._give_back(job)
        if unfinished:
            log.info(f"Gave {len(unfinished)} unfinished tickets back; {self._lost} tokens are lost.")


def _streams(
    connection: Connection, keys: Keys, consumer: str, run: RunSettings, largest: int
) -> dict[Purpose, WorkStream]:
    """Return by purpose the run's stream of tickets, as the actor `consumer` reads it.

    `largest` is the most bytes of a group that the run takes.
    """
    return {
        purpose: WorkStream(
            connection, keys, keys.tickets_for(purpose), consumer, run.lease_s, run.max_attempts, largest
        )
        for purpose in _PURPOSES
    }


def check_same(joined: Contract, data: bytes) -> None:
    """Raise RunNotReady unless `data`, the encoded contract on the queue server, is the `joined` one.

    The error lists the fields that differ, or says why the data cannot be read.
    """
    try:
        published = decode(data, Contract)
    except MalformedMessage as error:
        raise RunNotReady(
            f"the contract on the queue server cannot be read: {error}. A running learner replaces it "
            "soon; start the learner if none runs"
        ) from error
    if published.hash != joined.hash:
        raise RunNotReady(
            "the learner published another contract than this actor joined with, in these fields "
            "(joined -> published); start the actor again:\n" + describe_difference(joined, published)
        )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group of errors. Groups in it are searched, and not returned."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
