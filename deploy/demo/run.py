"""`penstock demo`: a language model learns to add, from nothing, on this machine's CPU.

The demo writes a data set, pre-trains a base model, and starts `penstock up` with the recipe
deploy/recipes/demo.env. The report at the end is read from the run's own files.
"""

import json
import logging
import os
import signal
import threading
import time
import warnings
from datetime import datetime
from importlib.resources import as_file, files
from pathlib import Path
from typing import TextIO

from dotenv import dotenv_values
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic_settings import CliToggleFlag
from rich.console import Console

from penstock.common.config.command import Command, build
from penstock.common.config.device import visible_gpus
from penstock.common.config.role_command import RunCommand
from penstock.common.errors import PenstockError
from penstock.common.files.atomic import make_folder, read_json_lines
from penstock.common.files.modes import umask
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import log_errors_alone
from penstock.deploy.child import Report
from penstock.deploy.demo.report import WIDTH, print_report
from penstock.deploy.demo.task import TaskFiles, read_problems, write_task
from penstock.deploy.devices import variables_of
from penstock.deploy.showing.live import is_live
from penstock.deploy.up import Up

_STEPS_PER_LINE = 5
_QUIET_S = 60.0
_SHOWN = ("reward", "sample/staleness_mean", "entropy")


class DemoFailed(PenstockError):
    """The run behind the demo failed. The message has the end of the run's log."""


class DemoStopped(PenstockError):
    """The run behind the demo was stopped, by Ctrl-C above all, before its last step."""


class Demo(Command):
    """Teach a tiny language model to add, from random weights, on this machine's CPU."""

    seed: NonNegativeInt = Field(1, description="seed of the data, the base model and the run")
    steps: PositiveInt | None = Field(None, description="Updates to make; by default the recipe's")
    dir: Path = Field(Path("runs"), description="folder for all files of the demo")
    plain: CliToggleFlag[bool] = Field(
        False, description="print lines instead of a live screen, also in a terminal"
    )

    def execute(self) -> int:
        """Run the demo in a new folder demo-SEED-TIME below `dir`, print its report, return 0.

        This process shows no warnings from now on. RUN_UMASK decides who may read the files. Raise
        DemoFailed or DemoStopped if the run fails or is stopped, BaseModelError if pre-training fails,
        TaskError for a wrong data set, ConfigError for a RUN_ setting or a folder that cannot be made.
        """
        warnings.simplefilter("ignore")  # a first run shows the demo's own lines, and errors
        logging.disable(logging.WARNING)
        log_errors_alone()
        started = time.monotonic()
        folder = self.dir / f"demo-{self.seed}-{datetime.now():%Y%m%d-%H%M%S}"
        with umask(build(RunCommand, {}).run.umask):
            self._make(folder)
        print(f"The demo took {time.monotonic() - started:.0f} s.")
        return 0

    def _make(self, folder: Path) -> None:
        """Make data set, base model and run; print the report.

        `folder` is the run's. Data set and model are beside it, in demo-task-SEED and demo-base-SEED,
        where a complete model of an earlier demo is used again. Raise TaskError for a wrong data set,
        BaseModelError if pre-training fails, DemoFailed or DemoStopped if the run fails or is stopped.
        """
        print("== 1 of 4: data set", flush=True)
        task = write_task(self.dir / f"demo-task-{self.seed}", self.seed)
        _describe(task)
        print("\n== 2 of 4: base model", flush=True)
        from penstock.deploy.demo.base_model import make_base_model

        model = self.dir / f"demo-base-{self.seed}"
        make_base_model(model, task, self.seed, lambda line: print(f"  {line}", flush=True))
        print("\n== 3 of 4: training", flush=True)
        _train(folder, model, task, self)
        print("\n== 4 of 4: report", flush=True)
        print_report(RunFolder(folder))


def _describe(task: TaskFiles) -> None:
    """Print how many questions each of the three files of `task` has, and what each is for.

    Raise OSError for a file that cannot be read, ValueError or TypeError for a line that is no question.
    """
    sizes = [len(read_problems(path)) for path in (task.pretrain, task.train, task.heldout)]
    print(
        """\
  Sums of two-digit numbers, such as 37+45=82, in three parts:
  {:>6,} to pre-train on: the model is shown the right answers
  {:>6,} to train on: the model answers by itself, and its right answers are rewarded
  {:>6,} held out: they measure the model's skill; the model is never trained on them
  Checked: every answer is right, and no pair of numbers is in two of the parts.""".format(*sizes)
    )


