"""The tickets an actor holds: which may start now, and how many more to take. No I/O.

taken -> waiting (for its version, for its turn) -> running -> gone
"""

from dataclasses import dataclass

from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.wire.ids import Purpose, Version
from penstock.common.wire.messages import Ticket


@dataclass(slots=True, eq=False)
class Job:
    """A ticket in hand. `alone`: its last attempt, without company; `lost`: its lease is gone."""

    stream: WorkStream
    entry: Entry
    ticket: Ticket
    alone: bool
    running: bool = False
    lost: bool = False

    @property
    def request_id(self) -> str:
        """A name for the engine; another attempt at the ticket has another."""
        return _request_id(self.entry)

    def is_ready(self, version: Version | None, steady: bool) -> bool:
        """Whether the engine's version suits; an eval ticket also needs it to stay (`steady`)."""
        if version is None:
            return False
        if self.ticket.purpose == "eval":
            return steady and version == self.ticket.version
        return version.step >= self.ticket.min_step


class HeldTickets:
    """The jobs of an actor, in the order in which they were taken."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._jobs: dict[str, Job] = {}
        self._last_size: dict[Purpose, int] = {"train": 0, "eval": 0}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, entry: Entry) -> bool:
        return _request_id(entry) in self._jobs

    @property
    def running(self) -> list[Job]:
        """Jobs that the engine has."""
        return [job for job in self._jobs.values() if job.running]

    @property
    def waiting(self) -> list[Job]:
        """Jobs that the engine does not have yet."""
        return [job for job in self._jobs.values() if not job.running]

    def add(self, job: Job) -> None:
        """Hold a job."""
        self._jobs[job.request_id] = job
        self._last_size[job.ticket.purpose] = job.ticket.num_generations

    def remove(self, job: Job) -> None:
        """Hold a job no more."""
        self._jobs.pop(job.request_id, None)

    def pins_version(self) -> bool:
        """Whether an eval ticket is being sampled, so that the weights must stay."""
        return any(job.ticket.purpose == "eval" for job in self.running)

    def startable(self, version: Version | None, steady: bool) -> list[Job]:
        """What may start now, eval tickets first.

        While a job runs alone nothing starts, and one that is to run alone starts when all the
        others are done: should the engine die, the culprit is known.
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
        """How many more tickets to take while the engine has room for so many completions.

        Groups are taken to be as large as the last one. When everything in hand waits, one more is
        taken all the same: the learner may need it before it publishes what the others wait for.
        """
        if version is None or any(
            job.alone and (job.running or job.is_ready(version, steady=True))
            for job in self._jobs.values()
        ):
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


def _request_id(entry: Entry) -> str:
    """By the entry alone: what its payload says may be wrong."""
    return f"{entry.ticket}/{entry.id}"
