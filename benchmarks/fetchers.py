"""Measure what eight actors that fetch the same version cost the learner that serves it.

    python -m benchmarks.fetchers [--mib 256] [--rounds 3] [--json]

A process computes steps on one core, as a learner does, and serves a file from its file server. The
server's thread and eight processes that download the file share the other core. So the benchmark shows
how long Python's lock keeps a step waiting for the server's thread, and not what downloads cost where
all share the cores. Steps without downloads alternate with steps beside downloads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock.common.files.hashing import hash_file
from penstock.learner.state.file_server import FileServer

ACTORS, SLOTS = 8, 2
STEPS = 10
GOAL = 1.05
NAME = "000001-00000001"
FETCH = """
import sys, time
from pathlib import Path
from penstock.common.transfer.download import Source, Wanted, download
url, token, size, digest, target = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
wanted = Wanted("versions/000001-00000001/model.safetensors", int(size), digest)
download(Source(url, token), wanted, Path(target))
print(began, time.monotonic())
"""


def step(weights: list[torch.Tensor]) -> float:
    """Compute for about half a second, in short calls as a small model's; return the seconds."""
    began = time.perf_counter()
    for weight in weights:
        hidden = torch.ones(64, weight.shape[0])
        for _ in range(60):
            hidden = torch.tanh(hidden @ weight)
    return time.perf_counter() - began


def start_fetchers(
    server: FileServer, file: Path, folder: Path, core: int
) -> list[subprocess.Popen[str]]:
    """Start eight processes on a core, each of which waits for a line before it downloads."""
    url, size = f"http://127.0.0.1:{server.port}", file.stat().st_size
    arguments = [url, server.token, str(size), hash_file(file)]
    command = ["taskset", "-c", str(core), sys.executable, "-c", FETCH, *arguments]
    return [
        subprocess.Popen(
            [*command, str(folder / f"{number}/file")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(ACTORS)
    ]  # fmt: skip


def beside_fetchers(
    server: FileServer, file: Path, folder: Path, core: int, weights: list[torch.Tensor]
) -> tuple[list[float], list[tuple[float, float]]]:
    """The seconds of the steps that are made meanwhile; when each that got the file began and ended."""
    fetchers = start_fetchers(server, file, folder, core)
    for fetcher in fetchers:
        assert fetcher.stdout
        assert fetcher.stdout.readline() == "ready\n"
    for fetcher in fetchers:
        assert fetcher.stdin
        fetcher.stdin.write("go\n")
        fetcher.stdin.flush()
        time.sleep(0.05)
    taken = []
    while any(fetcher.poll() is None for fetcher in fetchers):
        taken.append(step(weights))
    said = [fetcher.communicate()[0].split() for fetcher in fetchers]
    return taken[:-1] or taken, [(float(one[0]), float(one[1])) for one in said if one]


def in_order(had_it_after_s: list[float]) -> bool:
    """Whether all got the file in the order in which they asked, two by two: each may overtake one."""
    order = sorted(range(len(had_it_after_s)), key=had_it_after_s.__getitem__)
    return len(order) == ACTORS and all(abs(place - one) < SLOTS for place, one in enumerate(order))


def measure(mib: int, rounds: int) -> dict[str, Any]:
    """The ratio of step times per round, and when each process had its file."""
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    weights = [torch.randn(width, width) / width for width in (256, 512, 1024)]
    with tempfile.TemporaryDirectory(prefix="penstock-fetchers-") as name:
        folder = Path(name)
        file = folder / f"versions/{NAME}/model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(os.urandom(mib << 20))
        with FileServer(folder / "versions", folder, [], "127.0.0.1", 0) as server:
            os.sched_setaffinity(server._thread.native_id or 0, {cores[-1]})
            os.sched_setaffinity(0, {cores[0]})  # this thread alone: the server's is elsewhere
            found = []
            for number in range(rounds):
                alone = [step(weights) for _ in range(STEPS)]
                beside, times = beside_fetchers(server, file, folder / str(number), cores[-1], weights)
                first = min((began for began, _ in times), default=0.0)
                found.append(
                    {
                        "alone_s": statistics.median(alone), "beside_s": statistics.median(beside),
                        "ratio": statistics.median(beside) / statistics.median(alone),
                        "had_it_after_s": [round(ended - first, 2) for _, ended in times],
                    }
                )  # fmt: skip
    return {
        "MiB": mib, "rounds": found, "ratio": statistics.median(one["ratio"] for one in found),
        "in order": all(in_order(one["had_it_after_s"]) for one in found),
    }  # fmt: skip


def main() -> int:
    """Measure and print; return 1 if a step takes over 5% longer, or not all have the file in order."""
    parser = argparse.ArgumentParser(prog="benchmarks.fetchers", description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.mib, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
    else:
        for one in found["rounds"]:
            print(
                f"a step takes {one['alone_s']:.3f} s alone and {one['beside_s']:.3f} s beside {ACTORS} "
                f"downloads: {one['ratio']:.3f}; each had its file after {one['had_it_after_s']} s"
            )
        print(f"median {found['ratio']:.3f}, goal at most {GOAL}; all in order: {found['in order']}")
    return found["ratio"] > GOAL or not found["in order"]


if __name__ == "__main__":
    sys.exit(main())
