"""What a run's processes cost: actors and rewarders add it up on the queue server for the learner."""

import math
import os
import time

import psutil

from penstock.common.broker.connection import Connection
from penstock.common.errors import CommandRefused, NotPermitted, RunNotReady, WrongType
from penstock.common.log import get_logger

_SEND_S = 2.0
PHASES = {
    "actor": ("waiting for tickets", "changing weights", "generating"),
    "rewarder": ("waiting for groups", "scoring"),
}
"""By role, what its processes are doing."""

log = get_logger(__name__)


def _fields() -> list[str]:
    """Return the fields of the hash of costs, such as "actor/generating_cpu_s"."""
    found = []
    for role, phases in PHASES.items():
        for phase in phases:
            name = f"{role}/{phase.replace(' ', '_')}"
            found += [f"{name}_s", f"{name}_cpu_s"]
        found.append(f"{role}/subprocesses_cpu_s")
    return found


FIELDS = _fields()
"""Sums over all processes of a role: seconds in a phase, CPU seconds meanwhile, and those of their
subprocesses, such as vLLM's engine, tools and the scoring processes."""


class CostReport:
    """Counts this process's time by phase, and adds it to the hash `key` on the queue server.

    `role` is one of PHASES; its first phase is the present one. A report that the server refuses is
    dropped, and the first one logged: nothing but the learner's metrics depends on it.
    """

    def __init__(self, connection: Connection, key: str, role: str) -> None:
        self._connection, self._key, self._role = connection, key, role
        self._phase = PHASES[role][0]
        self._counted_to = (time.monotonic(), time.process_time())
        self._unsent: dict[str, float] = {}
        self._subprocesses: dict[tuple[int, float], float] = {}
        self._send_at = time.monotonic() + _SEND_S
        self._logged = False

    def note(self, phase: str) -> None:
        """Count the time since the last call for the phase noted then. `phase` is the present one.

        A loop calls this at each turn: what happens between two calls counts for one phase.
        """
        now = (time.monotonic(), time.process_time())
        name = f"{self._role}/{self._phase.replace(' ', '_')}"
        self._add(f"{name}_s", now[0] - self._counted_to[0])
        self._add(f"{name}_cpu_s", now[1] - self._counted_to[1])
        self._counted_to, self._phase = now, phase

    def send_if_due(self) -> None:
        """Send the report every 2 s, as `send` does."""
        if time.monotonic() >= self._send_at:
            self.send()

    def send(self) -> None:
        """Add what was counted since the last call to the sums on the queue server.

        A reply that is lost may count twice. Raise ServerUnavailable and Connection.execute's other
        errors that do not concern the report alone.
        """
        self._send_at = time.monotonic() + _SEND_S
        self.note(self._phase)
        self._count_subprocesses()
        unsent, self._unsent = self._unsent, {}
        try:
            for field, seconds in unsent.items():
                self._connection.execute("HINCRBYFLOAT", self._key, field, f"{seconds:.6f}")
        except (CommandRefused, NotPermitted, RunNotReady, WrongType) as error:
            if not self._logged:
                log.warning("The learner's metrics perf/ lack this process's time.", cause=str(error))
            self._logged = True

    def _add(self, field: str, seconds: float) -> None:
        """Add seconds, if there are any, to those that the next report sends for `field`."""
        if seconds > 0:
            self._unsent[field] = self._unsent.get(field, 0.0) + seconds

    def _count_subprocesses(self) -> None:
        """Count the CPU time that living subprocesses, and theirs, used since the last call.

        What a process used between the last call and its end is not counted.
        """
        found = {}
        for process in psutil.Process(os.getpid()).children(recursive=True):
            try:
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:  # it has ended
                continue
        before = self._subprocesses
        used = sum(seconds - before.get(process, 0.0) for process, seconds in found.items())
        self._subprocesses = found
        self._add(f"{self._role}/subprocesses_cpu_s", used)


class FleetCosts:
    """Reads what all processes of the run reported to the hash `key`, for the learner.

    What was reported before this object was made is not counted.
    """

    def __init__(self, connection: Connection, key: str) -> None:
        self._connection, self._key = connection, key
        self._taken = self._read()

    def take(self) -> dict[str, float]:
        """Return by field what was reported since the last call; a field without a report is missing.

        A sum that is smaller than at the last call began again, on a server that was emptied. Raise
        ServerUnavailable and the other errors of Connection.execute.
        """
        before, self._taken = self._taken, self._read() or self._taken
        sums = self._taken.items()
        grown = {field: found - before.get(field, 0.0) for field, found in sums}
        return {
            field: more if more >= 0 else self._taken[field] for field, more in grown.items() if more
        }

    def _read(self) -> dict[str, float]:
        """Return the sums on the server by field. What is no finite number, or below 0, is left out.

        A hash that cannot be read gives {}: the learner restores a key of another type.
        """
        try:
            values = self._connection.execute("HMGET", self._key, *FIELDS)
        except (NotPermitted, WrongType):
            return {}
        found = {}
        for field, value in zip(FIELDS, values, strict=True):
            try:
                seconds = float(value or 0)
            except ValueError:
                continue
            if math.isfinite(seconds) and seconds > 0:
                found[field] = seconds
        return found
