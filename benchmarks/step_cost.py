"""Measure what a step of the demo's run costs: processor time by process, and seconds.

    python -m benchmarks.step_cost [--seed 1] [--steps 60] [--folder F] [--json]

A run of the whole product with the demo's model, data and recipe, without evaluations. A step is 512
completions. The first steps, in which everything warms up, are not counted. Processor time is that of a
process and of all its children, also those that have ended: a rewarder's has its sandbox processes.
vLLM's processes count apart from the actor that started them.
The goal is at most 1.5 s of processor time per step in all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.task import write_task

GOAL_S = 1.5
FIRST_STEP = 10
"""The step after which counting begins."""
_POLL_S, _LIMIT_S = 0.2, 1800.0
_ROOT = Path(__file__).parents[1]
_NAMES = {
    "learner": "learner",
    "actor": "actor",
    "rewarder": "rewarder",
    "valkey-server": "queue server",
    "redis-server": "queue server",
}
"""What a process below the supervisor is called, by the name of its program."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run has cost until a step: the time, and seconds of processor time by process."""

    step: int
    at_s: float
    cpu_s: Mapping[str, float]


def cpu_by_process(supervisor: psutil.Process) -> dict[str, float]:
    """The processor time in seconds of the supervisor and of all below it, by name.

    A process without a name of its own counts for the one that started it.
    """
    found: Counter[str] = Counter()

    def count(process: psutil.Process, name: str) -> None:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            name = name_of(process) or name
            used = process.cpu_times()
            found[name] += used.user + used.system + used.children_user + used.children_system
            for child in process.children():
                count(child, name)

    count(supervisor, "supervisor")
    return dict(found)


def name_of(process: psutil.Process) -> str:
    """The name of a role, of the queue server or of a process of vLLM; "" for any other process."""
    words = process.cmdline() or [""]
    if words[0].startswith("VLLM::"):
        return f"vLLM {words[0].removeprefix('VLLM::').split('_')[0]}"
    return next((_NAMES[name] for word in words[:2] if (name := Path(word).name) in _NAMES), "")


def measure(folder: Path, seed: int, steps: int) -> tuple[Costs, Costs]:
    """Run the demo's training in a new folder; return its costs until FIRST_STEP and near the end."""
    task = write_task(folder / "task", seed)
    make_base_model(folder / "model", task, seed, print_now)
    variables = os.environ | {
        "RUN_NAME": "run", "RUN_DIR": str(folder), "LEARNER_MODEL": str(folder / "model"),
        "LEARNER_DATASET": str(task.train), "LEARNER_EVAL_STEPS": "0", "LEARNER_SEED": str(seed),
        "LEARNER_MAX_STEPS": str(steps),
    }  # fmt: skip
    command = [sys.executable, "-m", "penstock.deploy", "up", "--env-file", "deploy/recipes/demo.env"]
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen(command, env=variables, cwd=_ROOT, stdout=log, stderr=log)
        try:
            return watch(psutil.Process(process.pid), RunFolder(folder / "run"), steps)
        finally:
            process.terminate()
            process.wait(60)


def watch(supervisor: psutil.Process, run: RunFolder, steps: int) -> tuple[Costs, Costs]:
    """The costs of the run after FIRST_STEP, and after the step before the last: then all still live.

    Raise RuntimeError if the run ends before, or takes over half an hour.
    """
    found: list[Costs] = []
    step, end = 0, time.monotonic() + _LIMIT_S
    while supervisor.is_running() and supervisor.status() != psutil.STATUS_ZOMBIE:
        step = len(read_json_lines(run.metrics))
        if step >= (steps - 1 if found else FIRST_STEP):
            found.append(Costs(step, time.monotonic(), cpu_by_process(supervisor)))
        if len(found) == 2:
            return found[0], found[1]
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    raise RuntimeError(f"the run ended, or took over {_LIMIT_S:g} s, at step {step} of {steps}")


def per_step(first: Costs, last: Costs) -> dict[str, float]:
    """The seconds of processor time per step between two states of a run, by process, largest first."""
    steps = last.step - first.step
    found = {name: (cpu_s - first.cpu_s.get(name, 0.0)) / steps for name, cpu_s in last.cpu_s.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def print_now(line: str) -> None:
    """Print a line beside the result, at once."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run, print the table, and return 1 if a step costs more than the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.step_cost", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="folder for the run (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-step-cost-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    first, last = measure(folder, options.seed, options.steps)
    costs = per_step(first, last)
    whole, step_s = sum(costs.values()), (last.at_s - first.at_s) / (last.step - first.step)
    if options.json:
        print(json.dumps({"cpu_s": costs, "all_cpu_s": whole, "step_s": step_s}))
    else:
        print(f"Steps {first.step + 1} to {last.step}, {step_s:.2f} s each; processor time per step:")
        for name, cpu_s in [*costs.items(), ("all", whole)]:
            print(f"{name:<20}{cpu_s:>8.3f} s")
        print(f"The goal is {GOAL_S:g} s.")
    return int(whole > GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
