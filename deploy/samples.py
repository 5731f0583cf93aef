"""`penstock samples`: what a run sampled, read from its completions/ and evaluations.jsonl."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import CliPositionalArg, CliToggleFlag, CliVariadicArg

from penstock.common.config.command import Result, ResultCommand
from penstock.common.errors import ConfigError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.reading import absence, parse_json, reading
from penstock.common.files.run_folder import RunFolder, RunPath
from penstock.common.journal.audit import audit_journal
from penstock.common.log import configure_logs
from penstock.common.monitor.status_text import dead_rows, format_dead
from penstock.common.text import SHOWN, as_text, one_line, printable
from penstock.common.wire.messages import UNSCORED
from penstock.common.wire.plain import brief
from penstock.common.wire.reward_spec import COLUMNS

Row = dict[str, Any]

_FILE = re.compile(r"completions_(\d+)\.parquet")

_TEXTS = (
    "prompt", "completion", "ticket", "state", "failure", "finish_reason", "versions", "actors",
    "solution", "extra",
)  # fmt: skip
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(("step", "index", "completion_length"), int),
    "advantage": float,
    "staleness_max": int | None,
}
"""The type of each column of a table of completions; other columns hold numbers or None."""

_CHOICES = {
    "best": "was trained",
    "worst": "was trained",
    "no_spread": "is of a group that was filtered",
    "truncated": "was cut at the longest length",
    "failed": "could not be scored",
}
"""The flags that choose rows, each with the end of the sentence "none of 20 completions ..."."""


class Samples(ResultCommand):
    """Show completions of a run, newest step first, or the rows that one of the flags chooses."""

    run: CliPositionalArg[RunPath] = Field(description="the run's folder, such as runs/first")
    step: int | None = Field(None, description="this step alone")
    count: PositiveInt = Field(5, description="rows to show")
    width: NonNegativeInt = Field(600, description="letters of a text that are shown; 0: all")
    best: CliToggleFlag[bool] = Field(False, description="largest reward first")
    worst: CliToggleFlag[bool] = Field(False, description="smallest reward first")
    no_spread: CliToggleFlag[bool] = Field(False, description="completions of filtered groups")
    truncated: CliToggleFlag[bool] = Field(False, description="completions cut at the longest length")
    failed: CliToggleFlag[bool] = Field(False, description="completions without a score, and why")
    compare: CliVariadicArg[list[int] | None] = Field(
        None, min_length=2, max_length=2, description="the same questions at two steps, such as 10 50"
    )
    difficulty: CliToggleFlag[bool] = Field(False, description="per question: times asked, mean reward")
    evaluations: CliToggleFlag[bool] = Field(False, description="answers to held-out questions")

    @model_validator(mode="after")
    def _one_choice(self) -> "Samples":
        """Return self. Raise ValueError if two flags choose different rows, such as --best and --worst.

        The others are --no-spread, --truncated, --failed, --compare, --difficulty and --evaluations.
        --compare excludes --step too.
        """
        exclusive = (*_CHOICES, "compare", "difficulty", "evaluations")
        given = [name for name in exclusive if getattr(self, name)]
        given += ["step"] * (bool(self.compare) and self.step is not None)
        if len(given) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flags} exclude each other: give one")
        return self

    def execute(self) -> int:
        """Print the rows asked for, return 0. Raise ConfigError if there are none or a file is damaged.

        The rows are those of --evaluations, --compare, --difficulty, or one of the other choices.
        """
        configure_logs("samples", "text")
        if self.evaluations:
            return self.show(self.evaluated())
        if self.compare:
            return self.show(self.compared(self.compare))
        if self.failed and (dead := self.dead_groups()):
            return self.show(dead)
        rows = read_rows(self.run, self.step)
        return self.show(self.by_difficulty(rows) if self.difficulty else self.chosen(rows))

    def chosen(self, rows: list[Row]) -> Result:
        """Return up to `count` of the completions `rows`: the first that a flag such as --best chooses.

        Without a flag these are the first. --best and --worst order them by reward. Raise ConfigError if
        the flag chooses no row.
        """
        name = next((name for name in _CHOICES if getattr(self, name)), "")
        if not (found := select(rows, name)) and name:
            raise ConfigError(f"none of {len(rows)} completions {_CHOICES[name]}")
        return self.listed(found[: self.count])

    def dead_groups(self) -> Result | None:
        """Return the tickets of groups that died as a whole, by reason, from the run's journal.

        Such groups have no rows of completions. Return None if a completion alone has no score, if no
        group died, with --step, and without a journal. Raise ConfigError for a damaged file.
        """
        folder = RunFolder(self.run)
        if self.step is not None or not folder.journal.is_dir():
            return None
        if any(folder.completions.glob("*.parquet")) and select(read_rows(self.run), "failed"):
            return None
        if not (dead := list(reversed(audit_journal(folder).dead))):
            return None
        title = "Whole groups died, and have no completions here:"
        return Result(f"{title}\n{format_dead(dead)}", dead_rows(dead))

    def listed(self, rows: Sequence[Row], title: str = "") -> Result:
        """Return `rows`, completions, as text and as objects; the text begins with any `title`.

        Each completion has a line with its origin and rewards, and then its texts.
        """
        texts = [as_lines(row, self.width) for row in rows]
        return Result("\n".join([title] * bool(title) + texts), rows)

    def compared(self, steps: Sequence[int]) -> Result:
        """Return the first `count` questions asked at both of two `steps`, each with a row of each step.

        The row is the question's first one of the step. If no question was asked at both, return each
        step's first row, and a title that says so. Raise ConfigError if a step has no completions.
        """
        tables = [read_rows(self.run, step) for step in steps]
        asked = [{row["prompt"]: row for row in reversed(rows)} for rows in tables]
        both = [prompt for prompt in asked[0] if prompt in asked[1]][: self.count]
        if not both:
            title = "no question was asked at both steps; the first of each:"
            return self.listed([rows[0] for rows in tables], title)
        return self.listed([rows[prompt] for prompt in both for rows in asked])

    def by_difficulty(self, rows: Iterable[Row]) -> Result:
        """Return up to `count` questions, lowest mean reward first, with times asked and times filtered.

        `rows` are completions. Questions without any reward are left out. Questions with the same first
        2000 characters count as one: filtered groups' rows hold no more.
        """
        groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            groups[row["prompt"][:SHOWN]][row["ticket"]].append(row)
        table = [found for prompt, tickets in groups.items() if (found := _difficulty(prompt, tickets))]
        table = sorted(table, key=lambda row: tuple(row.values()))[: self.count]
        lines = [f"{'mean reward':>12}{'asked':>8}{'no spread':>11}   question (hardest first)"]
        for row in table:
            question = shown(row["prompt"], 80).partition("\n")[0]
            figures = f"{row['mean_reward']:>12.3f}{row['asked']:>8}{row['no_spread']:>11}"
            lines.append(f"{figures}   {question}")
        return Result("\n".join(lines), table)

    def evaluated(self) -> Result:
        """Return the answers to the first `count` held-out questions, by question and then step.

        With `step` these are the answers of this step's evaluation alone. Raise ConfigError if the file
        of evaluations is missing or damaged, or has no evaluation of the step.
        """
        path = RunFolder(self.run).evaluations
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: correct the folder, or wait for its learner")
        rows = read_json_lines(path, index=int, columns=dict, completions=list)
        found = [row for row in rows if self.step in (None, row["step"])]
        if not found:
            if rows:
                raise ConfigError(f"{path} has no evaluation of step {self.step}: use another --step")
            hint = "wait for the first; a run without LEARNER_EVAL_DATASET and _HOLDOUT has none"
            raise ConfigError(f"{path} has no evaluation yet: {hint}")
        rows = [row for row in found if row["index"] < self.count]
        rows.sort(key=lambda row: (row["index"], row["step"]))
        with reading(path, "Remove the rows of this step"):
            return Result("\n".join(answers_as_lines(row, self.width) for row in rows), rows)


def read_rows(run: Path, step: int | None = None) -> list[Row]:
    """Return all completions of a run's folder `run`, or of one step, newest step first.

    Within a step the order is the file's. Raise ConfigError if there are none, if the step has none, or
    if a file cannot be read.
    """
    files = completion_files(run)
    if step is not None and step not in files:
        there = f"choose another from {min(files)} to {max(files)}"
        raise ConfigError(f"{RunFolder(run).completions} holds no completions of step {step}: {there}")
    steps = [step] if step is not None else list(files)
    return [row for one in steps for row in read_table(files[one])]


def completion_files(run: Path) -> dict[int, Path]:
    """Return by step the file of completions in a run's folder `run`, newest step first.

    Raise ConfigError if there is none.
    """
    folder = RunFolder(run).completions
    named = [(_FILE.fullmatch(path.name), path) for path in folder.glob("*.parquet")]
    files = {int(found[1]): path for found, path in named if found}
    if not files:
        hint, asked = f"is {run} a run's folder, and has it a step yet?", RunFolder(run).evaluations
        if read_json_lines(RunFolder(run).metrics):
            hint = (
                "LEARNER_LOG_COMPLETIONS was off; `penstock report` and `penstock plot` show the steps"
            )
        elif asked.is_file() and asked.stat().st_size:
            hint = "nothing was trained yet; --evaluations shows the answers to held-out questions"
        if not RunFolder(run).path.exists():
            raise ConfigError(f"{run}: {absence(run)}")
        raise ConfigError(f"{folder} holds no completions: {hint}")
    return dict(sorted(files.items(), reverse=True))


def read_table(path: Path) -> list[Row]:
    """Return a Parquet file's rows, [] if it has none.

    Raise ConfigError if it is damaged, lacks a column of COLUMNS, or has a value that no learner writes.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: no UTF-8
        text = f"{path} is damaged or no Parquet file ({error}): remove it, or choose another --step"
        raise ConfigError(text) from error
    if missing := set(COLUMNS) - set(rows[0] if rows else COLUMNS):
        names = ", ".join(sorted(missing))
        raise ConfigError(f"{path} was not written by the learner: it has no {names}; remove it")
    with reading(path, "Remove the file, or choose another --step"):
        for row in rows:
            _check_row(row)
    return rows