def _train(folder: Path, model: Path, task: TaskFiles, options: Demo) -> None:
    """Run `penstock up` in this process with the demo's recipe, and print progress.

    The run in `folder` trains `model` on `task`, with the seed and the steps of `options`. Its log is
    written to the folder. The settings stay in the environment of this process. Raise DemoFailed, with
    the log's last 30 lines, if the run fails, DemoStopped if it is stopped, ConfigError if the folder
    cannot be made, BrokenPipeError, with the run ended, if the reader of standard output is gone.
    """
    os.environ |= {
        "RUN_NAME": folder.name,
        "RUN_DIR": str(folder.parent),
        "LEARNER_MODEL": str(model),
        "LEARNER_DATASET": str(task.train),
        "LEARNER_EVAL_DATASET": str(task.heldout),
        "LEARNER_SEED": str(options.seed),
    }
    if options.steps:
        os.environ["LEARNER_MAX_STEPS"] = str(options.steps)
    os.environ |= variables_of(visible_gpus(os.environ)[:1], os.environ)  # one is enough for all
    make_folder(folder, "--dir")
    run_folder = RunFolder(folder)
    with as_file(files("penstock.deploy")) as deploy, run_folder.log.open("w") as file:
        recipe, procfile = deploy / "recipes" / "demo.env", deploy / "Procfile"
        steps = int((dotenv_values(recipe) | os.environ)["LEARNER_MAX_STEPS"] or 0)
        announce(steps, run_folder.log)
        live = is_live(Console(), options.plain)
        progress = Progress(run_folder, steps, file, silent=live)
        up = Up(env_file=recipe, procfile=procfile)
        code = up.run(beside=progress) if live else up.run(progress)
    if progress.unread:
        raise BrokenPipeError("the reader of the demo's output is gone")
    if code == 0 and not run_folder.results("train").is_file():
        raise DemoStopped(f"the run was stopped before its last step; its log: {run_folder.log}")
    if code != 0:
        tail = "\n".join(line[:WIDTH] for line in run_folder.log.read_text().splitlines()[-30:])
        raise DemoFailed(
            f"the run failed with exit code {code}. The end of its log says why:\n{tail}\n"
            f"The whole log: {run_folder.log}"
        )


def announce(steps: int, log: Path) -> None:
    """Print what runs, what one step is, what the progress lines mean, and where the log is.

    `steps` is the number of the run's steps, `log` the file of all processes' output.
    """
    print(f"""\
  Four processes: the learner trains the model; the actor answers sums, by the inference engine
  vLLM; the rewarder scores the answers; the queue server carries the work between them.
  {steps} steps. In each step the model is trained once, on 64 groups. A group has 8 answers to one sum,
  sampled from the model at random. Groups all right or all wrong teach nothing: others are made.
    reward     share of right answers in the step's groups: less than the skill, as these answers
               are sampled at random
    staleness  age in steps of the weights that gave these answers: 0 for the newest weights
    entropy    how unsure the model is of its next digit: 0 is sure, 1 as among three equal choices
  To measure the skill, the model gives only its likeliest answer to each held-out sum.
  vLLM starts now, which takes a minute or two. The times below count from now.
  All output of the processes is in {log}""", flush=True)  # fmt: skip


class Progress:
    """Writes every line of the run's processes to `log`, and prints the run's progress.

    The progress is read from the files in `run_folder`, not from the lines. `steps` is the number of the
    run's steps. If `silent`, nothing is printed. Printed seconds count from the creation. Safe in
    several threads. `unread` becomes True once the reader of standard output is gone: then the run is
    told to end.
    """

    def __init__(self, run_folder: RunFolder, steps: int, log: TextIO, silent: bool = False) -> None:
        self._run_folder = run_folder
        self._steps = steps
        self._log, self._silent = log, silent
        self._lock = threading.Lock()
        self._started = self._printed_at = time.monotonic()
        self._step = 0
        self._evaluated = -1
        self.unread = False

    def __call__(self, report: Report) -> None:
        """Write `report`, a line or event of a process, to the log; print it if it tells of an error.

        That is a line of level error, or the end of a process with another exit code than 0. At each
        report of the learner print new evaluations and steps. After 60 s without a printed line print
        what the run waits for, at the next report.
        """
        with self._lock:
            print(f"{report.child} | {report.text}", file=self._log, flush=True)
            if self._silent:
                return
            failed = report.kind == "ended" and "exit code 0" not in report.text
            if failed or "[error" in report.text:
                self._print(f"{report.child}: {report.text}")
            if report.child.startswith("learner"):
                self._show_evaluation()
                self._show_steps()
            if time.monotonic() - self._printed_at > _QUIET_S:
                awaited = "vLLM" if self._evaluated < 0 else f"step {self._step + 1}"
                self._print(f"Still waiting for {awaited}. The log says more.")

    def _show_evaluation(self) -> None:
        """Print the newest evaluation, its step and share solved, if it is newer than the last printed.

        The evaluation is read from the run's results. Without results nothing is printed.
        """
        results = self._run_folder.results("eval")
        found = json.loads(results.read_text()) if results.is_file() else {"step": -1}
        if found["step"] > self._evaluated:
            self._evaluated = found["step"]
            when = f"after step {self._evaluated}" if self._evaluated else "before training"
            self._print(f"{when}: {found['eval/rewards/accuracy/mean']:.1%} of the held-out sums solved")

    def _show_steps(self) -> None:
        """Print a line for the first step, each fifth and the last, of those since the last call.

        A line has step, reward, staleness and entropy, as metrics.jsonl has them (0 if it has not).
        """
        for row in read_json_lines(self._run_folder.metrics)[self._step :]:
            self._step = row["step"]
            if self._step in (1, self._steps) or self._step % _STEPS_PER_LINE == 0:
                reward, staleness, entropy = (row.get(name, 0) for name in _SHOWN)
                self._print(
                    f"step {self._step:>3} of {self._steps}   reward {reward:.2f}   "
                    f"staleness {staleness:.2f}   entropy {entropy:.2f}"
                )

    def _print(self, text: str) -> None:
        """Print a text after the seconds since the start, cut to 100 columns, and store the time.

        If the reader of the output is gone, set `unread`, and end the run by one SIGINT to this process.
        """
        self._printed_at = time.monotonic()
        try:
            print(f"{self._printed_at - self._started:5.0f} s  {text}"[:WIDTH], flush=True)
        except BrokenPipeError:
            if not self.unread:  # a second signal would kill the run
                os.kill(os.getpid(), signal.SIGINT)
            self.unread = True
