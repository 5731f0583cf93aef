"""What a run's processes cost: actors and rewarders add it up on the queue server for the learner."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil

from penstock.common.broker.connection import Connection
from penstock.common.broker.process_status import StatusWriter
from penstock.common.errors import CommandRefused, MalformedMessage, NotPermitted, RunNotReady, WrongType
from penstock.common.log import get_logger
from penstock.common.phases import PhaseCost, Phases, costs_by_name

_SEND_S = 2.0
_UNSEEN = "`queues watch` and the live screen do not see this process."
PHASES = {
    "actor": ("waiting for tickets", "waiting for the device", "changing weights", "generating"),
    "rewarder": ("waiting for groups", "scoring"),
}
"""By role, what its processes are doing."""

log = get_logger(__name__)


def _fields(role: str) -> list[str]:
    """Return a role's fields of the hash of costs, such as "actor/generating_cpu_s"."""
    phases = costs_by_name(role, dict.fromkeys(PHASES[role], PhaseCost()))
    return [*phases, f"{role}/subprocesses_cpu_s"]


LOST_TOKENS = "actor/lost_tokens"
"""Tokens that actors sampled and that no actor continues: of turns that begin anew, above all."""

FIELDS = [LOST_TOKENS, *(field for role in PHASES for field in _fields(role))]
"""Sums over all processes of a role: seconds in a phase, CPU seconds meanwhile, and those of their
subprocesses, such as vLLM's engine, tools and the scoring processes; lost tokens."""


class Load:
    """The mean share of a process's `places` for work that is in use. Any thread may use a place."""

    def __init__(self, places: int) -> None:
        self._places, self._used, self._used_s = places, 0, 0.0
        self._counted_to = self._taken_at = time.monotonic()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Use a place during the block."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def take(self) -> float:
        """Return the mean share, 0 to 1, since the last call, or since this object was created."""
        self._change(0)
        with self._lock:
            share = self._used_s / self._places / max(1e-9, self._counted_to - self._taken_at)
            self._used_s, self._taken_at = 0.0, self._counted_to
        return share

    def _change(self, by: int) -> None:
        """Count the time since the last change for the places that were in use; then use `by` more."""
        with self._lock:
            now = time.monotonic()
            self._used_s += self._used * (now - self._counted_to)
            self._counted_to, self._used = now, self._used + by


class CostReport:
    """Counts this process's time by phase, and adds it to the hash `key` on the queue server.

    `role` is one of PHASES; its first phase is the present one. `status` tells people of this process
    with each report, if given: how busy it is by its `load`, else by its waits. A report that the server
    refuses is dropped, and the first one logged: nothing but the learner's metrics and what people see
    depends on it.
    """

    def __init__(
        self, connection: Connection, key: str, role: str, status: StatusWriter | None = None,
        load: Load | None = None,
    ) -> None:  # fmt: skip
        self._connection, self._key, self._role, self._status = connection, key, role, status
        self._load = load
        self._phases = Phases()
        self._amounts: dict[str, float] = {}
        self._phases.name = PHASES[role][0]
        self._subprocesses: dict[tuple[int, float], float] = {}
        self._send_at = time.monotonic() + (0 if status else _SEND_S)  # people see a process at once
        self._logged: set[str] = set()

    def note(self, phase: str) -> None:
        """Count the time since the last call for the phase noted then. `phase` is the present one.

        A loop calls this at each turn: what happens between two calls counts for one phase.
        """
        self._phases.change_to(phase)

    def add(self, field: str, amount: float) -> None:
        """Add `amount` to a field that is no time, such as LOST_TOKENS, with the next report."""
        self._amounts[field] = self._amounts.get(field, 0.0) + amount

    def send_if_due(self) -> None:
        """Send the report every 2 s, as `send` does."""
        if time.monotonic() >= self._send_at:
            self.send()

    def send(self) -> None:
        """Add what was counted since the last call to the sums on the server, and write the status.

        A reply that is lost may count twice. Raise ServerUnavailable and Connection.execute's other
        errors that do not concern the report alone.
        """
        self._send_at = time.monotonic() + _SEND_S
        profile = self._phases.take_profile()
        costs = costs_by_name(self._role, profile)
        costs[f"{self._role}/subprocesses_cpu_s"] = self._take_subprocesses()
        costs |= self._amounts
        self._amounts = {}
        waited_s = sum(one.seconds for name, one in profile.items() if name.startswith("waiting "))
        all_s = max(1e-9, sum(cost.seconds for cost in profile.values()))
        busy = self._load.take() if self._load else 1 - waited_s / all_s

        def add() -> None:
            """Add what was counted to the sums. Raise Connection.execute's errors."""
            for field, amount in costs.items():
                if amount > 0:
                    self._connection.execute("HINCRBYFLOAT", self._key, field, f"{amount:.6f}")

        self._try(add, "The learner's metrics perf/ lack this process's time.")
        if self._status:
            self._try(partial(self._status.write, self._phases.name, busy), _UNSEEN)

    def leave(self) -> None:
        """Send a last report, and remove the status. Raise what `send` raises."""
        self.send()
        if self._status:
            self._try(self._status.remove, _UNSEEN)

    def _try(self, report: Callable[[], None], missing: str) -> None:
        """Call `report`. Of its errors that concern the report alone log the first; raise the others.

        `missing` is a sentence on what is not there then.
        """
        try:
            report()
        except (
            CommandRefused, MalformedMessage, NotPermitted, RunNotReady, WrongType
        ) as error:  # fmt: skip
            if missing not in self._logged:
                log.warning(missing, cause=str(error))
            self._logged.add(missing)

    def _take_subprocesses(self) -> float:
        """Return the CPU seconds that living subprocesses, and theirs, used since the last call.

        What a process used between the last call and its end is not counted.
        """
        found: dict[tuple[int, float], float] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
        before, self._subprocesses = self._subprocesses, found
        return sum(seconds - before.get(process, 0.0) for process, seconds in found.items())


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