def _check_row(row: Row) -> None:
    """Raise TypeError or ValueError for a value that the learner writes to no table of completions.

    `row` has the values by column. Refused are a value of another type than its column has, and an
    `extra` that is no object of JSON.
    """
    for name, value in row.items():
        if not isinstance(value, _KINDS.get(name, float | None)):
            raise TypeError(f"column {name} holds {brief(value)}, as no learner writes; remove the file")
    if not isinstance(parse_json(row["extra"]), dict):
        raise TypeError(f"column extra: {brief(row['extra'])}, expected a JSON object; remove the file")


def select(rows: list[Row], choice: str) -> list[Row]:
    """Return the rows that `choice` names, [] if there are none; all rows for another text, such as "".

    best and worst: trained rows with a reward, one per group, largest or smallest first. In the order of
    `rows` are truncated: cut at the longest length, no_spread: of filtered groups, and failed: without a
    score, or of a filtered group with such completions.
    """
    if choice in ("best", "worst"):
        scored = [row for row in rows if row["reward"] is not None and row["state"] == "trained"]
        groups: dict[str, Row] = {}
        for row in sorted(scored, key=lambda row: row["reward"], reverse=choice == "best"):
            groups.setdefault(row["ticket"], row)
        return list(groups.values())
    if choice == "truncated":
        return [row for row in rows if row["finish_reason"] == "length"]
    if choice == "failed":
        return [row for row in rows if row["state"] == "failed" or UNSCORED in row["failure"]]
    return [row for row in rows if choice != "no_spread" or row["state"] == "filtered"]


