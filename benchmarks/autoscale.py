"""Run `penstock autoscale` while the load changes, and judge the numbers of actors that it asks for.

    python -m benchmarks.autoscale [--json]

A `penstock up` runs benchmarks.pipeline_roles. Beside it `penstock autoscale` changes how many actors
there are. Generation and Updates are waits; a group's seconds and tokens are lognormal. Every four
minutes another of LOADS begins. Then autoscale is stopped, and for each of them the learner's wait is
measured: with one actor less than the formula's number, then with one more each time until the wait is
below TARGET. That number of actors is the right one.

The formula's number n is the smallest from 1 to MOST with a computed wait below TARGET. A step needs
GROUPS groups with signal, so GROUPS / (1 - FILTERED) in all. An actor makes PLACES at a time, each in G
seconds: generation takes g = GROUPS / (1 - FILTERED) * G / (PLACES * n) seconds per step. If an Update
is shorter, U seconds, the learner waits for 1 - U / g of each step. Example: U 2 and G 0.7 give g =
1.87 for 4 actors, no wait, and g = 2.49 for 3, a wait of 20%. The number is 4. The formula knows only
mean times: a group that takes as long as two Updates makes the learner wait for it, however many actors
there are, as LEARNER_MAX_STALENESS is 2. So groups are short beside Updates: one of 10,000 is so
long under the fast learner.

The bounds: three minutes after a load begins the number is within one of the right one. In the fourth it
stays so and changes at most once. No two numbers alternate, as in 3, 2, 3, 2. The right number is the
formula's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.added_actor import PacedRun, actors
from benchmarks.pipeline import FILTERED, write_inputs
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import started_server
from penstock.common.broker.scale import Scale
from penstock.common.files.atomic import write_whole
from penstock.common.files.run_folder import RunFolder

FIRST, MOST, TARGET, GROUPS, PLACES, SIGMA = 4, 8, 0.1, 16, 2, 0.5
SETTLED_S, PHASE_S, MEASURED_S = 180.0, 240.0, 45.0
_LOOK_S, _STEPS_BETWEEN, _NAME = 1.0, 4, "autoscale"


@dataclass
class Load:
    """The seconds of an Update, and the mean ones of a group. What happened under this load.

    `changes` has when, in s, which number of actors began, and `waits` the measured wait by number.
    """

    name: str
    update_s: float
    group_s: float
    changes: list[tuple[float, int]] = field(default_factory=list)
    waits: dict[int, float] = field(default_factory=dict)

    def wait(self, number: int) -> float:
        """The learner's share of waiting, 0 to 1, by the formula."""
        generation_s = GROUPS / (1 - FILTERED) * self.group_s / (PLACES * number)
        return max(0.0, 1 - self.update_s / generation_s)

    def computed(self) -> int:
        """The smallest number of actors whose wait by the formula is below TARGET."""
        return next((n for n in range(1, MOST) if self.wait(n) < TARGET), MOST)

    def right(self) -> int:
        """The smallest number of actors whose measured wait is below TARGET; MOST if there is none."""
        return min((n for n, wait in self.waits.items() if wait < TARGET), default=MOST)

    def begin(self, path: Path) -> None:
        """Make this the load of the run whose PIPELINE_TIMES is `path`."""
        times = {"UPDATE_S": self.update_s, "GROUP_S": self.group_s, "SIGMA": SIGMA}
        write_whole(path, json.dumps({f"PIPELINE_{name}": one for name, one in times.items()}).encode())

    def faults(self) -> list[str]:
        """A sentence for each bound that is missed."""
        right, numbers = self.right(), [number for _, number in self.changes]
        held = numbers[max(0, sum(at <= SETTLED_S for at, _ in self.changes) - 1) :]
        found = []
        if not held or any(abs(number - right) > 1 for number in held):
            found.append(f"expected within one of {right} after {SETTLED_S:.0f} s, found {held}")
        if len(held) > 2:
            found.append(f"expected at most one change after {SETTLED_S:.0f} s, found {held}")
        if any(numbers[at : at + 2] == numbers[at + 2 : at + 4] for at in range(len(numbers) - 3)):
            found.append(f"expected that no two numbers alternate, found {numbers}")
        if right != (computed := self.computed()):
            found.append(f"expected {computed} to be right by the formula, found {right} by the wait")
        return [f"{self.name}: {one}" for one in found]

    def row(self) -> str:
        """The load as a row of the table."""
        numbers = ", ".join(f"{number} at {at:.0f} s" for at, number in self.changes)
        waits = ", ".join(f"{wait:.1%} with {number}" for number, wait in self.waits.items())
        then = [number for at, number in self.changes if at <= SETTLED_S][-1]
        load = f"{self.name} | {self.update_s} s | {self.group_s} s"
        return f"| {load} | {self.computed()} | {self.right()} | {then} | {numbers} | {waits} |"


