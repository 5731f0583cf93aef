"""`penstock samples`: what a run sampled, read from its completions/ and evaluations.jsonl."""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import configure_logs
from penstock.common.text import SHOWN, as_text, printable
from penstock.common.wire.reward_spec import COLUMNS

Row = dict[str, Any]

_FILE = re.compile(r"completions_(\d+)\.parquet")


def main(arguments: list[str]) -> int:
    """Print what was asked for; raises ConfigError when the run has none of it."""
    options = parse_arguments(arguments)
    configure_logs("samples", "text")
    if options.compare and options.step is not None:
        raise ConfigError("--step and --compare exclude each other")
    try:
        if options.evaluations:
            show_evaluations(options)
        elif options.compare:
            show_comparison(options)
        elif options.difficulty:
            show_difficulty(read_rows(options.run, options.step), options)
        else:
            show(chosen(read_rows(options.run, options.step), options), options)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
    return 0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line of `penstock samples`."""
    parser = argparse.ArgumentParser(
        prog="penstock samples",
        description="Show completions of a run, newest step first, unless one of the choices is given.",
    )
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/first")
    parser.add_argument("--step", type=int, help="of this step alone")
    parser.add_argument("--count", type=_positive, default=5, metavar="N", help="show N (default: 5)")
    parser.add_argument("--width", type=_natural, default=600, help="letters of a text (0: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, nothing cut")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--best", action="store_true", help="largest reward first")
    choice.add_argument("--worst", action="store_true", help="smallest reward first")
    choice.add_argument("--no-spread", action="store_true", help="of groups that were filtered")
    choice.add_argument("--truncated", action="store_true", help="cut at the longest completion")
    choice.add_argument("--failed", action="store_true", help="that could not be scored, and why")
    choice.add_argument("--compare", type=int, nargs=2, metavar="STEP", help="one question at two steps")
    choice.add_argument("--difficulty", action="store_true", help="per question: asked, mean reward")
    choice.add_argument("--evaluations", action="store_true", help="answers to held-out questions")
    return parser.parse_args(arguments)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not _natural(text):
        raise argparse.ArgumentTypeError("expected a number of at least 1, found 0")
    return int(text)


def read_rows(run: Path, step: int | None = None) -> list[Row]:
    """All completions of a run, or of one step, newest step first; raises ConfigError."""
    run_folder = RunFolder(run)
    folder = run_folder.completions
    files = {
        int(found[1]): path for path in folder.glob("*.parquet") if (found := _FILE.fullmatch(path.name))
    }
    if not files:
        evaluated = run_folder.evaluations.is_file()
        raise ConfigError(
            f"{folder} holds no completions: "
            + (
                "nothing was trained yet; --evaluations shows the answers to held-out questions"
                if evaluated
                else f"is {run} a run's folder, and was LEARNER_LOG_COMPLETIONS on?"
            )
        )
    if step is not None and step not in files:
        raise ConfigError(f"no completions of step {step}; there are {min(files)} to {max(files)}")
    steps = [step] if step is not None else sorted(files, reverse=True)
    return [row for one in steps for row in _read_file(files[one])]


def _read_file(path: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is no whole Parquet file ({error}): remove it, or choose others by --step"
        ) from error
    missing = set(COLUMNS) - set(rows[0] if rows else COLUMNS)
    if missing:
        raise ConfigError(
            f"{path} was not written by the learner: it has no {', '.join(sorted(missing))}"
        )
    return rows


def chosen(rows: list[Row], options: argparse.Namespace) -> list[Row]:
    """The rows that an option picks, in its order; raises ConfigError if there is none."""
    scored = [row for row in rows if row["reward"] is not None and row["state"] == "trained"]
    choices: dict[str, tuple[str, Callable[[], list[Row]]]] = {
        "best": ("was trained", lambda: sorted(scored, key=lambda row: -row["reward"])),
        "worst": ("was trained", lambda: sorted(scored, key=lambda row: row["reward"])),
        "no_spread": (
            "is of a group that was filtered",
            lambda: [row for row in rows if row["state"] == "filtered"],
        ),
        "truncated": (
            "was cut at the longest length",
            lambda: [row for row in rows if row["finish_reason"] == "length"],
        ),
        "failed": (
            "could not be scored",
            lambda: [row for row in rows if row["state"] == "failed"],
        ),
    }
    name = next((name for name in choices if getattr(options, name)), "")
    if not name:
        return rows[: options.count]
    what, choose = choices[name]
    found = choose()
    if not found:
        raise ConfigError(f"none of {len(rows)} completions {what}")
    return found[: options.count]


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print completions, each with its rewards and its origin."""
    for row in rows:
        if options.json:
            print(json.dumps(row, ensure_ascii=True))
            continue
        print(f"--- {heading(row)}")
        print(f"prompt      {shown(row['prompt'], options.width)}")
        print(f"completion  {shown(row['completion'], options.width)}")
        if row.get("solution"):
            print(f"solution    {shown(row['solution'], options.width)}")
        if row["failure"]:
            print(f"why         {shown(row['failure'], options.width)}")
        for name, value in json.loads(row["extra"]).items():
            print(f"{printable(name):<11} {shown(str(value), options.width)}")