def as_lines(row: Row, width: int) -> str:
    """Return a completion as lines of text, each of its texts cut to `width` characters (0: uncut).

    The lines are its heading, prompt, completion and, if it has them, gold answer, why it has no score,
    and values that rewards have added.
    """
    texts = {"prompt": row["prompt"], "completion": row["completion"]}
    texts |= {"solution": row["solution"]} if row["solution"] else {}
    texts |= {"why": row["failure"]} if row["failure"] else {}
    pairs = [*texts.items(), *json.loads(row["extra"]).items()]
    lines = [f"{one_line(name):<11} {shown(str(value), width)}" for name, value in pairs]
    return "\n".join([one_line(f"--- {heading(row)}"), *lines])


def heading(row: Row) -> str:
    """Return a line with a completion's step, ticket and index, state, rewards and length in tokens.

    The advantage and the mean staleness are there unless they are 0, and "truncated" if it was cut.
    """
    rewards = {name: value for name, value in row.items() if name not in COLUMNS and value is not None}
    parts = [f"step {row['step']}", f"{row['ticket']}[{row['index']}]", row["state"]]
    parts.append(", ".join(f"{name} {value:g}" for name, value in rewards.items()))
    if row["advantage"]:
        parts.append(f"advantage {row['advantage']:+.2f}")
    parts.append(f"{row['completion_length']} tokens")
    if row["finish_reason"] == "length":
        parts.append("truncated")
    if row["staleness_mean"]:
        parts.append(f"staleness {row['staleness_mean']:.1f}")
    return "  ".join(part for part in parts if part)


