"""`penstock check`: settings, data, rewards and gold answers of a run, before anything is started."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from pydantic import Field, NonNegativeInt
from pydantic_settings import CliToggleFlag

from penstock.common.config.command import Result, ResultCommand, build
from penstock.common.config.role_command import ActorCommand, LearnerCommand, RewarderCommand
from penstock.common.config.variables import EnvFile
from penstock.common.errors import ConfigError, DataError, DeadlineExceeded, PenstockError
from penstock.common.guard import guard_children
from penstock.common.text import SHOWN, as_text, from_line, one_line, short
from penstock.common.wire.reward_spec import BUILT_IN
from penstock.deploy.child import describe_end
from penstock.deploy.doctor.inputs import REMEDY, check_inputs

_WARN_SHARE, _ERROR_SHARE = 0.01, 0.2
_LONGEST_S = 3600
_SHOWN_GOLDS = 10
_TRIED_ROWS = 3
"""Rows on which the rewarder tries the rewards."""
_REMEDY = (
    f"error: over {_ERROR_SHARE:.0%} of a data set's gold answers cannot be read. Correct them or "
    "LEARNER_SOLUTION_COLUMN, use another reward, or accept this with --accept-unreadable-golds"
)
_NO_DIFFERENCE = (
    "  note: the gold answer gets no more than garbage, so this reward does not rate answers"
)
_MODULES = {"learner": "penstock.learner", "rewarder": "penstock.rewarders"}


class RoleCheck(ResultCommand):
    """Base of the commands that join what `learner --dry-run` and `rewarder --check` find."""

    env_file: EnvFile | None = Field(None, description="file with variables; those of the process win")

    def ask_roles(
        self, *flags: str, errors: IO[bytes] | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]] | int:
        """Run `learner --dry-run --json` with `flags`, then `rewarder --check` on its lines.

        Return the objects that the learner printed, and the rewarder's object. If one of the two fails,
        it prints its error; return its exit code then. They end with this process. Their standard error
        goes to the file `errors`, or to this process's for None. Raise DeadlineExceeded if one takes an
        hour, PenstockError if a signal killed it.
        """
        guard_children()
        with tempfile.TemporaryFile() as plan, tempfile.TemporaryFile() as verdict:
            learner = ["learner", "--dry-run", "--json", *flags]
            for command, source, target in (
                (learner, None, plan),
                (["rewarder", "--check"], plan, verdict),
            ):
                if code := self._run(command, source, target, errors):
                    return code
                target.seek(0)
            plan.seek(0)
            return _objects(plan), _objects(verdict)[-1]

    def _run(
        self,
        command: Sequence[str],
        source: IO[bytes] | None,
        target: IO[bytes],
        errors: IO[bytes] | None,
    ) -> int:
        """Run `command`, a role's name and its flags, with --env-file if set; return its exit code.

        Its standard output is written to `target`. Its input is `source`, empty for None. Its standard
        error goes to `errors`, this process's for None. Raise DeadlineExceeded if the command takes over
        an hour, PenstockError if a signal killed it.
        """
        role, *flags = command
        given = ["--env-file", str(self.env_file)] if self.env_file else []
        program = [sys.executable, "-P", "-m", _MODULES[role]]
        try:
            code = subprocess.run(
                [*program, *flags, *given], stdin=source or subprocess.DEVNULL, stdout=target,
                stderr=errors, timeout=_LONGEST_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"`{' '.join(command)}` took more than {_LONGEST_S} s: take fewer rows by "
                "LEARNER_DATASET=NAME#ROWS"
            ) from error
        if code < 0:
            end = f"{describe_end(code)}, expected an exit code; see its output above, and try again"
            raise PenstockError(f"`{' '.join(command)}`: {end}")
        return code


class Check(RoleCheck):
    """Check a run before it starts: settings, data set, rewards, gold answers. Nothing is trained.

    The settings are variables, as for `penstock up`. Three rows are shown as model and rewards get
    them. Each reward is called on their gold answers and on garbage.
    """

    rows: NonNegativeInt = Field(3, description="rows to show")
    accept_unreadable_golds: CliToggleFlag[bool] = Field(
        False, description="no error if over 20% of a data set's gold answers cannot be read"
    )

    def execute(self) -> int:
        """Print what `examine` finds and return the exit code. Raise what `examine` raises."""
        found = self.examine()
        return found if isinstance(found, int) else self.show(found)

    def examine(self, errors: IO[bytes] | None = None) -> Result | int:
        """Run `learner --dry-run` and `rewarder --check`; return what they find, as `joined` does.

        If one fails, its exit code is returned; its error goes to the file `errors`, or to this
        process's standard error for None. Raise ConfigError for wrong variables, DeadlineExceeded if one
        takes an hour, PenstockError if killed.
        """
        self._check_settings()
        rows = str(max(self.rows, _TRIED_ROWS))
        found = self.ask_roles("--rows", rows, errors=errors)
        return found if isinstance(found, int) else self.joined(*found)

    def _check_settings(self) -> None:
        """Raise ConfigError with the mistakes in all roles' variables and all that is absent."""
        mistakes: list[str] = []
        for role in (LearnerCommand, ActorCommand, RewarderCommand):
            try:
                found = build(role, {"env_file": self.env_file})
                absent = check_inputs(found.learner) if isinstance(found, LearnerCommand) else ()
                mistakes += [f"{one.found}: {REMEDY}" for one in absent]
            except ConfigError as error:
                mistakes += str(error).splitlines()
        if mistakes:
            raise ConfigError("\n".join(dict.fromkeys(mistakes)))

    def joined(self, plan: Sequence[dict[str, Any]], verdict: dict[str, Any]) -> Result:
        """Return what both processes found, as text and as one object, and the exit code.

        `plan` has the objects that the learner printed: its contract, and the rows to show. `verdict` is
        the rewarder's object: what rewards get of each row, gold answers per data set, and by reward why
        it cannot be used, "" if it can, and its trials. The code is 78 if a reward cannot be used or
        fails, 65 if over 20% of a data set's gold answers cannot be read (never with
        --accept-unreadable-golds), else 0.
        """
        contract = next(line["contract"] for line in plan if "contract" in line)
        rows = [line["row"] for line in plan if "row" in line][: self.rows]
        lines = [f"{name:<30}{value}" for name, value in contract["figures"].items()]
        for row, seen in zip(rows, verdict["rows"], strict=False):
            lines += ["", *_row_lines(row, seen)]
        limit = 1.0 if self.accept_unreadable_golds else _ERROR_SHARE
        judged = {name: one | _judgement(one, limit) for name, one in verdict["data"].items()}
        lines += ["", *(line for name, one in judged.items() for line in _gold_lines(name, one))]
        if not judged:
            lines += ["gold answers: no built-in reward needs them"]
        bad, told = judge_rewards(verdict)
        lines += told
        too_many = any(one["level"] == "error" for one in judged.values())
        lines += [_REMEDY] * too_many
        code = ConfigError.exit_code if bad else DataError.exit_code if too_many else 0
        shown = {"rows": verdict["rows"][: self.rows]}
        found = {**verdict, **shown, "data": judged, "figures": contract["figures"], "shown": rows}
        return Result("\n".join(map(one_line, lines)), [found], code)