def heading(row: Row) -> str:
    """Where a completion comes from and what it is worth, in one line."""
    rewards = ", ".join(
        f"{name} {value:g}" for name, value in rewards_of(row).items() if value is not None
    )
    parts = [f"step {row['step']}", f"{row['ticket']}[{row['index']}]", row["state"], rewards]
    if row["advantage"]:
        parts.append(f"advantage {row['advantage']:+.2f}")
    parts.append(f"{row['completion_length']} tokens")
    if row["finish_reason"] == "length":
        parts.append("truncated")
    if row["staleness_max"]:
        parts.append(f"staleness {row['staleness_mean']:.1f}")
    return "  ".join(part for part in parts if part)


def rewards_of(row: Row) -> dict[str, float | None]:
    """The rewards of a row, by name."""
    return {name: value for name, value in row.items() if name not in COLUMNS}


def shown(text: str, width: int) -> str:
    """A text for a terminal: cut, and with nothing in it that a terminal would obey.

    Example:
        >>> shown("a\\x1b[2J\\n" + "b" * 10, 12)
        'a\\\\x1b[2J\\n            bbbbb ... (5 more)'
    """
    cut = text if not width or len(text) <= width else text[:width]
    more = f" ... ({len(text) - len(cut)} more)" if len(cut) < len(text) else ""
    return printable(cut).replace("\n", "\n            ") + more


def show_comparison(options: argparse.Namespace) -> None:
    """Questions that were asked at both steps, or the first of each if there is none."""
    steps = [read_rows(options.run, step) for step in options.compare]
    asked = [{row["prompt"]: row for row in reversed(rows)} for rows in steps]
    both = [prompt for prompt in asked[0] if prompt in asked[1]]
    if not both:
        print("no question was asked at both steps; the first of each:")
        show([rows[0] for rows in steps], options)
    for prompt in both[: options.count]:
        show([rows[prompt] for rows in asked], options)


def show_difficulty(rows: Iterable[Row], options: argparse.Namespace) -> None:
    """Per question how often it was asked, its mean reward, and how often it had no spread.

    Questions that begin with the same SHOWN letters are one: of a filtered group no more is kept.
    """
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["prompt"][:SHOWN]][row["ticket"]].append(row)
    table = []
    for prompt, tickets in groups.items():
        means = [
            sum(row["reward"] for row in found) / len(found)
            for found in ([row for row in one if row["reward"] is not None] for one in tickets.values())
            if found
        ]
        filtered = sum(one[0]["state"] == "filtered" for one in tickets.values())
        if means:
            table.append((sum(means) / len(means), len(tickets), filtered, prompt))
    table = sorted(table)[: options.count]
    if options.json:
        for mean, asked, filtered, prompt in table:
            row = {"mean_reward": mean, "asked": asked, "no_spread": filtered, "prompt": prompt}
            print(json.dumps(row))
        return
    print(f"{'mean reward':>12}{'asked':>8}{'no spread':>11}   question (hardest first)")
    for mean, asked, filtered, prompt in table:
        print(f"{mean:>12.3f}{asked:>8}{filtered:>11}   {shown(prompt, 80).partition(chr(10))[0]}")


def show_evaluations(options: argparse.Namespace) -> None:
    """Held-out answers: of one step, or each question's at all steps; raises ConfigError."""
    path = RunFolder(options.run).evaluations
    if not path.is_file():
        raise ConfigError(f"{path} is not there: set LEARNER_EVAL_DATASET to evaluate")
    rows = [row for row in read_json_lines(path) if options.step in (None, row["step"])]
    if not rows:
        raise ConfigError(
            f"{path} has no evaluation" + ("" if options.step is None else f" of step {options.step}")
        )
    for row in sorted(rows, key=lambda row: (row["index"], row["step"])):
        if row["index"] >= options.count:
            continue
        if options.json:
            print(json.dumps(row, ensure_ascii=True))
            continue
        print(f"--- question {row['index']}, step {row['step']}")
        print(f"prompt      {shown(as_text(row['columns'].get('prompt', '')), options.width)}")
        print(f"solution    {shown(as_text(row['columns'].get('solution', '')), options.width)}")
        if row["reason"]:
            print(f"no answer   {shown(row['reason'], options.width)}")
        for index, text in enumerate(row["completions"]):
            print(f"answer      {shown(text, options.width)}   ({_worth(row, index)})")


def _worth(row: Row, index: int) -> str:
    """What an answer to a held-out question is worth, how long it is, and why it has no reward."""
    parts = [f"{name} {value}" for name, value in row["rewards"][index].items()]
    parts.append(f"{row['lengths'][index]} tokens")
    if row["finish_reasons"][index] == "length":
        parts.append("truncated")
    if row["failures"] and row["failures"][index]:
        parts.append(f"not scored: {printable(row['failures'][index])}")
    return ", ".join(parts)
