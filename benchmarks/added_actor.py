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
from collections.abc import Callable
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


class PacedRun(contextlib.ExitStack):
    """The run `name` of the inputs in `folder`, with these settings. At the end its processes do."""

    def __init__(self, folder: Path, name: str, settings: dict[str, str]) -> None:
        super().__init__()
        self.folder, self._log = folder / name, self.enter_context((folder / f"{name}.log").open("w"))
        self._variables = os.environ | settings | {
            "RUN_NAME": name, "LEARNER_MAX_STEPS": "10000", "LEARNER_MAX_STALENESS": "2",
            "PYTHONPATH": str(_ROOT),
        }  # fmt: skip

    def start(self, *module: str) -> subprocess.Popen[bytes]:
        """Start a module with arguments; it gets SIGINT at the end."""
        command, log = [sys.executable, "-m", *module], self._log
        process = subprocess.Popen(command, env=self._variables, cwd=_ROOT, stdout=log, stderr=log)
        self.callback(process.wait, _LIMIT_S)
        self.callback(process.send_signal, signal.SIGINT)
        return process

    def up(self, *arguments: str) -> None:
        """Start `penstock up`."""
        procfile = str(self.folder.parent / "Procfile")
        self.start("penstock.deploy", "up", "--procfile", procfile, *arguments)

    def queues(self, *arguments: str) -> Any:
        """What `queues` says with these arguments and --json."""
        command = [sys.executable, "-m", "penstock.common.queues", *arguments, "--json"]
        found = subprocess.run(
            command, env=self._variables, cwd=_ROOT, capture_output=True, text=True, check=True
        )
        return json.loads(found.stdout)

    def wait_until(self, reached: Callable[[], object], what: str) -> None:
        """Wait until `reached` holds. Raise RuntimeError after ten minutes."""
        deadline = time.monotonic() + _LIMIT_S
        while not reached():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run did not reach {what}: see {self._log.name}")
            time.sleep(_POLL_S)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the steps that were made."""
        return read_json_lines(self.folder / "metrics.jsonl")


def actors(run: PacedRun) -> int:
    """The actors that have joined, by what `queues status` says."""
    return sum(one["role"] == "actor" for one in run.queues("status")["workers"].values())


def named_gain(run: PacedRun) -> float:
    """The gain that `queues status` names. Raise ValueError if actors are not called the limit."""
    sentence = run.queues("status")["limit"]
    match = _GAIN.search(sentence)
    if match is None:
        raise ValueError(f"expected that actors are called the limit, found {sentence!r}")
    return int(match[1]) / 100


def measure(folder: Path, settings: dict[str, str], update_share: float) -> tuple[float, float]:
    """The named and the real gain of a second actor; an Update takes this share of a generation."""
    times = {
        "REWARDER_WORKERS": "2", "PIPELINE_GROUP_S": str(_SLOWER * GROUP_S),
        "PIPELINE_UPDATE_S": str(_SLOWER * update_share * generation_s()),
    }  # fmt: skip
    with PacedRun(folder, f"share-{update_share:g}", settings | times) as run:
        run.up()
        run.wait_until(lambda: len(run.rows()) >= _BEFORE, f"step {_BEFORE}")
        named = named_gain(run)
        run.start("benchmarks.pipeline_roles", "actor")
        run.wait_until(lambda: actors(run) == 2, "two actors")
        first = len(run.rows()) + _SETTLED
        run.wait_until(lambda: len(run.rows()) >= first + _AFTER, f"step {first + _AFTER}")
    times_s = [row["perf/step_s"] for row in run.rows()]
    before, after = times_s[4:_BEFORE], times_s[first - 1 : first + _AFTER]
    return named, statistics.median(before) / statistics.median(after) - 1


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
