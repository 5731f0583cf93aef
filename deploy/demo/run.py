"""`penstock demo`: a language model learns to add, from nothing, on this machine's CPU.

Nothing in it is special: it writes a data set, makes a base model, and starts the product with the
recipe deploy/recipes/demo.env. What it prints at the end comes from the run's own files.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.resources import as_file, files
from pathlib import Path
from typing import TextIO

from penstock.common.errors import PenstockError
from penstock.common.files.run_folder import RunFolder
from penstock.deploy.child import Report
from penstock.deploy.demo.report import print_report
from penstock.deploy.demo.task import TaskFiles, read_problems, write_task


class DemoFailed(PenstockError):
    """The run behind the demo did not end well; its own output says why."""


def main(arguments: list[str]) -> int:
    """Run the demo; returns the exit code."""
    options = _parse(arguments)
    phases: dict[str, float] = {}
    folder = options.dir / f"demo-{options.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    with _phase("data set", phases):
        task = write_task(options.dir / f"demo-task-{options.seed}", options.seed)
        _describe(task)
    with _phase("base model", phases):
        model = _base_model(options.dir / f"demo-base-{options.seed}", task, options.seed)
    with _phase("training", phases):
        _train(folder, model, task, options)
    with _phase("report", phases):
        print_report(RunFolder(folder))
    print("\nTime of each phase:")
    for name, seconds in (phases | {"in all": sum(phases.values())}).items():
        print(f"  {name:<12} {seconds:6.1f} s")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of data, base model and run (default: 1)")
    parser.add_argument("--steps", type=int, help="Updates to make (default: the recipe's)")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder for all it writes")
    return parser.parse_args(arguments)


@contextmanager
def _phase(name: str, phases: dict[str, float]) -> Iterator[None]:
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started


def _describe(task: TaskFiles) -> None:
    """What `write_task` made, and checked."""
    sizes = [len(read_problems(path)) for path in (task.pretrain, task.train, task.heldout)]
    print("  {:,} questions to pre-train on, {:,} to train on, {:,} held out".format(*sizes))
    print("  checked: every label is right, and no pair of operands occurs in two of the three")


def _base_model(folder: Path, task: TaskFiles, seed: int) -> Path:
    """The base model of this seed: the one made before if it is whole, else a new one."""
    done = folder / "done"
    if done.is_file():
        print(f"reusing {folder}")
        return folder
    import torch

    from penstock.deploy.demo.base_model import make_base_model

    torch.set_num_threads(min(2, os.cpu_count() or 1))
    made = make_base_model(folder, task, seed, lambda line: print(f"  {line}", flush=True))
    print(
        f"  {made.parameters:,} parameters, {made.steps} steps: {made.heldout_accuracy:.1%} of the "
        f"held-out questions right; saved in {folder}"
    )
    done.touch()
    return folder


def _train(folder: Path, model: Path, task: TaskFiles, options: argparse.Namespace) -> None:
    """Start the product with the demo's recipe, and show the learner's progress."""
    from penstock.deploy.up import run_up

    variables = {
        "RUN_NAME": folder.name,
        "RUN_DIR": str(folder.parent),
        "LEARNER_MODEL": str(model),
        "LEARNER_DATASET": str(task.train),
        "LEARNER_EVAL_DATASET": str(task.heldout),
        "LEARNER_SEED": str(options.seed),
    }
    if options.steps:
        variables["LEARNER_MAX_STEPS"] = str(options.steps)
    folder.mkdir(parents=True)
    log = RunFolder(folder).log
    print(f"starting learner, actor, rewarder and queue server; all they say is in {log}")
    print("(vLLM takes half a minute to start)", flush=True)
    os.environ.update(variables)
    with as_file(files("penstock.deploy")) as deploy, log.open("w") as file:
        recipe, procfile = deploy / "recipes" / "demo.env", deploy / "Procfile"
        arguments = ["--env-file", str(recipe), "--procfile", str(procfile)]
        code = run_up(arguments, _Progress(file))
    if code != 0:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise DemoFailed(f"the run ended with exit code {code}; the end of {log}:\n{tail}")
    if "the run is complete" not in log.read_text():
        raise DemoFailed(f"the run was stopped before its end; what there is of it is in {folder}")


class _Progress:
    """Writes every line to the log, and shows the learner's steps and what went wrong."""

    _SHOWN = ("step ", "evaluation", "waiting", "the run is complete", "error")

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, report: Report) -> None:
        print(f"{report.child} | {report.text}", file=self._file, flush=True)
        from_learner = report.child.startswith("learner") and report.kind == "output"
        if from_learner and any(word in report.text for word in self._SHOWN):
            print(f"  {report.text}", flush=True)
        elif report.kind == "ended" and "exit code 0" not in report.text:
            print(f"  {report.child}: {report.text}", flush=True)
