"""Measure what people's screens cost: processor time of a look and of a status, and bytes on the server.

    python -m benchmarks.watch_cost [--json]

A run of eight actors on a real queue server, a screen of 100 x 30. There is a look every two seconds,
and a status of each process too. The goal is at most 1% of the run's processor time. The demo uses 1.3 s
of processor time per second, so that is 26 ms for two seconds, and under 1 MB on the server.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.process_status import StatusWriter
from penstock.common.monitor.screen import render
from penstock.common.monitor.watch import RunWatch
from penstock.learner.report.progress_writer import ProgressWriter
from penstock.learner.streams.learner_queue import LearnerQueue

GOAL_MS, GOAL_BYTES = 26.0, 1e6
_ACTORS, _TIMES = 8, 200


def fill(connection: Connection, keys: Keys) -> StatusWriter:
    """Write a run of 60 steps with eight actors; return the writer of the last one's statuses."""
    queue = LearnerQueue(connection, keys, 1)
    queue.claim("nonce", "benchmark")
    queue.set_state("running")
    queue.beat(3600.0, "waiting for groups")
    progress = ProgressWriter(queue, 0, 100, 64)
    for step in range(1, 61):
        progress.made_step(step, 64, {"reward": step / 100, "perf/rollout_wait_s": 0.5})
    for number in range(_ACTORS):
        name = f"actor-host-{number}-abcdef"
        writer = StatusWriter(connection, keys.processes, name, "actor", lambda: ("1.60", 1000))
        writer.write("generating", 0.9)
    return writer


def measure(connection: Connection, keys: Keys) -> dict[str, float]:
    """Milliseconds of processor time here and in the server, and bytes."""
    writer = fill(connection, keys)
    server = psutil.Process(connection.execute("INFO")["process_id"])
    watch = RunWatch(lambda: connection, "cost")
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)

    def spent(call: Any) -> tuple[float, float]:
        """Milliseconds of this process and of the server for a call, the mean of many."""
        here, there = time.process_time(), sum(server.cpu_times()[:2])
        for _ in range(_TIMES):
            call()
        ended = (time.process_time(), sum(server.cpu_times()[:2]))
        return 1000 * (ended[0] - here) / _TIMES, 1000 * (ended[1] - there) / _TIMES

    with Live(console=console, screen=True, auto_refresh=False) as live:

        def look() -> None:
            """Look and draw, as the live screen does every two seconds."""
            now, sentence = watch.look()
            live.update(render(now, sentence, ["a line of the log"] * 20, 100, 30), refresh=True)

        look_ms, server_ms = spent(look)
    status_ms, _ = spent(lambda: writer.write("generating", 0.9))
    size = connection.execute("MEMORY", "USAGE", keys.processes)
    return {"look_ms": look_ms, "server_ms": server_ms, "status_ms": status_ms, "bytes": size}


def main() -> int:
    """Measure; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.watch_cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalServer(Path(folder) / "server") as server:
        found = measure(Connection(server.url, 10, 10), Keys("cost"))
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"a look {found['look_ms']:.1f} ms and {found['server_ms']:.2f} ms of the server, "
            f"a status {found['status_ms']:.2f} ms; {found['bytes']:.0f} bytes"
        )
    spent_ms = found["look_ms"] + found["server_ms"] + _ACTORS * found["status_ms"]
    return int(spent_ms > GOAL_MS or found["bytes"] > GOAL_BYTES)


if __name__ == "__main__":
    sys.exit(main())
