"""Measure whether the memory of the learner's queue side and of the queue server stays flat.

    python -m benchmarks.long_run [--groups 1000000] [--json]

The product's ledger, journal, intake and queue server handle --groups groups of 8 completions of 4
tokens, in steps of 512 groups. This program answers the tickets itself, and trains nothing. It prints
the resident memory of both processes after each twentieth of the groups. The goal is that neither grows
by more than 5% between a tenth and the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import psutil

from benchmarks.intake import Learner, make_plan
from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.guard import guard_children

GOAL = 1.05
GROUPS, TOKENS = 512, 4
"""Groups of a step, and tokens of a completion."""
_POINTS = 20


def memory_mib(server: Connection) -> dict[str, float]:
    """The resident memory of this process and of the queue server, in MiB."""
    found = server.execute("INFO", "memory")["used_memory_rss"]
    return {"learner": psutil.Process().memory_info().rss / 2**20, "server": int(found) / 2**20}


def measure(server: LocalServer, folder: Path, groups: int) -> list[dict[str, float]]:
    """Handle at least so many groups; return their number and the memory, at up to 20 points."""
    steps = -(-groups // GROUPS)
    found = []
    with closing(Connection(server.url, 10, 10)) as connection:
        learner = Learner(connection, folder, "long", make_plan(GROUPS, TOKENS, steps))
        for step in range(steps):
            learner.answer(TOKENS)
            learner.commit(step)
            if (step + 1) * _POINTS // steps > step * _POINTS // steps:
                found.append({"groups": float((step + 1) * GROUPS)} | memory_mib(connection))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def growth(points: list[dict[str, float]]) -> dict[str, float]:
    """By process, the memory at the last point divided by that at a tenth of all points."""
    first = points[max(0, len(points) // 10 - 1)]
    return {name: points[-1][name] / first[name] for name in ("learner", "server")}


def main() -> int:
    """Measure; return 1 if a process grew by more than the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.long_run", description=__doc__)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    guard_children()
    with tempfile.TemporaryDirectory() as made, LocalServer(Path(made) / "server") as server:
        points = measure(server, Path(made), options.groups)
    grown = growth(points)
    if options.json:
        print(json.dumps({"points": points, "growth": grown, "goal": GOAL}))
    else:
        for name, ratio in grown.items():
            print(f"{name:<8} {points[-1][name]:7.1f} MiB, {ratio:.3f} of a tenth; at most {GOAL}")
    return int(max(grown.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
