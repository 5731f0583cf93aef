"""Measure what many connections cost the queue server: groups handed off over 2 to 256 of them.

    python -m benchmarks.connections [--rounds 10] [--json]

One program takes tickets in batches of eight and hands groups of 8 KB off. Each batch goes over the
next of N connections, each of which has a consumer of its own, as each actor has. The numbers of
connections take turns. The goal is that no number loses more than 5% of the rate with two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import WorkStream
from penstock.common.guard import guard_children
from penstock.common.wire.ids import TicketId, Version
from penstock.learner.streams.learner_queue import LearnerQueue

GOAL = 0.95
COUNTS = (2, 16, 64, 256)
GROUPS, BATCH, BYTES = 8192, 8, 8 * 1024
_LEASE_S, _MOST_ATTEMPTS, _WAIT_S = 60.0, 3, 30.0


def rate(url: str, connections: int, groups: int, payload: bytes) -> float:
    """Groups per second over so many connections; the tickets are issued before the clock runs."""
    keys = Keys("connections")
    with ExitStack() as stack:
        used = [
            stack.enter_context(closing(Connection(url, _WAIT_S, _WAIT_S))) for _ in range(connections)
        ]
        queue = LearnerQueue(used[0], keys, incarnation=1)
        used[0].execute("DEL", *keys.all)
        queue.claim("nonce", "benchmark")
        queue.issue("train", [(TicketId.train(n), Version(1, 0), b"ticket") for n in range(groups)])
        streams = [
            WorkStream(one, keys, keys.tickets, f"actor-{number}", _LEASE_S, _MOST_ATTEMPTS)
            for number, one in enumerate(used)
        ]
        for stream in streams:
            stream.take(1)  # connects, and makes the consumer
        began, done = time.perf_counter(), 0
        for stream in cycle(streams):
            entries = stream.take(BATCH)
            if not entries:
                break
            done += sum(stream.handoff_all([(one, payload) for one in entries], keys.rollouts))
        return done / (time.perf_counter() - began)


def measure(url: str, rounds: int, counts: Sequence[int], groups: int) -> dict[int, list[float]]:
    """Return, for each of `counts` and each round, the rate divided by that of the first count."""
    payload = random.Random(0).randbytes(BYTES)
    found: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds + 1):
        shift = number % len(counts)
        order = (*counts[shift:], *counts[:shift])
        rates = {count: rate(url, count, groups, payload) for count in order}
        if number:  # the first round warms up
            for count in counts:
                found[count].append(rates[count] / rates[counts[0]])
    return found


def main() -> int:
    """Measure; return 1 if a number of connections loses more than the goal allows."""
    parser = argparse.ArgumentParser(prog="benchmarks.connections", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    guard_children()
    with tempfile.TemporaryDirectory() as made, LocalServer(Path(made)) as server:
        found = measure(server.url, options.rounds, COUNTS, GROUPS)
    medians = {count: statistics.median(ratios) for count, ratios in found.items()}
    if options.json:
        print(json.dumps({"ratios": found, "medians": medians, "goal": GOAL}))
    else:
        for count, ratios in found.items():
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{count:>4} connections: {medians[count]:.3f} ({spread}) of {COUNTS[0]}")
    return int(min(medians.values()) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