def shown(text: str, width: int) -> str:
    """Return a text for a terminal: cut to `width` characters (0: uncut), control characters escaped.

    Lines after the first are indented by 12 spaces, below the text's column.
    Example:
        >>> shown("a\\x1b[2J\\n" + "b" * 10, 12)
        'a\\\\x1b[2J\\n            bbbbbb ... (4 more)'
    """
    cut = text[: width or None]
    more = f" ... ({len(text) - len(cut)} more)" if len(cut) < len(text) else ""
    return printable(cut).replace("\n", "\n            ") + more


def _difficulty(prompt: str, tickets: Mapping[str, Sequence[Row]]) -> Row | None:
    """Return a question's row: mean reward, times asked, times without spread, and its text `prompt`.

    `tickets` has by ticket the rows of one time that the question was asked. Each ticket counts once in
    the mean reward, by the mean of its rewards. Return None if no completion has a reward.
    """
    rewards = [[row["reward"] for row in one if row["reward"] is not None] for one in tickets.values()]
    means = [sum(found) / len(found) for found in rewards if found]
    if not means:
        return None
    filtered = sum(one[0]["state"] == "filtered" for one in tickets.values())
    mean = sum(means) / len(means)
    return {"mean_reward": mean, "asked": len(tickets), "no_spread": filtered, "prompt": prompt}


def answers_as_lines(row: Row, width: int) -> str:
    """Return a held-out question as lines of text: prompt, gold answer, why none came, and the answers.

    `row` is a row of evaluations.jsonl. Each text is cut to `width` characters (0: uncut). An answer has
    its rewards and length behind it.
    """
    columns = row["columns"]
    lines = [
        one_line(f"--- question {row['index']}, step {row['step']}"),
        f"prompt      {shown(as_text(columns.get('prompt', '')), width)}",
        f"solution    {shown(as_text(columns.get('solution', '')), width)}",
    ]
    if row["reason"]:
        lines.append(f"no answer   {shown(row['reason'], width)}")
    for index, text in enumerate(row["completions"]):
        lines.append(f"answer      {shown(text, width)}   ({one_line(_worth(row, index))})")
    return "\n".join(lines)


def _worth(row: Row, index: int) -> str:
    """Return the rewards and length in tokens of an answer to a held-out question, separated by commas.

    They begin with "right" or "wrong" if the learner wrote that. `row` is the question's row of
    evaluations.jsonl, `index` the number of the answer. "truncated" and, for an answer that could not be
    scored, the reason follow if they apply.
    """
    right = (row.get("right") or [])[index : index + 1]  # an earlier release wrote none
    parts = ["right" if one else "wrong" for one in right if one is not None]
    rewards = row["rewards"][index].items()
    parts += [f"{name} {value if value is None else round(value, 4)}" for name, value in rewards]
    parts.append(f"{row['lengths'][index]} tokens")
    if row["finish_reasons"][index] == "length":
        parts.append("truncated")
    if row["failures"] and row["failures"][index]:
        parts.append(f"not scored: {row['failures'][index]}")
    return ", ".join(parts)
