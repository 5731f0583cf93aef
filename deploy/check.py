"""`penstock check`: settings, data, rewards and gold answers of a run, before anything is started."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from pydantic import Field, FilePath, NonNegativeInt
from pydantic_settings import CliToggleFlag

from penstock.common.config.command import Result, ResultCommand
from penstock.common.errors import ConfigError, DataError, DeadlineExceeded
from penstock.common.text import SHOWN, as_text, one_line

_WARN_SHARE, _ERROR_SHARE = 0.01, 0.2
_LONGEST_S = 3600
_SHOWN_GOLDS = 10
_MODULES = {"learner": "penstock.learner", "rewarder": "penstock.rewarders"}


class Check(ResultCommand):
    """Check a run before it starts: settings, data set, rewards, gold answers. Nothing is trained.

    The settings are variables, as for `penstock up`. Three rows are shown as model and rewards get
    them.
    """

    env_file: FilePath | None = Field(None, description="file with variables; those of the process win")
    rows: NonNegativeInt = Field(3, description="rows to show")
    accept_unreadable_golds: CliToggleFlag[bool] = Field(
        False, description="no error if over 20% of the gold answers cannot be read"
    )

    def execute(self) -> int:
        """Start `learner --dry-run` and `rewarder --check`, print what they find; return an exit code.

        It is the learner's or the rewarder's if one fails, which then has printed its error, 78 if a
        reward cannot be used, 65 if too many gold answers cannot be read, else 0. Raise
        DeadlineExceeded if one takes over an hour.
        """
        with tempfile.TemporaryFile() as plan, tempfile.TemporaryFile() as verdict:
            learner = ["learner", "--dry-run", "--json", "--rows", str(self.rows)]
            for command, source, target in (
                (learner, None, plan),
                (["rewarder", "--check"], plan, verdict),
            ):
                if code := self._run(command, source, target):
                    return code
                target.seek(0)
            plan.seek(0)
            return self.show(self.joined([json.loads(line) for line in plan], json.load(verdict)))

    def _run(self, command: Sequence[str], source: IO[bytes] | None, target: IO[bytes]) -> int:
        """Run a role's command from a file to a file; return its exit code. Raise DeadlineExceeded."""
        role, *flags = command
        given = ["--env-file", str(self.env_file)] if self.env_file else []
        program = [sys.executable, "-P", "-m", _MODULES[role]]
        try:
            return subprocess.run(
                [*program, *flags, *given], stdin=source or subprocess.DEVNULL, stdout=target,
                timeout=_LONGEST_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"`{' '.join(command)}` took more than {_LONGEST_S} s: take fewer rows by "
                "LEARNER_DATASET=NAME#ROWS"
            ) from error

    def joined(self, plan: Sequence[dict[str, Any]], verdict: dict[str, Any]) -> Result:
        """Return what both processes found, and the exit code."""
        contract = next(line["contract"] for line in plan if "contract" in line)
        rows = [line["row"] for line in plan if "row" in line]
        lines = [f"{name:<24}{value}" for name, value in contract["figures"].items()]
        for number, row in enumerate(rows):
            read = verdict["rows"][number] if verdict["rows"] else None
            lines += ["", *_row_lines(row, read, bool(verdict["rows"]))]
        lines += ["", *_gold_lines(verdict), ""]
        bad = {name: reason for name, reason in verdict["rewards"].items() if reason}
        lines += [
            f"reward {name}: {reason or 'can be used'}" for name, reason in verdict["rewards"].items()
        ]
        share = len(verdict["unreadable"]) / max(1, verdict["golds"])
        too_many = share > _ERROR_SHARE and not self.accept_unreadable_golds
        if too_many:
            lines += [
                f"error: {share:.0%} of the gold answers cannot be read, over {_ERROR_SHARE:.0%}. "
                "Correct them or LEARNER_SOLUTION_COLUMN, use another reward, or accept this with "
                "--accept-unreadable-golds"
            ]
        elif share > _WARN_SHARE:
            lines += [
                f"warning: {share:.1%} of the gold answers cannot be read; their groups are set aside"
            ]
        code = ConfigError.exit_code if bad else DataError.exit_code if too_many else 0
        found = {**verdict, "figures": contract["figures"], "shown": rows, "share_unreadable": share}
        return Result("\n".join(map(one_line, lines)), [found], code)


def _row_lines(row: dict[str, Any], gold: str | None, has_gold: bool) -> list[str]:
    """Return the lines that show a row: its prompt, gold answer and columns."""
    columns = row["columns"]
    lines = [f"{row['where']}: prompt of {row['tokens']} tokens", f"  {row['prompt'][:SHOWN]}"]
    if has_gold:
        solution = as_text(columns.get("solution"))[-SHOWN:]
        lines += [f"  gold answer: {solution}", f"  read as: {'nothing' if gold is None else gold}"]
    return [*lines, f"  columns for rewards: {', '.join(columns)}"]


def _gold_lines(verdict: dict[str, Any]) -> list[str]:
    """Return the lines on the gold answers: how many cannot be read, the first ten of them, and why."""
    bad = verdict["unreadable"]
    if not verdict["golds"]:
        return ["gold answers: no built-in reward needs them"]
    lines = [f"gold answers: {verdict['golds']} checked, {len(bad)} cannot be read"]
    lines += [f"  {where}: {why}: {as_text(gold)[:100]}" for where, gold, why in bad[:_SHOWN_GOLDS]]
    return lines + [f"  and {len(bad) - _SHOWN_GOLDS} more"] * (len(bad) > _SHOWN_GOLDS)
