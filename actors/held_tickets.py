"""The tickets that an actor holds: which of them may start, and how many more to take. No I/O.

taken -> waiting (for its version, for its turn) -> running -> removed
"""

from dataclasses import dataclass

from penstock.actors.partial_groups import Begun
from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.wire.ids import Purpose, Version
from penstock.common.wire.messages import Ticket


@dataclass(slots=True, eq=False)
class Job:
    """One held ticket. `lost` is set when the lease has passed to another actor.

    `discarded` is set when what is sampled for it may be of wrong weights. `alone` marks a ticket's last
    attempt, during which nothing else may run. `over` is set when the engine has no more to do for it,
    while a running job waits for the queue server. `begun` is what actors that had to end sampled of its
    group, () for nothing. `unsent` counts the tokens that wait for the proof of their weights.
    """

    stream: WorkStream
    entry: Entry
    ticket: Ticket
    alone: bool
    begun: Begun = ()
    running: bool = False
    lost: bool = False
    discarded: bool = False
    over: bool = False
    unsent: int = 0

    @property
    def request_id(self) -> str:
        """Return the engine's name for this attempt, TICKET/ENTRY, such as "train:7/1700000000000-0".

        A ticket that was put back is another entry, so its next attempt has another name. Both parts are
        the entry's own, because the ticket id in the entry's payload may be wrong.
        """
        return f"{self.entry.ticket}/{self.entry.id}"

    def is_ready(self, version: Version | None, steady: bool) -> bool:
        """Return whether the job may start with the engine at `version`; False for None, no weights.

        A training ticket needs a step of at least its min_step: with min_step 3, versions 1.3 and 1.4
        do. An eval ticket needs exactly its version, and an engine that is not loading weights
        (`steady`).
        """
        if self.ticket.purpose == "eval":
            return steady and version == self.ticket.version
        return version is not None and version.step >= self.ticket.min_step


class HeldTickets:
    """The jobs that an actor holds, at first none, in the order in which they were added.

    `credit` is the most training tickets that `places` lets the actor hold. `stuck_at` is the engine's
    version at which tickets had to be given back, as the actor could not get the weights they wait for.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self.stuck_at: Version | None = None
        self._jobs: dict[str, Job] = {}
        self._last_size: dict[Purpose, int] = {"train": 0, "eval": 0}

    def __contains__(self, entry: Entry) -> bool:
        """Return whether a job with this entry's ticket and entry id is held."""
        return any(
            (job.entry.ticket, job.entry.id) == (entry.ticket, entry.id) for job in self._jobs.values()
        )

    def __bool__(self) -> bool:
        """Return whether any job is held. Any thread may ask."""
        return bool(self._jobs)

    @property
    def running(self) -> list[Job]:
        """Return a new list of the started jobs, oldest first: those being sampled or handed off."""
        return [job for job in self._jobs.values() if job.running]

    @property
    def sampling(self) -> bool:
        """Return whether the engine works on a started job, which is not `over`."""
        return any(not job.over for job in self.running)

    @property
    def waiting(self) -> list[Job]:
        """Return a new list of the jobs that have not started, oldest first."""
        return [job for job in self._jobs.values() if not job.running]

    def add(self, job: Job) -> None:
        """Hold a job, replacing one of the same `request_id`; store its group's size for `places`."""
        self._jobs[job.request_id] = job
        self._last_size[job.ticket.purpose] = job.ticket.num_generations

    def remove(self, job: Job) -> None:
        """Stop holding a job; do nothing if it is not held."""
        self._jobs.pop(job.request_id, None)

    def pins_version(self) -> bool:
        """Return whether an eval ticket is running, during which the weights must not change."""
        return any(job.ticket.purpose == "eval" for job in self.running)

    def startable(self, version: Version | None, steady: bool) -> list[Job]:
        """Return the waiting jobs that may start now: first eval tickets, each kind oldest first.

        `version` is the engine's (None: no weights). `steady`: the engine is loading no weights; only
        then do eval tickets start. Once a job marked `alone` is ready, no other job starts until that
        job has ended. That job starts when none runs any more: if the engine dies then, that ticket is
        known to be the cause.
        """
        running = self.running
        if any(job.alone for job in running):
            return []
        ready = [job for job in self.waiting if job.is_ready(version, steady)]
        lonely = [job for job in ready if job.alone]
        if lonely:
            return [] if running else lonely[:1]
        return sorted(ready, key=lambda job: job.ticket.purpose != "eval")

    def places(self, purpose: Purpose, room: int, version: Version | None) -> int:
        """Return how many more tickets of `purpose` to take; the engine has room for `room` completions.

        `version` is the engine's (None: no weights). A group is assumed to be as large as the last one
        held of its purpose; without one, at most 1 is taken. Example: room for 20 completions, 4
        promised to waiting tickets, 8 in the last group: 2. While no job runs, the result is at least 1,
        because the learner may need that ticket's group before it publishes the version for which others
        wait. But at most `credit` train tickets are held. Without a version, or while a job marked
        `alone` runs or may start, the result is 0.
        """
        alone = [job for job in self._jobs.values() if job.alone]
        if version is None or any(job.running or job.is_ready(version, steady=True) for job in alone):
            return 0
        waiting = sum(job.ticket.num_generations for job in self.waiting)
        size = self._last_size[purpose]
        count = (room - waiting) // size if size else min(1, room - waiting)
        if not self.running:
            count = max(1, count)
        if purpose == "train":
            held = sum(job.ticket.purpose == "train" for job in self._jobs.values())
            count = min(count, self._credit - held)
        return max(0, count)
