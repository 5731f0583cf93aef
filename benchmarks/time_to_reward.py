"""Measure how long a task takes here and with TRL's GRPOTrainer, side by side.

    make trl; python -m benchmarks.time_to_reward [--task countdown] [--seeds 1 2 3 4 5] [--json]

Both sides train the same base model on the same questions by the demo's recipe: 64 groups of 8
completions per step, the same learning rate, warm-up and loss. TRL generates with transformers and uses
all cores, as it does by default (benchmarks/trl_run.py). The sides alternate. The checkpoints are scored
on the held-out questions after the run, so that the scoring takes no side's time. The time until an
accuracy is interpolated between two checkpoints.

The task `sums` is the demo's, whose answers are two or three tokens; its accuracy is that of greedy
answers. The task `countdown` has answers of up to 250 tokens (benchmarks/countdown.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
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

from benchmarks import countdown, exact
from penstock.common.files.atomic import read_json_lines
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.task import read_problems, write_task

_ROOT = Path(__file__).parents[1]
_POLL_S, _LIMIT_S = 0.1, 3600.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The base model's folder, and the questions for training and for scoring, as JSON lines."""

    model: Path
    train: Path
    heldout: Path


@dataclass(frozen=True, slots=True)
class Task:
    """A task by its parts: what makes it from a folder and a seed, and what scores a model's folder.

    `tokens` is the longest answer, `micro_batch` TRL's batch, `steps` and `every` the steps of a run and
    from checkpoint to checkpoint, `marks` the accuracies, `settings` those beside the demo's.
    """

    make: Callable[[Path, int], Prepared]
    score: Callable[[Path, Path], float]
    tokens: int
    micro_batch: int
    steps: int
    every: int
    marks: tuple[float, ...]
    settings: dict[str, str] = field(default_factory=dict)


def make_sums(home: Path, seed: int) -> Prepared:
    """The demo's task and base model."""
    task = write_task(home / "task", seed)
    make_base_model(home / "model", task, seed, lambda line: None)
    return Prepared(home / "model", task.train, task.heldout)


def make_countdown(home: Path, seed: int) -> Prepared:
    """The long task."""
    return Prepared(*countdown.write_task(home / "task", seed))


def score_sums(model: Path, heldout: Path) -> float:
    """The share of the sums that a model folder solves, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    problems = read_problems(heldout)
    ids = torch.tensor([tokenizer.encode(one.question) for one in problems])  # all have six characters
    made = policy.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    return statistics.mean(text == one.answer for text, one in zip(texts, problems, strict=True))


def score_countdown(model: Path, heldout: Path) -> float:
    """The mean probability that a model folder gives to the answers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    return countdown.accuracy(policy, read_problems(heldout), countdown.make_tokenizer())


TASKS = {
    "sums": Task(make_sums, score_sums, 5, 512, 100, 25, (0.60, 0.68)),
    "countdown": Task(
        make_countdown, score_countdown, countdown.LARGEST + 2, 128, 40, 5, (0.60,),
        {"LEARNER_REWARDS": "{folder}/exact.py:is_right", "LEARNER_MAX_COMPLETION_LENGTH": "252"},
    ),
}  # fmt: skip


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


def train_here(folder: Path, task: Task, made: Prepared, seed: int, steps: int) -> Timed:
    """Train with `penstock up` and the demo's recipe."""
    shutil.copy(exact.__file__, folder)  # where the rewards' sandbox can read it
    own = {name: value.format(folder=folder) for name, value in task.settings.items()}
    variables = os.environ | own | {
        "RUN_NAME": "run", "RUN_DIR": str(folder), "LEARNER_MODEL": str(made.model),
        "LEARNER_DATASET": str(made.train), "LEARNER_EVAL_STEPS": "0", "LEARNER_SEED": str(seed),
        "LEARNER_MAX_STEPS": str(steps), "LEARNER_SAVE_STEPS": str(task.every),
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
        timed.accuracy[step] = task.score(checkpoint / "model", made.heldout)
    return timed


def train_with_trl(
    packages: Path, folder: Path, task: Task, made: Prepared, seed: int, steps: int
) -> Timed:
    """Train with TRL's GRPOTrainer, whose packages are in a folder of their own."""
    variables = os.environ | {"PYTHONPATH": f"{packages.absolute()}{os.pathsep}{_ROOT}"}
    values = made.model, made.train, folder / "trl", seed, steps, task.every
    arguments = [str(value) for value in (*values, task.tokens, task.micro_batch)]
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
        timed.accuracy[int(checkpoint.name.partition("-")[2])] = task.score(checkpoint, made.heldout)
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


def compare(
    packages: Path, folder: Path, task: Task, seeds: list[int], steps: int
) -> Iterator[tuple[str, Timed]]:
    """The runs of both sides for each seed; the side that begins alternates."""
    for number, seed in enumerate(seeds):
        home = folder / f"seed-{seed}"
        home.mkdir(parents=True)
        made = task.make(home, seed)
        base = task.score(made.model, made.heldout)
        for side in ("here", "TRL") if number % 2 == 0 else ("TRL", "here"):
            if side == "here":
                timed = train_here(home, task, made, seed, steps)
            else:
                timed = train_with_trl(packages, home, task, made, seed, steps)
            timed.accuracy = {0: base, **timed.accuracy}
            yield side, timed


def figures_of(timed: Timed, marks: tuple[float, ...], steps: int) -> dict[str, float]:
    """What the table shows of a run, by title."""
    return {
        "seconds to the begin of training": timed.start_s,
        "seconds of training to the first step": timed.at_s[1],
        **{f"seconds of training to {mark:.0%}": timed.until(mark) for mark in marks},
        f"seconds of training for {steps} steps": timed.at_s[steps],
        f"accuracy after {steps} steps": timed.accuracy[steps],
    }


def main() -> int:
    """Compare all seeds; print median, smallest and largest value of each figure."""
    parser = argparse.ArgumentParser(prog="benchmarks.time_to_reward", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--steps", type=int, default=0, help="0: those of the task")
    parser.add_argument("--packages", type=Path, default=Path(".venv-rewards"), help="folder with TRL")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args()
    task = TASKS[options.task]
    steps = options.steps or task.steps
    folder = Path(tempfile.mkdtemp(prefix="penstock-time-to-reward-"))
    folder.chmod(0o755)
    found: dict[str, list[dict[str, float]]] = {"here": [], "TRL": []}
    for side, timed in compare(options.packages, folder, task, options.seeds, steps):
        found[side].append(figures_of(timed, task.marks, steps))
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
