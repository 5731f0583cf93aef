"""`penstock try-reward`: the rewards of a file, called on gold answers and on garbage."""

import ast
import os
from pathlib import Path

from pydantic import Field, PositiveInt
from pydantic_settings import CliPositionalArg

from penstock.common.config.command import Result, build
from penstock.common.config.role_command import LearnerCommand, RewarderCommand
from penstock.common.errors import ConfigError
from penstock.common.files.reading import read_text
from penstock.common.text import one_line
from penstock.deploy.doctor.check import RoleCheck, judge_rewards

_NO_REWARD = "is of no known form"
_HINT = "To try one function alone, write FILE:NAME; a name that begins with _ is left out"


class TryReward(RoleCheck):
    """Call rewards on the gold answer and on garbage of three rows, in the sandbox, as in a run.

    FILE is a Python file with rewards, or FILE:NAME for one of them. Without it the rewards are those
    of LEARNER_REWARDS. No model is needed.
    """

    file: CliPositionalArg[str] = Field("", description="FILE.py or FILE.py:NAME; else LEARNER_REWARDS")
    dataset: str | None = Field(None, description="questions: a file, a saved folder, or a hub id")
    split: str | None = Field(None, description="split of the questions")
    completions: str | None = Field(
        None, description="what the functions get: text, or messages, as with a chat template"
    )
    rows: PositiveInt = Field(3, le=3, description="rows to try, at most three")

    def execute(self) -> int:
        """Try the rewards, and print values, seconds and failures. Return 78 if one fails, else 0.

        The flags are set as variables of this process. If learner or rewarder ends with an error, it is
        printed there, and its code returned. Raise ConfigError for wrong variables, or a file that
        cannot be read or has no reward.
        """
        os.environ.update(self._variables())
        for role in (LearnerCommand, RewarderCommand):
            build(role, {"env_file": self.env_file})
        found = self.ask_roles("--rewards-alone", "--rows", str(self.rows))
        if isinstance(found, int):
            return found
        verdict, tried = found[1], found[1]["rewards"]
        if self.file and ":" not in self.file:
            verdict["rewards"] = without_helpers(tried)
        bad, lines = judge_rewards(verdict)
        out = [name for name in tried if name not in verdict["rewards"]]
        lines += [f"left out, of no known form: {one} ({self.file}:{one} says why)" for one in out]
        lines += [_HINT] * (bad and ":" not in self.file and len(verdict["rewards"]) > 1)
        text = "\n".join(map(one_line, lines))
        return self.show(Result(text, [verdict], ConfigError.exit_code if bad else 0))

    def _variables(self) -> dict[str, str]:
        """Return the variables that the flags set, by name. Raise ConfigError as `rewards_in` does."""
        given = {"DATASET": self.dataset, "DATASET_SPLIT": self.split}
        given["REWARD_COMPLETIONS"] = self.completions
        if self.file:
            given |= {"REWARDS": ",".join(rewards_in(self.file)), "REWARD_WEIGHTS": ""}
            given["METRIC_FOR_BEST_MODEL"] = ""
        return {f"LEARNER_{name}": text for name, text in given.items() if text is not None}


def without_helpers(reasons: dict[str, str]) -> dict[str, str]:
    """Return the reasons by function without those of no known form, unless that leaves none."""
    kept = {name: reason for name, reason in reasons.items() if _NO_REWARD not in reason}
    return kept or reasons


def rewards_in(asked: str) -> list[str]:
    """Return the rewards that `asked`, FILE.py or FILE.py:NAME, stands for, as FILE.py:NAME each.

    A file stands for its entries of ms-swift's `orms` or, without one, its functions and classes whose
    name does not begin with an underscore. The file is not run. Raise ConfigError if it cannot be read,
    is no Python, or has none of these.
    """
    if ":" in asked or not asked.endswith(".py"):
        return [asked]
    try:
        body = ast.parse(read_text(Path(asked), f"try-reward {asked}")).body
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{asked}{line}: no Python: {error}. Correct the file") from error
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]
    registered = [name for node in body if (name := _registered(node))]
    if not (public or registered):
        raise ConfigError(f"{asked} has no function or class: expected a reward, see docs/rewards.md")
    return [f"{asked}:{name}" for name in registered or public]


def _registered(node: ast.stmt) -> str:
    """Return NAME of a statement `orms["NAME"] = ...`, "" for any other statement."""
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Name(id="orms"), slice=ast.Constant(value=str(name)))]
        ):
            return name
    return ""
