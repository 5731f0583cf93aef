"""What each process of a run tells of itself, in the hash `processes` on the queue server, for people.

Nothing of the protocol depends on it. The field of an actor or a rewarder is its consumer's name, the
learner's is "learner". Times are the server's, because hosts' clocks differ.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.common.broker.connection import Connection, text
from penstock.common.errors import MalformedMessage
from penstock.common.wire.codec import decode, encode

LEARNER = "learner"
"""The field of the learner's progress."""


@dataclass(frozen=True, slots=True)
class WorkerSign:
    """An actor or a rewarder, at the server's time `at_ms`, in ms since 1970.

    `version` is that of an actor's weights, "" before any and for a rewarder. `phase` is one of PHASES
    in costs.py. Since the sign before, `busy` is the share of time outside of waits for work, 0 to 1,
    and `rate` an actor's tokens or a rewarder's groups per second.
    """

    role: Literal["actor", "rewarder"]
    host: str
    at_ms: int
    version: str
    phase: str
    busy: float
    rate: float


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """The learner after `step` of `steps` Updates, at the server's time `at_ms`, in ms since 1970.

    `rewards` has the mean rewards of the newest steps, the newest last; NaN without a reward. `heldout`
    has the main reward of the newest evaluations, at the steps `evaluated`. Of the newest steps
    `step_s`, `wait_s` and `tokens_per_s` are means: seconds per step, those of waiting for groups, and
    trained tokens per second. `trained` and `asked` are groups of the last step.
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


def server_time_ms(connection: Connection) -> int:
    """Return the server's time in ms since 1970. Raise ServerUnavailable if it does not answer."""
    seconds, microseconds = connection.execute("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def write_sign(connection: Connection, key: str, name: str, sign: WorkerSign | LearnerProgress) -> None:
    """Replace the process `name` in the hash `key`. Raise Connection.execute's errors."""
    connection.execute("HSET", key, name, encode(sign))


def read_signs(fields: Mapping[bytes, bytes]) -> tuple[LearnerProgress | None, dict[str, WorkerSign]]:
    """Return the learner's progress and the other processes' signs by name, from the hash's fields.

    What cannot be decoded, as of another release or another client, is left out.
    """
    progress: LearnerProgress | None = None
    workers: dict[str, WorkerSign] = {}
    for name, data in sorted(fields.items()):
        with contextlib.suppress(MalformedMessage):
            if text(name) == LEARNER:
                progress = decode(data, LearnerProgress)
            else:
                workers[text(name)] = decode(data, WorkerSign)
    return progress, workers


class SignWriter:
    """Writes the signs of the actor or rewarder `name` to the hash `key`, as its CostReport asks.

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
        """Write the sign: in `phase` now, and outside of waits for the share `busy` of the last seconds.

        Raise Connection.execute's errors.
        """
        version, done = self._tell()
        (then, done_then), now = self._last, time.monotonic()
        self._last = (now, done)
        rate = (done - done_then) / max(now - then, 1e-3)
        at_ms = server_time_ms(self._connection)
        sign = WorkerSign(self._role, socket.gethostname(), at_ms, version, phase, busy, rate)
        write_sign(self._connection, self._key, self._name, sign)

    def remove(self) -> None:
        """Remove the sign, as the process leaves the run. Raise Connection.execute's errors."""
        self._connection.execute("HDEL", self._key, self._name)
