"""Compare the gain that `queues watch` names for one more actor with that of an actor which is added.

    python -m benchmarks.added_actor [--json]

The processes are those of benchmarks.pipeline: an Update and the generation of a group take known times.
In the middle of a run the sentence is read, and another actor joins. The gain is that of the time per
step before and after. The goal is that the named gain is right within a third.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.pipeline import generation_s, write_inputs
from penstock.common.files.atomic import read_json_lines

GOAL = 1 / 3
_ROOT = Path(__file__).parents[1]
_STEPS, _JOIN_AT, _SETTLED = 45, 20, 10
_LIMIT_S, _POLL_S = 600.0, 0.2
_GAIN = re.compile(r"One more would give about ([+-]\d+)%")


def named_gain(variables: Mapping[str, str]) -> float:
    """The gain that `queues status` names. Raise ValueError if actors are not called the limit."""
    command = [sys.executable, "-m", "penstock.common.queues", "status", "--json"]
    found = subprocess.run(command, env=variables, cwd=_ROOT, capture_output=True, text=True, check=True)
    sentence = json.loads(found.stdout)["limit"]
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
        "RUN_NAME": run, "LEARNER_MAX_STEPS": str(_STEPS), "LEARNER_MAX_STALENESS": "2",
        "PIPELINE_UPDATE_S": str(update_share * generation_s()), "PYTHONPATH": str(_ROOT),
    }  # fmt: skip
    up = [sys.executable, "-m", "penstock.deploy", "up", "--procfile", str(folder / "Procfile")]
    with (folder / f"{run}.log").open("w") as log:
        running = subprocess.Popen(up, env=variables, cwd=_ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + _LIMIT_S
        while len(read_json_lines(metrics)) < _JOIN_AT:
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not reach step {_JOIN_AT}: see {log.name}")
            time.sleep(_POLL_S)
        named = named_gain(variables)
        actor = [sys.executable, "-m", "benchmarks.pipeline_roles", "actor"]
        added = subprocess.Popen(actor, env=variables, cwd=_ROOT, stdout=log, stderr=log)
        if running.wait(_LIMIT_S) or added.wait(_LIMIT_S):
            raise RuntimeError(f"the run failed: see {log.name}")
    before = step_s(metrics, 5, _JOIN_AT)
    return named, before / step_s(metrics, _JOIN_AT + _SETTLED, _STEPS) - 1


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
