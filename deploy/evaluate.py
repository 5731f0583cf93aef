"""`penstock evaluate`: held-out questions through the same actors and rewarders, nothing trained."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from penstock.common.config.command import Result, ResultCommand, build
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.role_command import LearnerCommand
from penstock.common.config.variables import EnvFile, read_environment
from penstock.common.errors import ConfigError
from penstock.common.files.reading import at_home, parse_json, reading
from penstock.common.text import one_line
from penstock.deploy.up import Printer, Up

_VARIABLES = {
    "model": "LEARNER_MODEL", "dataset": "LEARNER_EVAL_DATASET", "split": "LEARNER_EVAL_SPLIT",
    "samples": "LEARNER_EVAL_SAMPLES", "generations": "LEARNER_EVAL_NUM_GENERATIONS",
    "temperature": "LEARNER_EVAL_TEMPERATURE", "rewards": "LEARNER_REWARDS", "name": "RUN_NAME",
}  # fmt: skip
"""The variable that each flag sets."""

_TRAINING = {
    "LEARNER_DATASET": "", "LEARNER_DATASET_WEIGHTS": "", "LEARNER_DATASET_STREAMING": "false",
    "LEARNER_EVAL_HOLDOUT": "0",
}  # fmt: skip
"""The variables of a training set, as if there were none."""

_LENGTHS = ("LEARNER_MAX_PROMPT_LENGTH", "LEARNER_MAX_COMPLETION_LENGTH")


class Evaluate(ResultCommand):
    """Answer held-out questions with a model and print pass@1, avg@k and maj@k.

    Settings without a flag here are variables, as for `penstock up`. Lengths that are not set are made
    to fit the model. With questions of its own, an evaluation reads no training set. `penstock samples
    RUN --evaluations` shows the answers.
    """

    env_file: EnvFile | None = Field(None, description="variables of all processes; this one's win")
    name: str = Field("evaluate", description="name of the run")
    model: str | None = Field(
        None, description="Hugging Face folder, such as a checkpoint's model/, or a hub id"
    )
    dataset: str | None = Field(None, description="questions: a file, a saved folder, or a hub id")
    split: str | None = Field(None, description="split of the questions")
    samples: PositiveInt | None = Field(None, description="number of questions; by default all")
    generations: PositiveInt | None = Field(None, description="answers per question (k)")
    temperature: NonNegativeFloat | None = Field(None, description="temperature; by default 0, greedy")
    rewards: str | None = Field(
        None, description="as LEARNER_REWARDS; `accuracy` and its like decide what is right"
    )

    def execute(self) -> int:
        """Evaluate and print the figures. Return the run's exit code, 1 if it was stopped early, else 0.

        The run's processes are those of `penstock up`, and have ended on return. The flags,
        LEARNER_EVALUATE_ONLY=true, no training set and fitting lengths are set as variables of this
        process. --rewards leaves no weights of others, nor a metric. With --json the processes' lines go
        to standard error. Raise ConfigError if no questions are named, if the run exists already or a
        setting is wrong, RunTaken if a `penstock up` has the run.
        """
        given = {variable: getattr(self, flag) for flag, variable in _VARIABLES.items()}
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})
        os.environ |= {"LEARNER_EVALUATE_ONLY": "true", "LEARNER_RESUME": "auto"}
        if self.rewards:
            os.environ |= {"LEARNER_REWARD_WEIGHTS": "", "LEARNER_METRIC_FOR_BEST_MODEL": ""}
        variables = read_environment(self.env_file)
        if not (variables.get("LEARNER_EVAL_DATASET") or variables.get("LEARNER_EVAL_HOLDOUT")):
            raise ConfigError("--dataset is missing: name the questions, or set LEARNER_EVAL_DATASET")
        os.environ.update(_TRAINING if variables.get("LEARNER_EVAL_DATASET") else {})
        fitting = fitting_lengths(variables)
        os.environ.update({name: str(length) for name, length in fitting.items()})
        folder = build(LearnerCommand, {"env_file": self.env_file}).run.folder
        results = folder.results("eval")
        if results.is_file() or folder.journal.exists():
            raise ConfigError(
                f"{folder.path} exists already: choose another --name, or remove the folder"
            )
        if fitting and not self.as_json:
            lengths = ", ".join(f"{name}={length}" for name, length in fitting.items())
            print(f"The model takes fewer tokens than the default lengths: {lengths}", flush=True)
        code = Up(env_file=self.env_file).run(Printer(sys.stderr) if self.as_json else None)
        if code:
            return code
        if not results.is_file():
            print(f"\nStopped before all answers were there. To start again, remove {folder.path}")
            return 1
        return self.show(read_results(results))


def fitting_lengths(variables: Mapping[str, str]) -> dict[str, int]:
    """Return by variable the lengths, in tokens, that a model with a short context needs; {} for others.

    `variables` are those of the run. A length that is set stays as it is; if both are, return {}. The
    default of 512 tokens for prompt and completion each becomes half of the context, or what the other
    one leaves. Return {} too if the model's configuration cannot be read: the learner reports that.
    Example: a context of 128 gives 64 and 64, and 28 for the completion if 100 is set for the prompt.
    """
    missing = [name for name in _LENGTHS if name not in variables]
    try:
        limit = context_of(variables.get("LEARNER_MODEL", ""), variables.get("LEARNER_MODEL_REVISION"))
        given = sum(int(variables[name]) for name in _LENGTHS if name in variables)
    except (OSError, ValueError, TypeError):
        return {}
    default = LearnerSettings.model_fields["max_completion_length"].default
    if not missing or not limit or given + default * len(missing) <= limit or given >= limit:
        return {}
    return dict.fromkeys(missing, min(default, (limit - given) // len(missing)))


def context_of(model: str, revision: str | None) -> int:
    """Return the most tokens that a model takes by its config.json, 0 if that does not say.

    `model` is a folder or a hub id, of which this file alone is downloaded. Raise OSError or ValueError
    if the file cannot be read, and TypeError if it is no JSON object.
    """
    model = at_home(model)
    path = Path(model) / "config.json"
    if not os.path.isdir(model):
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model, "config.json", revision=revision or None))
    config: Any = parse_json(path.read_bytes())
    if not isinstance(config, dict):
        raise TypeError(f"{path} is no JSON object, expected a model's configuration")
    return int((config.get("text_config") or config).get("max_position_embeddings") or 0)


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
