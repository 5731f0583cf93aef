"""Compare the gain that `queues watch` names for one more actor with that of an actor which is added.

    python -m benchmarks.added_actor [--json]

The processes are those of benchmarks.pipeline: an Update and the generation of a group take known times.
After some steps the sentence is read, and another actor is started. The gain is that of the time per
step before, and after it has joined and four more steps. The goal is that the named gain is right within
a third.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pipeline import GROUP_S, generation_s, write_inputs
from penstock.common.files.atomic import read_json_lines

GOAL = 1 / 3
_ROOT = Path(__file__).parents[1]
_BEFORE, _SETTLED, _AFTER = 15, 4, 12
_SLOWER = 2
"""Times of benchmarks.pipeline: with two actors its pace would use up two cores."""
_LIMIT_S, _POLL_S = 600.0, 0.2
_GAIN = re.compile(r"One more would give about ([+-]\d+)%")


def status(variables: Mapping[str, str]) -> dict[str, Any]:
    """What `queues status` says."""
    command = [sys.executable, "-m", "penstock.common.queues", "status", "--json"]
    found = subprocess.run(command, env=variables, cwd=_ROOT, capture_output=True, text=True, check=True)
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def actors(found: Mapping[str, Any]) -> int:
    """The actors that have joined, by what `queues status` says."""
    return sum(one["role"] == "actor" for one in found["workers"].values())


def named_gain(variables: Mapping[str, str]) -> float:
    """The gain that `queues status` names. Raise ValueError if actors are not called the limit."""
    sentence = status(variables)["limit"]
    match = _GAIN.search(sentence)
    if match is None:
        raise ValueError(f"expected that actors are called the limit, found {sentence!r}")
    return int(match[1]) / 100


def step_s(metrics: Path, first: int, last: int) -> float:
    """The median seconds of the steps `first` to `last`."""
    rows = [row for row in read_json_lines(metrics) if first <= row["step"] <= last]
    return statistics.median(row["perf/step_s"] for row in rows)


def measure(folder: Path, settings: Mapping[str, str], update_share: float) -> tuple[float, float]:
    """The named and the real gain of a second actor; an Update takes this share of a generation."""
    run = f"share-{update_share:g}"
    metrics = folder / run / "metrics.jsonl"
    variables = os.environ | settings | {
        "RUN_NAME": run, "LEARNER_MAX_STEPS": "10000", "LEARNER_MAX_STALENESS": "2",
        "REWARDER_WORKERS": "2", "PIPELINE_GROUP_S": str(_SLOWER * GROUP_S), "PYTHONPATH": str(_ROOT),
        "PIPELINE_UPDATE_S": str(_SLOWER * update_share * generation_s()),
    }  # fmt: skip
    up = [sys.executable, "-m", "penstock.deploy", "up", "--procfile", str(folder / "Procfile")]
    actor = [sys.executable, "-m", "benchmarks.pipeline_roles", "actor"]
    with (folder / f"{run}.log").open("w") as log, contextlib.ExitStack() as stack:

        def start(command: list[str]) -> None:
            process = subprocess.Popen(command, env=variables, cwd=_ROOT, stdout=log, stderr=log)
            stack.callback(process.wait, _LIMIT_S)
            stack.callback(process.send_signal, signal.SIGINT)

        def wait_until(reached: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + _LIMIT_S
            while not reached():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the run did not reach {what}: see {log.name}")
                time.sleep(_POLL_S)

        def steps() -> int:
            return len(read_json_lines(metrics))

        start(up)
        wait_until(lambda: steps() >= _BEFORE, f"step {_BEFORE}")
        named = named_gain(variables)
        start(actor)
        wait_until(lambda: actors(status(variables)) == 2, "two actors")
        first = steps() + _SETTLED
        wait_until(lambda: steps() >= first + _AFTER, f"step {first + _AFTER}")
    return named, step_s(metrics, 5, _BEFORE) / step_s(metrics, first, first + _AFTER) - 1


def main() -> int:
    """Measure two runs; return 1 if a named gain is wrong by more than a third."""
    parser = argparse.ArgumentParser(prog="benchmarks.added_actor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-added-"))
    folder.chmod(0o755)
    settings, failed = write_inputs(folder), False
    for share in (0.7, 0.4):
        named, real = measure(folder, settings, share)
        failed |= abs(named - real) > GOAL * real
        if options.json:
            print(json.dumps({"update_share": share, "named": named, "real": real}), flush=True)
        else:
            print(f"Update {share:.0%} of generation: named {named:+.0%}, real {real:+.0%}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
