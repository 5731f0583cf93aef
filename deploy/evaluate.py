"""`penstock evaluate`: held-out questions through the same actors and rewarders, nothing trained."""

import argparse
import json
import os
from pathlib import Path

from penstock.common.config.command import LearnerCommand, load
from penstock.common.errors import ConfigError
from penstock.deploy.up import run_up

_VARIABLES = {
    "model": "LEARNER_MODEL",
    "dataset": "LEARNER_EVAL_DATASET",
    "split": "LEARNER_EVAL_SPLIT",
    "samples": "LEARNER_EVAL_SAMPLES",
    "generations": "LEARNER_EVAL_NUM_GENERATIONS",
    "temperature": "LEARNER_EVAL_TEMPERATURE",
    "rewards": "LEARNER_REWARDS",
    "name": "RUN_NAME",
}


def main(arguments: list[str]) -> int:
    """Evaluate and print the figures; raises ConfigError."""
    options = parse_arguments(arguments)
    given = {
        variable: str(value)
        for option, variable in _VARIABLES.items()
        if (value := getattr(options, option)) is not None
    }
    os.environ.update(given | {"LEARNER_EVALUATE_ONLY": "true"})
    files = ["--env-file", options.env_file] if options.env_file else []
    settings = load(LearnerCommand, "penstock evaluate", files)
    folder = settings.run.folder
    results = folder.results("eval")
    if results.is_file() or folder.journal.exists():
        raise ConfigError(f"{folder.path} is there already: choose another --name, or remove it")
    code = run_up(files)
    if code == 0 and not results.is_file():
        print(f"\nStopped before all answers were there. To start again, remove {folder.path}")
        return 1
    if code == 0:
        print_results(results)
    return code


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line of `penstock evaluate`."""
    parser = argparse.ArgumentParser(
        prog="penstock evaluate",
        description="Answer held-out questions with a model. What is not given here comes from "
        "variables, as for `penstock up`; `penstock samples RUN --evaluations` shows the answers.",
    )
    parser.add_argument("--env-file", help="variables for all; the process environment wins")
    parser.add_argument("--name", default="evaluate", help="the run's name (default: evaluate)")
    parser.add_argument("--model", help="a Hugging Face folder, such as a checkpoint's, or a hub id")
    parser.add_argument("--dataset", help="questions: a file, a saved folder, or a hub id")
    parser.add_argument("--split", help="of the questions")
    parser.add_argument("--samples", type=int, help="so many questions (default: all)")
    parser.add_argument("--generations", type=int, metavar="K", help="answers per question")
    parser.add_argument("--temperature", type=float, help="of the answers (default: 0, greedy)")
    parser.add_argument("--rewards", help="the first says whether an answer is right")
    return parser.parse_args(arguments)


def print_results(path: Path) -> None:
    """The figures of an evaluation, one per line."""
    found = json.loads(path.read_text())
    print()
    for name, value in found.items():
        if name != "step":
            print(f"{name.removeprefix('eval/'):<32}{value:>12.4f}")
    print(f"\nResults  {path}\nAnswers  penstock samples {path.parent} --evaluations")
