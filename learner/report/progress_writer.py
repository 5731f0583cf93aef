"""The learner's progress on the queue server, for `queues watch` and `penstock up`."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from penstock.common.broker.process_status import (
    LEARNER,
    LearnerProgress,
    read_progress,
    read_workers,
    server_time_ms,
    write_status,
)
from penstock.common.errors import CommandRefused, MalformedMessage, NotPermitted, RunNotReady, WrongType
from penstock.common.log import get_logger
from penstock.learner.streams.learner_queue import LearnerQueue

_SHOWN_STEPS, _MEAN_STEPS = 60, 5
_FORGOTTEN_MS = 600_000  # a worker's status is deleted when it was not renewed for so long
_CLEAN_MS = 60_000

log = get_logger(__name__)


class ProgressWriter:
    """Writes a LearnerProgress to the queue server of `queue` after each step and each evaluation.

    `step` of `steps` are made, and `asked` groups are a step's. What an earlier learner of the run wrote
    is continued. A refused write is logged once: nothing but what people see depends on it. Raise
    ServerUnavailable, or another error of Connection.execute.
    """

    def __init__(self, queue: LearnerQueue, step: int, steps: int, asked: int) -> None:
        self._connection, self._key = queue.connection, queue.keys.processes
        self._step, self._steps, self._asked = step, steps, asked
        self._rewards: deque[float] = deque(maxlen=_SHOWN_STEPS)
        self._evaluations: dict[int, float] = {}
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_MEAN_STEPS)
        self._waits: deque[float] = deque(maxlen=_MEAN_STEPS)  # of the steps that `_step_s` counts
        self._trained, self._logged, self._cleaned_ms = 0, False, 0
        self._made_at: deque[float] = deque(maxlen=_MEAN_STEPS + 1)
        before = self._read()
        if before is not None and before.step <= step:
            self._rewards.extend(before.rewards)
            self._evaluations = dict(zip(before.evaluated, before.heldout, strict=False))
        self._write()

    def made_step(self, step: int, trained: int, metrics: Mapping[str, Any]) -> None:
        """Write that `step` was made of `trained` groups, with these `metrics`.

        Raise ServerUnavailable, or another error of Connection.execute.
        """
        self._step, self._trained = step, trained
        if self._made_at:
            self._waits.append(metrics.get("perf/rollout_wait_s") or 0.0)
        self._made_at.append(time.monotonic())
        self._rewards.append(metrics.get("reward", math.nan))
        self._rows.append(metrics)
        self._write()

    def evaluated(self, step: int, value: float) -> None:
        """Write the main reward's mean `value` of the evaluation of `step`.

        Raise ServerUnavailable, or another error of Connection.execute.
        """
        self._evaluations[step] = value
        self._write()

    def _write(self) -> None:
        """Write the progress, and once a minute delete what no process renews. A refusal is logged."""
        self._evaluations = dict(sorted(self._evaluations.items())[-_SHOWN_STEPS:])
        try:
            now_ms = server_time_ms(self._connection)
            status = LearnerProgress(
                now_ms, self._step, self._steps, tuple(self._rewards), tuple(self._evaluations),
                tuple(self._evaluations.values()), self._mean("sample/staleness_mean"),
                self._step_s(), sum(self._waits) / max(1, len(self._waits)),
                self._mean("perf/tokens_per_s"), self._trained, self._asked,
            )  # fmt: skip
            write_status(self._connection, self._key, LEARNER, status)
            self._clean(now_ms)
        except (
            CommandRefused, MalformedMessage, NotPermitted, RunNotReady, WrongType
        ) as error:  # fmt: skip
            if not self._logged:
                log.warning("`queues watch` does not see the learner's progress.", cause=str(error))
            self._logged = True

    def _clean(self, now_ms: int) -> None:
        """Once a minute delete fields that no process renews: workers' of old, and other clients'."""
        if now_ms - self._cleaned_ms < _CLEAN_MS:
            return
        self._cleaned_ms = now_ms
        workers, strange = read_workers(self._connection, self._key)
        old = [name.encode() for name, one in workers.items() if abs(now_ms - one.at_ms) > _FORGOTTEN_MS]
        if old or strange:
            self._connection.execute("HDEL", self._key, *old, *strange)

    def _read(self) -> LearnerProgress | None:
        """Return what an earlier learner wrote, None for a key that cannot be read."""
        try:
            return read_progress(self._connection, self._key)
        except (NotPermitted, WrongType):
            return None

    def _step_s(self) -> float:
        """Return the mean seconds from step to step of the newest ones, with all that is between.

        The first step of this process began with the wait for vLLM: until the second one it is left out.
        """
        steps = len(self._made_at) - 1
        return (self._made_at[-1] - self._made_at[0]) / steps if steps > 0 else 0.0

    def _mean(self, name: str) -> float:
        """Return the mean of a metric over the newest steps that have it, 0 without one."""
        values = [row[name] for row in self._rows if row.get(name) is not None]
        return sum(values) / len(values) if values else 0.0
