"""The tickets that an actor holds: which of them may start, and how many more to take. No I/O.

taken -> waiting (for its version, for its turn) -> running -> removed
"""

from dataclasses import dataclass

from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.wire.ids import Purpose, Version
from penstock.common.wire.messages import Ticket


@dataclass(slots=True, eq=False)
class Job:
    """One held ticket. `lost` is set when the lease has passed to another actor.

    `alone` marks a ticket's last attempt, during which nothing else may run.
    """

    stream: WorkStream
    entry: Entry
    ticket: Ticket
    alone: bool
    running: bool = False
    lost: bool = False

    @property
    def request_id(self) -> str:
        """The engine's name for this attempt; another attempt at the same ticket has another name.

        The name is made of the entry alone: the ticket id in the entry's payload may be wrong.
        """
        return f"{self.entry.ticket}/{self.entry.id}"

    def is_ready(self, version: Version | None, steady: bool) -> bool:
        """Return whether the job may start with the engine at `version`.

        A training ticket needs at least its min_step: with min_step 3, versions 1.3 and 1.4 do. An eval
        ticket needs exactly its version, and an engine that is not loading weights (`steady`).
        """
        if self.ticket.purpose == "eval":
            return steady and version == self.ticket.version
        return version is not None and version.step >= self.ticket.min_step


class HeldTickets:
    """The jobs of an actor, in the order in which they were taken; at most `credit` train."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._jobs: dict[str, Job] = {}
        self._last_size: dict[Purpose, int] = {"train": 0, "eval": 0}

    def __contains__(self, entry: Entry) -> bool:
        """Return whether the ticket is held as this very entry."""
        return any(
            (job.entry.ticket, job.entry.id) == (entry.ticket, entry.id) for job in self._jobs.values()
        )

    @property
    def running(self) -> list[Job]:
        """Jobs that have started: those being sampled or handed off."""
        return [job for job in self._jobs.values() if job.running]

    @property
    def waiting(self) -> list[Job]:
        """Jobs that have not started."""
        return [job for job in self._jobs.values() if not job.running]

    def add(self, job: Job) -> None:
        """Hold a job; note its number of completions for `places`."""
        self._jobs[job.request_id] = job
        self._last_size[job.ticket.purpose] = job.ticket.num_generations

    def remove(self, job: Job) -> None:
        """Stop holding a job; do nothing if it is not held."""
        self._jobs.pop(job.request_id, None)

    def pins_version(self) -> bool:
        """Return whether an eval ticket is running, during which the weights must not change."""
        return any(job.ticket.purpose == "eval" for job in self.running)

    def startable(self, version: Version | None, steady: bool) -> list[Job]:
        """Return the jobs that may start now with this version loaded (None: none), eval tickets first.

        `steady`: the engine is loading no weights; only then do eval tickets start. Once a job marked
        `alone` is ready, no other starts until that job has ended, and that job starts when none runs
        any more: if the engine dies then, that ticket is known to be the cause.
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
        """Return how many more tickets to take while the engine has room for `room` completions.

        A group is assumed to be as large as the last of its purpose; without one, at most 1 is taken.
        Example: room for 20 completions, 4 promised to waiting tickets, 8 in the last group: 2. While no
        job runs, the result is at least 1, because the learner may need that ticket's group before it
        publishes the version for which others wait. But at most `credit` train tickets are held.
        Without a version, or while a job runs alone or is about to, the result is 0.
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
