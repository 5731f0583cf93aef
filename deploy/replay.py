"""`penstock replay`: the learner's replay, in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode

from penstock.common.config.command import Result, ResultCommand
from penstock.common.files.run_folder import RunFolder, RunPath
from penstock.common.text import one_line


def _split(text: object) -> object:
    """Return {"loss_type": "gspo"} for "LEARNER_LOSS_TYPE=gspo"; a map unchanged, {} for None or "".

    A comma before LEARNER_NAME= separates two settings; any other is part of the value. Raise ValueError
    unless each setting in a text is LEARNER_NAME=VALUE, and given once.
    """
    if not isinstance(text, str):
        return text or {}
    found: dict[str, str] = {}
    for change in re.split(r",(?=LEARNER_[A-Z0-9_]+=)", text):
        name, equals, value = change.partition("=")
        if not equals or not name.startswith("LEARNER_"):
            raise ValueError(f"{change}: expected LEARNER_NAME=VALUE, such as LEARNER_EPSILON=0.3")
        setting = name.removeprefix("LEARNER_").lower()
        if setting in found:
            raise ValueError(f"{name} is given twice, {found[setting]!r} and {value!r}: leave one out")
        found[setting] = value
    return found


class Replay(ResultCommand):
    """Train a run again from its journal alone, and compare weights and metrics with the run's.

    Example: penstock replay runs/mine LEARNER_LOSS_TYPE=gspo LEARNER_EPSILON=0.0003
    """

    folder: CliPositionalArg[RunPath] = Field(description="the run's folder")
    settings: CliPositionalArg[Annotated[dict[str, str], NoDecode, BeforeValidator(_split)]] = Field(
        {}, description="settings to change, as LEARNER_NAME=VALUE"
    )
    out: Path | None = Field(None, description="folder for model and metrics; by default FOLDER/replay")

    def execute(self) -> int:
        """Replay in a child process, print the comparison, return 0.

        If the child fails, return its exit code and print nothing. Model and metrics are written to
        --out, by default the folder `replay` in the run's folder. What the child prints beside the
        comparison goes to standard error. The wait for the child has no limit.
        """
        out = self.out or RunFolder(self.folder).replay
        changes = json.dumps(self.settings)
        command = [sys.executable, "-m", "penstock.learner.replay", str(self.folder), str(out), changes]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            return ended.returncode
        *other_lines, answer = ended.stdout.splitlines()
        print(*map(one_line, other_lines), sep="\n", end="", file=sys.stderr)
        return self.show(compared(json.loads(answer), out))


def compared(found: dict[str, Any], out: Path) -> Result:
    """Return the comparison that `penstock.learner.replay` printed, as text and as one object.

    `found`, the object, has "steps", the number of Updates, "weights_difference", the largest difference
    of a weight or None if no checkpoint of the last step is there, and "steps_with_other_metrics", a
    list. The text names `out`, the folder that the replay has written.
    """
    difference, steps = found["weights_difference"], found["steps_with_other_metrics"]
    weights = "not compared: no checkpoint of the last step" if difference is None else f"{difference:g}"
    text = (
        f"{found['steps']} Updates replayed into {out}\nlargest difference of a weight   {weights}\n"
        f"steps with other metrics         {', '.join(map(str, steps)) or 'none'}"
    )
    return Result(text, [found])