def judge_rewards(verdict: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a reward cannot be used or fails, and the lines that tell of each reward.

    `verdict` is the rewarder's object: by reward why it cannot be used, "" if it can, and its trials. A
    reward has a line, one more per row that it was tried on, and, if it is not built in, a note if the
    gold answer never got more than garbage.
    """
    bad, lines = False, []
    for name, reason in verdict["rewards"].items():
        trial = verdict["trials"].get(name, {"calls": []})
        loaded = f", loaded in {trial['load_s']:.1f} s" if "load_s" in trial else ""
        failed = any(call["failures"] for call in trial["calls"])
        lines += [f"reward {name}: {reason or ('fails' if failed else 'can be used')}{loaded}"]
        lines += [line for call in trial["calls"] for line in _call_lines(call)]
        values = [call["values"] for call in trial["calls"] if len(call["values"]) == 2]
        if values and all((one["gold"] or 0.0) <= (one["garbage"] or 0.0) for one in values):
            lines += [_NO_DIFFERENCE] * (name not in BUILT_IN)
        bad = bad or bool(reason) or failed
    return bad, lines


def _call_lines(call: dict[str, Any]) -> list[str]:
    """Return the lines of a reward's call on a row: values and seconds, then each failure."""
    shown = {name: "none" if value is None else f"{value:g}" for name, value in call["values"].items()}
    values = ", ".join(f"{name} {value}" for name, value in shown.items())
    lines = [f"  {call['where']}: {values} ({call['seconds']:.2f} s)"] if values else []
    on = {"both": "the gold answer and garbage together", "gold": "the gold answer"}
    return lines + [
        f"  {call['where']}: fails on {on.get(name, name)}: {reason}"
        for name, reason in call["failures"].items()
    ]


def _objects(lines: IO[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects among `lines`, a role's output, in order; a library may print other lines.

    An object's line begins with `{"`; other lines are left out. Raise ValueError if one is no JSON.
    """
    return [from_line(line) for line in lines if line.startswith(b'{"')]


def _row_lines(row: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """Return the lines that show a row: its prompt, the gold answer, and the columns that rewards get.

    `row` is the learner's object about the row, `seen` the rewarder's. The gold answer, and how it is
    read or why it cannot be, is left out if the row has none or no reward reads it. Of the prompt the
    first, of the gold answer the last 2000 characters are shown, of a column 200.
    """
    lines = [f"{row['where']}: prompt of {row['tokens']} tokens", f"  {row['prompt'][:SHOWN]}"]
    if "solution" in row["columns"] and (seen["read"] or seen["why"]):
        read = f"read as {seen['read']}" if seen["read"] else f"cannot be read: {seen['why']}"
        lines += [f"  gold answer: {as_text(row['columns']['solution'])[-SHOWN:]}", f"  {read}"]
    values = (f"{name}={short(as_text(value))}" for name, value in seen["columns"].items())
    return [*lines, f"  rewards get: {', '.join(values)}"]


def _judgement(data: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return which share of a data set's gold answers cannot be read, and how bad that is.

    `data` has "golds", their number (above 0), and "unreadable", a list of those that cannot be read.
    The result is {"share": ..., "level": ...}: the share from 0 to 1, and the level "error" above the
    share `limit`, "warning" above 1%, else "".
    """
    share = len(data["unreadable"]) / data["golds"]
    level = "error" if share > limit else "warning" if share > _WARN_SHARE else ""
    return {"share": share, "level": level}


def _gold_lines(name: str, data: dict[str, Any]) -> list[str]:
    """Return lines on the gold answers of the data set `name` that cannot be read.

    The first line has their number and share of all, after the level if there is one. The first ten have
    a line each, with the place, why the answer cannot be read, and its text. A last line has the number
    of those beyond ten. `data` is the rewarder's object about the data set, and what `_judgement` added.
    """
    bad = data["unreadable"]
    level = f"{data['level']}: " if data["level"] else ""
    counts = f"{len(bad)} of {data['golds']} gold answers cannot be read ({data['share']:.1%})"
    lines = [f"{level}{name}: {counts}"]
    lines += [f"  {where}: {why}: {short(as_text(gold))}" for where, gold, why in bad[:_SHOWN_GOLDS]]
    return lines + [f"  and {len(bad) - _SHOWN_GOLDS} more"] * (len(bad) > _SHOWN_GOLDS)
