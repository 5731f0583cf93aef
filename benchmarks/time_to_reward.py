"""Measure how long the demo's task takes here and with TRL's GRPOTrainer, side by side.

    make trl; python -m benchmarks.time_to_reward [--seeds 1 2 3 4 5] [--steps 100] [--json]

Both sides train the demo's base model on the demo's questions by the demo's recipe: 64 groups of 8
completions per step, the same learning rate, warm-up and loss. TRL generates with transformers and uses
all cores, as it does by default (benchmarks/trl_run.py). The sides alternate. Checkpoints of every 25
steps are scored after the run, greedily on the held-out questions, so that the scoring takes no side's
time. The time until an accuracy is interpolated between two checkpoints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.common.files.atomic import read_json_lines
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.task import TaskFiles, read_problems, write_task

EVERY = 25
"""Steps between checkpoints."""
MARKS = (0.60, 0.68)
_ROOT = Path(__file__).parents[1]
_POLL_S, _LIMIT_S = 0.1, 3600.0


@dataclass(slots=True)
class Timed:
    """A run: seconds from its start to the begin of training, and from there to the end of each step.

    `accuracy` is that on the held-out questions, by step.
    """

    start_s: float = 0.0
    at_s: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)

    def until(self, mark: float) -> float:
        """The seconds of training until the accuracy is `mark`; infinite if it is not reached."""
        points = [(0.0 if step == 0 else self.at_s[step], self.accuracy[step]) for step in self.accuracy]
        for (before_s, before), (after_s, after) in itertools.pairwise(points):
            if before < mark <= after:
                return before_s + (after_s - before_s) * (mark - before) / (after - before)
        return float("inf")


def heldout_accuracy(model: Path, task: TaskFiles) -> float:
    """The share of the held-out sums that a model folder solves, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    problems = read_problems(task.heldout)
    ids = torch.tensor([tokenizer.encode(one.question) for one in problems])  # all have six characters
    made = policy.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    return statistics.mean(text == one.answer for text, one in zip(texts, problems, strict=True))


def train_here(folder: Path, model: Path, task: TaskFiles, seed: int, steps: int) -> Timed:
    """Train with `penstock up` and the demo's recipe."""
    variables = os.environ | {
        "RUN_NAME": "run", "RUN_DIR": str(folder), "LEARNER_MODEL": str(model),
        "LEARNER_DATASET": str(task.train), "LEARNER_EVAL_STEPS": "0", "LEARNER_SEED": str(seed),
        "LEARNER_MAX_STEPS": str(steps), "LEARNER_SAVE_STEPS": str(EVERY),
        "LEARNER_SAVE_TOTAL_LIMIT": str(steps), "LEARNER_SAVE_ONLY_MODEL": "true",
    }  # fmt: skip
    command = [sys.executable, "-m", "penstock.deploy", "up", "--env-file", "deploy/recipes/demo.env"]
    metrics, log = folder / "run" / "metrics.jsonl", folder / "run.log"

    def progress() -> int | None:
        """The steps that are made; None before the training has begun."""
        said = log.read_text()
        if "Training from step" not in said or "The inference engine is ready" not in said:
            return None
        return len(read_json_lines(metrics)) if metrics.is_file() else 0

    timed = watch(command, variables, log, progress)
    for checkpoint in sorted((folder / "run" / "checkpoints").iterdir()):
        step = json.loads((checkpoint / "state.json").read_text())["step"]
        timed.accuracy[step] = heldout_accuracy(checkpoint / "model", task)
    return timed


def train_with_trl(
    packages: Path, folder: Path, model: Path, task: TaskFiles, seed: int, steps: int
) -> Timed:
    """Train with TRL's GRPOTrainer, whose packages are in a folder of their own."""
    variables = os.environ | {"PYTHONPATH": f"{packages.absolute()}{os.pathsep}{_ROOT}"}
    arguments = [str(value) for value in (model, task.train, folder / "trl", seed, steps, EVERY)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.trl_run", *arguments]
    log = folder / "trl.log"

    def progress() -> int | None:
        """The steps that are made; None before the training has begun."""
        lines = [line for line in log.read_text().splitlines() if line.startswith("step ")]
        return int(lines[-1].split()[1]) if lines else None

    timed = watch(command, variables, log, progress)
    for checkpoint in sorted(
        (folder / "trl").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime
    ):
        timed.accuracy[int(checkpoint.name.partition("-")[2])] = heldout_accuracy(checkpoint, task)
    return timed


def watch(
    command: list[str], variables: dict[str, str], log: Path, progress: Callable[[], int | None]
) -> Timed:
    """Run a command to its end; note when `progress` grew. Raise RuntimeError if the command fails."""
    timed, began = Timed(), time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=variables, cwd=_ROOT, stdout=output, stderr=output)
    training = 0.0
    while process.poll() is None:
        now, made = time.monotonic(), progress()
        if made is not None and not training:
            training, timed.start_s = now, now - began
        for step in range(len(timed.at_s) + 1, (made or 0) + 1):
            timed.at_s[step] = now - training
        if now - began > _LIMIT_S:
            process.kill()
        time.sleep(_POLL_S)
    if process.returncode:
        raise RuntimeError(f"the run failed; the end of {log}:\n{log.read_text()[-2000:]}")
    return timed


def compare(packages: Path, folder: Path, seeds: list[int], steps: int) -> Iterator[tuple[str, Timed]]:
    """The runs of both sides for each seed; the side that begins alternates."""
    for number, seed in enumerate(seeds):
        home = folder / f"seed-{seed}"
        home.mkdir(parents=True)
        task = write_task(home / "task", seed)
        make_base_model(home / "model", task, seed, lambda line: None)
        base = heldout_accuracy(home / "model", task)
        for side in ("here", "TRL") if number % 2 == 0 else ("TRL", "here"):
            if side == "here":
                timed = train_here(home, home / "model", task, seed, steps)
            else:
                timed = train_with_trl(packages, home, home / "model", task, seed, steps)
            timed.accuracy = {0: base, **timed.accuracy}
            yield side, timed


def figures_of(timed: Timed, steps: int) -> dict[str, float]:
    """What the table shows of a run, by title."""
    return {
        "seconds to the begin of training": timed.start_s,
        "seconds of training to the first step": timed.at_s[1],
        **{f"seconds of training to {mark:.0%}": timed.until(mark) for mark in MARKS},
        f"seconds of training for {steps} steps": timed.at_s[steps],
        f"accuracy after {steps} steps": timed.accuracy[steps],
    }


def main() -> int:
    """Compare all seeds; print median, smallest and largest value of each figure."""
    parser = argparse.ArgumentParser(prog="benchmarks.time_to_reward", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--packages", type=Path, default=Path(".venv-rewards"), help="folder with TRL")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-time-to-reward-"))
    folder.chmod(0o755)
    found: dict[str, list[dict[str, float]]] = {"here": [], "TRL": []}
    for side, timed in compare(options.packages, folder, options.seeds, options.steps):
        found[side].append(figures_of(timed, options.steps))
        shown = {"side": side, **found[side][-1], "accuracy": timed.accuracy}
        print(json.dumps(shown) if options.json else f"{side}: {shown}", flush=True)
    for title in found["here"][0]:
        for side, runs in found.items():
            values = [run[title] for run in runs]
            middle, low, high = statistics.median(values), min(values), max(values)
            print(f"{title:<40} {side:<5} {middle:8.3g}  ({low:.3g} to {high:.3g})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
