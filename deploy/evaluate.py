"""`penstock evaluate`: held-out questions through the same actors and rewarders, nothing trained."""

import os
import sys
from pathlib import Path

from pydantic import Field, FilePath, NonNegativeFloat, PositiveInt

from penstock.common.config.command import Result, ResultCommand, build
from penstock.common.config.role_command import LearnerCommand
from penstock.common.errors import ConfigError
from penstock.common.files.reading import parse_json, reading
from penstock.common.text import one_line
from penstock.deploy.up import Printer, Up

_VARIABLES = {
    "model": "LEARNER_MODEL", "dataset": "LEARNER_EVAL_DATASET", "split": "LEARNER_EVAL_SPLIT",
    "samples": "LEARNER_EVAL_SAMPLES", "generations": "LEARNER_EVAL_NUM_GENERATIONS",
    "temperature": "LEARNER_EVAL_TEMPERATURE", "rewards": "LEARNER_REWARDS", "name": "RUN_NAME",
}  # fmt: skip
"""The variable that each flag sets."""


class Evaluate(ResultCommand):
    """Answer held-out questions with a model and print pass@1, avg@k and maj@k.

    Settings without a flag here are variables, as for `penstock up`. `penstock samples RUN
    --evaluations` shows the answers.
    """

    env_file: FilePath | None = Field(None, description="variables of all processes; this one's win")
    name: str = Field("evaluate", description="name of the run")
    model: str | None = Field(
        None, description="Hugging Face folder, such as a checkpoint's model/, or a hub id"
    )
    dataset: str | None = Field(None, description="questions: a file, a saved folder, or a hub id")
    split: str | None = Field(None, description="split of the questions")
    samples: PositiveInt | None = Field(None, description="number of questions; by default all")
    generations: PositiveInt | None = Field(None, description="answers per question (k)")
    temperature: NonNegativeFloat | None = Field(None, description="temperature; by default 0, greedy")
    rewards: str | None = Field(None, description="the first one decides whether an answer is right")

    def execute(self) -> int:
        """Evaluate and print the figures. Return the run's exit code, 1 if it was stopped early, else 0.

        The run's processes are those of `penstock up`, and have ended on return. The flags, and
        LEARNER_EVALUATE_ONLY=true, are set as variables of this process. With --json the processes'
        lines go to standard error. Raise ConfigError if the run exists already or a setting is wrong,
        RunTaken if a `penstock up` has the run.
        """
        given = {variable: getattr(self, flag) for flag, variable in _VARIABLES.items()}
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})
        os.environ["LEARNER_EVALUATE_ONLY"] = "true"
        folder = build(LearnerCommand, {"env_file": self.env_file}).run.folder
        results = folder.results("eval")
        if results.is_file() or folder.journal.exists():
            raise ConfigError(
                f"{folder.path} exists already: choose another --name, or remove the folder"
            )
        code = Up(env_file=self.env_file).run(Printer(sys.stderr) if self.as_json else None)
        if code:
            return code
        if not results.is_file():
            print(f"\nStopped before all answers were there. To start again, remove {folder.path}")
            return 1
        return self.show(read_results(results))


def read_results(path: Path) -> Result:
    """Return the figures of an evaluation: as text one per line, and as one object.

    `path` is the file with the results in the run's folder. Names lose their "eval/", and the step is
    left out. The text ends with where results and answers are. Raise ConfigError if the file is damaged,
    OSError if it cannot be read.
    """
    with reading(path, "Remove the run's folder and evaluate again"):
        found = parse_json(path.read_bytes())
        figures = {name.removeprefix("eval/"): value for name, value in found.items() if name != "step"}
        lines = [one_line(f"{name:<32}{value:>12.4f}") for name, value in figures.items()]
    files = f"\nResults  {path}\nAnswers  penstock samples {path.parent} --evaluations"
    return Result("\n".join(["", *lines, files]), [figures])