LOADS = (
    Load("slow learner", 4.5, 0.7),
    Load("fast learner", 2.0, 0.7),
    Load("slow learner, longer answers", 4.5, 1.14),
)


def watch(scale: Scale) -> list[tuple[float, int]]:
    """For PHASE_S, each number of actors that `penstock up` keeps running, and when it began."""
    found: list[tuple[float, int]] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < PHASE_S:
        for status in scale.running().values():
            if not found or found[-1][1] != status.processes["actor"]:
                found.append((now, status.processes["actor"]))
        time.sleep(_LOOK_S)
    return found


def wait_of(run: PacedRun, number: int) -> float:
    """Run so many actors, and return the share of MEASURED_S that the learner waits."""
    run.queues("scale", f"actor={number}")
    run.wait_until(lambda: actors(run) == number, f"{number} actors")
    first = len(run.rows()) + _STEPS_BETWEEN
    run.wait_until(lambda: len(run.rows()) >= first, f"step {first}")
    time.sleep(MEASURED_S)
    rows = run.rows()[first:]
    return sum(row["perf/rollout_wait_s"] for row in rows) / sum(row["perf/step_s"] for row in rows)


def measure(folder: Path) -> None:
    """Let the loads pass with `penstock autoscale`, then measure waits without; note both in LOADS."""
    settings = write_inputs(folder) | {
        "LEARNER_GROUPS_PER_STEP": str(GROUPS), "LEARNER_MAX_COMPLETION_LENGTH": "40",
        "PIPELINE_PLACES": str(PLACES), "PIPELINE_TIMES": str(times := folder / "times.json"),
    }  # fmt: skip
    LOADS[0].begin(times)
    with PacedRun(folder, _NAME, settings) as run:
        run.up("--actors", str(FIRST))
        run.wait_until(run.rows, "a step")
        run.wait_until(lambda: actors(run) == FIRST, f"{FIRST} actors")
        scale = Scale(Connection(started_server(RunFolder(run.folder)), 60, 60), Keys(_NAME))
        scaling = run.start("penstock.deploy", "autoscale", "--max", str(MOST))
        for load in LOADS:
            load.begin(times)
            load.changes = watch(scale)
        if scaling.poll() is not None:
            raise RuntimeError(f"autoscale ended with {scaling.returncode}: see {run.folder}.log")
        scaling.terminate()
        scaling.wait(60)
        for load in reversed(LOADS):  # the last one is still there
            load.begin(times)
            for number in range(max(1, load.computed() - 1), MOST + 1):
                load.waits[number] = wait_of(run, number)
                if load.waits[number] < TARGET:
                    break


def main() -> int:
    """Measure and print a row for each load; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.autoscale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each load")
    as_json = parser.parse_args().json
    folder = Path(tempfile.mkdtemp(prefix="penstock-autoscale-"))
    folder.chmod(0o755)
    measure(folder)
    faults = [one for load in LOADS for one in load.faults()]
    if not as_json:
        print("| load | Update | group | formula | right | at 180 s | numbers | wait |")
        print("|---" * 8 + "|")
    for load in LOADS:
        print(json.dumps(asdict(load) | {"right": load.right()}) if as_json else load.row())
    verdict = f"verdict: {len(faults)} bounds missed, load average {os.getloadavg()[2]:.1f}"
    print(*faults, verdict, sep="\n", file=sys.stderr if as_json else sys.stdout)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
