"""A run at one instant, as people watch it: its learner, its processes, and what lies in its streams."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.process_status import (
    LearnerProgress,
    WorkerStatus,
    read_progress,
    read_workers,
    server_time_ms,
)
from penstock.common.broker.run_view import LearnerStatus
from penstock.common.errors import NotPermitted, WrongType
from penstock.common.monitor.snapshot import StreamStatus, read_stream, view_of
from penstock.common.wire.messages import END_STATES

GONE_S = 6.0
"""A process that writes a status every 2 s is called gone after so many seconds without one."""

_AHEAD_MS = 60_000  # of a status that was written after the overview's time was read


_COUNTED = ("issued", *END_STATES)
_NUMBER = re.compile(r"[0-9]{1,15}")
"""What Penstock writes as a number; another client's may be too long to be read."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A run at the server's time `now_ms`, in ms since 1970.

    `heartbeat_s` is the age of the learner's last heartbeat, `version` that of the announced weights
    ("" before any), `progress` None before the first learner. `workers` are actors and rewarders by
    name, also those that are gone; `streams` are by short name, such as "rollouts". `totals` counts
    tickets: issued and by end state. `server_fault` is a sentence on why the server takes no writes, ""
    if it does. `folder` is the run's, for commands to type.
    """

    run: str
    server: str
    state: str
    now_ms: int
    learner: LearnerStatus
    heartbeat_s: float
    version: str
    progress: LearnerProgress | None
    workers: dict[str, WorkerStatus]
    streams: dict[str, StreamStatus]
    totals: dict[str, int]
    server_fault: str = ""
    folder: str = ""

    def age_s(self, worker: WorkerStatus) -> float:
        """Return the seconds since a worker's status. One of the future is no process's: infinite."""
        age_ms = self.now_ms - worker.at_ms
        return max(0, age_ms) / 1000 if age_ms > -_AHEAD_MS else math.inf

    def is_gone(self, worker: WorkerStatus) -> bool:
        """Return whether a worker has written no status for GONE_S."""
        return self.age_s(worker) >= GONE_S

    def running(self, role: str) -> dict[str, WorkerStatus]:
        """Return the workers of a role, by name, that are not gone."""
        return self._workers(role, gone=False)

    def gone(self, role: str) -> dict[str, WorkerStatus]:
        """Return the workers of a role, by name, that did not leave and are gone."""
        return self._workers(role, gone=True)

    def _workers(self, role: str, gone: bool) -> dict[str, WorkerStatus]:
        """Return the workers of a role, by name, for which `is_gone` gives `gone`."""
        return {
            name: status
            for name, status in self.workers.items()
            if status.role == role and self.is_gone(status) == gone
        }


def read_overview(connection: Connection, run: str, folder: str = "") -> Overview:
    """Return the overview of the run named `run`, which is in `folder`, by default runs/NAME.

    What another client wrote in its place is left out. The cost does not depend on the number of
    open tickets. Raise RunNotReady if no learner has claimed the run, ServerUnavailable or another error
    of Connection.execute.
    """
    keys, view = view_of(connection, run)
    learner = view.learner()
    now_ms, weights = server_time_ms(connection), view.weights()
    try:
        progress = read_progress(connection, keys.processes)
        workers, _ = read_workers(connection, keys.processes)
        counts = connection.execute("HMGET", keys.ledger, *_COUNTED)
    except (NotPermitted, WrongType):
        progress, workers, counts = None, {}, []
    totals = dict(zip(_COUNTED, counts, strict=False))
    seen = int(learner.seen) if _NUMBER.fullmatch(learner.seen) else now_ms
    streams = [
        read_stream(connection, key, now_ms) for key in (*keys.work_streams, *keys.outcome_streams)
    ]
    return Overview(
        run, connection.address, text(connection.execute("GET", keys.state) or b"starting"), now_ms,
        learner, max(0, now_ms - seen) / 1000, str(weights.version) if weights else "",
        progress, workers, {stream.name: stream for stream in streams},
        {name: int(count) for name, count in totals.items() if count and _NUMBER.fullmatch(text(count))},
        server_fault(connection.execute("INFO")), folder or f"runs/{run}",
    )  # fmt: skip


def server_fault(info: Mapping[str, Any]) -> str:
    """Return a sentence on why the server with this INFO takes no writes, or may; "" if it does."""
    if info.get("role") == "slave":
        return "The queue server takes no writes: it is a replica. Name the primary in REDIS_URL."
    if info.get("loading"):
        return "The queue server loads its data: work goes on when it is done."
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return "The queue server cannot write its file: make room on its disk."
    if info.get("rdb_last_bgsave_status", "ok") != "ok":  # INFO hides stop-writes-on-bgsave-error
        return "The queue server could not save, and may take no writes: make room on its disk."
    if info.get("min_slaves_good_slaves") == 0:  # stated if min-replicas-to-write is 1 or more
        return "The queue server takes no writes: it has none of the replicas that it needs for one."
    used, most = info.get("used_memory", 0), info.get("maxmemory", 0)
    if most and used >= most:
        return (
            f"The queue server's memory is full ({used >> 20} of {most >> 20} MiB): raise its maxmemory."
        )
    return ""
