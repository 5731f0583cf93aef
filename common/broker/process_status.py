"""What each process of a run tells of itself, in the hash `processes` on the queue server, for people.

Nothing of the protocol depends on it. The field of an actor or a rewarder is its consumer's name, the
learner's is "learner". Times are the server's, because hosts' clocks differ.
"""

import contextlib
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from penstock.common.broker.connection import Connection, text
from penstock.common.errors import MalformedMessage
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.limits import LONGEST_NAME, MOST_NAMES, check_range, require

_MOST_FIELDS, _LONGEST_FIELD, _LONGEST_VALUE = 2000, 200, 8000
"""Of the hash no more is read: any actor may write there."""

LATEST_MS = 2**53
_FASTEST, _LARGEST, _ROUNDING = 1e12, 1e100, 1e-6

Status = TypeVar("Status")

LEARNER = "learner"
"""The field of the learner's progress."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """An actor or a rewarder, at the server's time `at_ms`, in ms since 1970.

    `version` is that of an actor's weights, "" before any and for a rewarder. `phase` is one of PHASES
    in costs.py. Since the status before, `busy` is an actor's share of time outside of waits for work or
    a rewarder's mean share of scoring processes that work, 0 to 1, and `rate` an actor's tokens or a
    rewarder's groups per second.
    """

    role: Literal["actor", "rewarder"]
    host: str
    at_ms: int
    version: str
    phase: str
    busy: float
    rate: float

    def __post_init__(self) -> None:
        """Raise MalformedMessage for long texts, or numbers that no process writes."""
        for text_found in (self.host, self.version, self.phase):
            require(
                len(text_found) <= LONGEST_NAME, "a status: expected a short text, found", text_found
            )
        check_range("at_ms", self.at_ms, 0, LATEST_MS)
        check_range("busy", self.busy, -_ROUNDING, 1 + _ROUNDING)
        check_range("rate", self.rate, 0, _FASTEST)


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """The learner after `step` of `steps` Updates, at the server's time `at_ms`, in ms since 1970.

    `rewards` has the mean rewards of the newest steps, the newest last; NaN without a reward. `heldout`
    has the main reward of the newest evaluations, at the steps `evaluated`. Of the newest steps
    `step_s`, `wait_s` and `tokens_per_s` are means: seconds per step, those of waiting for groups, and
    completion tokens of the trained groups per second. `trained` and `asked` are the last step's groups.
    """

    at_ms: int
    step: int
    steps: int
    rewards: tuple[float, ...]
    evaluated: tuple[int, ...]
    heldout: tuple[float, ...]
    staleness: float
    step_s: float
    wait_s: float
    tokens_per_s: float
    trained: int
    asked: int

    def __post_init__(self) -> None:
        """Raise MalformedMessage for long lists, or numbers that no learner writes."""
        check_range("at_ms", self.at_ms, 0, LATEST_MS)
        for values in (self.rewards, self.evaluated, self.heldout):
            require(len(values) <= MOST_NAMES, "progress: expected fewer values, found", len(values))
        require(len(self.evaluated) == len(self.heldout), "progress: expected a value per evaluation")
        for value in (*self.rewards, *self.heldout):
            require(math.isnan(value) or abs(value) < _LARGEST, "progress: found", value)
        for value in (self.step_s, self.wait_s, self.tokens_per_s, self.staleness):
            check_range("a mean", value, 0, _LARGEST)
        for number in (self.step, self.steps, self.trained, self.asked):
            check_range("a count", number, 0, LATEST_MS)


def server_time_ms(connection: Connection) -> int:
    """Return the server's time in ms since 1970. Raise ServerUnavailable if it does not answer."""
    seconds, microseconds = connection.execute("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def write_status(
    connection: Connection, key: str, name: str, status: WorkerStatus | LearnerProgress
) -> None:
    """Replace the process `name` in the hash `key`. Raise Connection.execute's errors."""
    connection.execute("HSET", key, name, encode(status))


def read_progress(connection: Connection, key: str) -> LearnerProgress | None:
    """Return the learner's progress; None if there is none, or another client wrote the field.

    Raise Connection.execute's errors.
    """
    data = connection.execute("HGET", key, LEARNER)
    with contextlib.suppress(MalformedMessage):
        return decode(data, LearnerProgress) if data and len(data) <= _LONGEST_VALUE else None
    return None


def read_workers(connection: Connection, key: str) -> tuple[dict[str, WorkerStatus], list[bytes]]:
    """Return the statuses of actors and rewarders by name, and fields to delete; see `read_statuses`."""
    return read_statuses(connection, key, WorkerStatus)


def read_statuses(
    connection: Connection, key: str, kind: type[Status]
) -> tuple[dict[str, Status], list[bytes]]:
    """Return the statuses of a `kind` in the hash `key` by name, and fields to delete.

    These are fields that no process wrote, or one of another release. Raise Connection.execute's errors.
    """
    _, fields = connection.execute("HSCAN", key, 0, "COUNT", _MOST_FIELDS)
    statuses: dict[str, Status] = {}
    strange: list[bytes] = []
    for name, data in sorted(fields.items())[:_MOST_FIELDS]:
        if name == LEARNER.encode():
            continue
        try:
            require(len(name) <= _LONGEST_FIELD and len(data) <= _LONGEST_VALUE, "a status is too long")
            require(text(name).encode() == name, "a process's name: expected UTF-8, found", name)
            statuses[text(name)] = decode(data, kind)
        except MalformedMessage:
            strange.append(name)
    return statuses, strange


class StatusWriter:
    """Writes the statuses of the actor or rewarder `name` to the hash `key`, as its CostReport asks.

    `tell` returns the version of its weights and how much it has done since its start: tokens of an
    actor, groups of a rewarder.
    """

    def __init__(
        self,
        connection: Connection,
        key: str,
        name: str,
        role: Literal["actor", "rewarder"],
        tell: Callable[[], tuple[str, int]],
    ) -> None:
        self._connection, self._key, self._name, self._role = connection, key, name, role
        self._tell = tell
        self._last = (time.monotonic(), tell()[1])

    def write(self, phase: str, busy: float) -> None:
        """Write the status: in `phase` now, and busy for the share `busy` of the last seconds.

        Raise Connection.execute's errors.
        """
        version, done = self._tell()
        (then, done_then), now = self._last, time.monotonic()
        self._last = (now, done)
        rate = (done - done_then) / max(now - then, 1e-3)
        at_ms = server_time_ms(self._connection)
        status = WorkerStatus(self._role, socket.gethostname(), at_ms, version, phase, busy, rate)
        write_status(self._connection, self._key, self._name, status)

    def remove(self) -> None:
        """Remove the status, as the process leaves the run. Raise Connection.execute's errors."""
        self._connection.execute("HDEL", self._key, self._name)
