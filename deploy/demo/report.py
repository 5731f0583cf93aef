"""The demo's final report: result, sample answers, audit. All figures come from the run's own files."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor.snapshot import Audit, read_audit
from penstock.common.text import one_line
from penstock.deploy.report.picture import draw_curve
from penstock.deploy.samples import read_rows
from penstock.deploy.showing.ending import mean_of

Row = dict[str, Any]

ANSWERS_SHOWN = 8
WIDTH = 100

_FIGURES = (
    ("reward", "reward", ".3f", "share of right answers in the trained and filtered groups"),
    ("entropy", "entropy", ".3f", "how unsure the model is of its next digit: 0 is sure"),
    ("groups filtered", "groups/filtered", ".1f", "per step, not trained on: all right or all wrong"),
    ("staleness", "sample/staleness_mean", ".2f", "age in steps of the weights that gave the answers"),
    ("vLLM against learner", "sampling/sampling_logp_difference/mean", ".0e",
     "gap of a token's log-probability, same weights: near 0"),
)  # fmt: skip
"""Rows of the table: title, name in metrics.jsonl, format, meaning."""


def print_report(run_folder: RunFolder) -> None:
    """Print table, answers, audit, files and verdict of the demo's run; write the curve as a PNG.

    The run's own queue server is started for the audit and stopped again. Raise ConfigError if a
    file of completions is missing or damaged, ValueError for under two evaluations or no checkpoint, and
    ServerUnavailable if the server does not answer within 30 s. Damaged lines of metrics are left out.
    """
    metrics, answers = read_json_lines(run_folder.metrics), read_json_lines(run_folder.evaluations)
    right = right_by_step(answers)
    print_table(metrics, right)
    print_answers(answers)
    reward = {row["step"]: row["reward"] for row in metrics if row.get("reward") is not None}
    draw_curve(reward, {step: fmean(all_) for step, all_ in right.items()}, run_folder.learning_curve)
    with LocalServer(run_folder.path) as server:  # the run's own server, started again to be asked
        connection = Connection(server.url, connect_timeout_s=10, server_timeout_s=10)
        audit = read_audit(connection, run_folder.path.name)
        connection.close()
    print_audit(audit, trained_twice(run_folder.path))
    print(f"\nLearning curve  {run_folder.learning_curve}\nMetrics         {run_folder.metrics}")
    print(f"Trained model   {run_folder.path / 'final'}")
    print("Next            . .venv/bin/activate    (then, for your own data, docs/tutorial.md)")
    print(f"                penstock report {run_folder.path}")
    print(f"\n{verdict(right)}")


def right_by_step(answers: Sequence[Row]) -> dict[int, list[bool]]:
    """Return, by evaluated step in ascending order, whether each held-out question was answered right.

    `answers` are the rows of evaluations.jsonl; the order of a step's questions is theirs. Return {} for
    no rows.
    """
    steps = sorted({row["step"] for row in answers})
    return {step: [_is_right(row) for row in answers if row["step"] == step] for step in steps}


def _is_right(row: Row) -> bool:
    """Return whether a held-out question has a right answer, one with accuracy 1; False for none.

    `row` is a row of evaluations.jsonl, with the rewards of each answer.
    """
    return any((rewards.get("accuracy") or 0.0) >= 1 for rewards in row["rewards"])


def print_table(metrics: Sequence[Row], right: dict[int, list[bool]]) -> None:
    """Print a table: the share of held-out sums solved, and means of metrics, at start and end.

    The shares are those of the first and last step in `right`, which has by evaluated step whether each
    sum was solved. The means are over the first and last ten rows of `metrics`, a row per step, or over
    half of fewer than twenty, at least one. Raise ValueError for fewer than two evaluated steps.
    """
    first, *_, last = right
    solved = f"{fmean(right[first]):>8.1%}{fmean(right[last]):>8.1%}"
    count = max(1, min(10, len(metrics) // 2))
    print(f"{'':<24}{'start':>8}{'end':>8}   what the row means")
    print(f"{'held-out sums solved':<24}{solved}   the model's likeliest answer is right")
    for title, name, form, meaning in _FIGURES:
        before, after = (mean_of(name, rows) for rows in (metrics[:count], metrics[-count:]))
        print(f"{title:<24}{before:>8{form}}{after:>8{form}}   {meaning}")
    print(f"First row: steps {first} and {last}. Other rows: means of the first and last {count} steps.")


def print_answers(answers: Sequence[Row]) -> None:
    """Print the held-out questions 0 to 7, with their answers of the first and the last evaluation.

    Each answer is called right or wrong, a missing one "(no answer)". `answers` are the rows of
    evaluations.jsonl. Raise KeyError if they have fewer questions, ValueError if there are none.
    """
    rows = {(row["step"], row["index"]): row for row in answers}
    print(f"\nExamples: {ANSWERS_SHOWN} held-out sums with their answers. Too few to show the gain.")
    print(f"{'held-out question':<24}{'before training':<24}after training")
    for index in range(ANSWERS_SHOWN):
        ends = [rows[step, index] for step in (min(rows)[0], max(rows)[0])]
        before, after = (
            f"{' '.join(row['completions']) or '(no answer)'}  {'right' if _is_right(row) else 'wrong'}"
            for row in ends
        )
        columns = ends[0]["columns"]
        print(one_line(f"{columns['question'] + ' ' + columns['answer']:<24}{before:<24}{after}"))


def trained_twice(folder: Path) -> int:
    """Return how often a group of the run in `folder` was trained again in a later step, 0 if never.

    This is counted in the files of completions. Raise ConfigError if there are none or one is damaged.
    """
    trained = {(row["ticket"], row["step"]) for row in read_rows(folder) if row["state"] == "trained"}
    return len(trained) - len({ticket for ticket, _ in trained})


def print_audit(audit: Audit, twice: int) -> None:
    """Print what became of all groups, how many were lost or trained twice, and all faults.

    `audit` has the queue server's counts and faults. `twice` is how many groups were trained again, by
    the files of completions. If more groups ended or are open than were asked for, the excess is added
    to it.
    """
    ends = ", ".join(f"{count} {state}" for state, count in audit.ended.items() if count)
    flying = len(audit.in_flight)
    lost = audit.issued - sum(audit.ended.values()) - flying
    unused = " unused: came after the last step." if audit.ended.get("unused") else ""
    print(f"""
Audit of the queue server: {audit.issued} groups were asked for, each with the answers to one sum.
  {audit.issued} groups: {ends}, {flying} in flight; {max(lost, 0)} lost, {twice + max(-lost, 0)} twice
  trained: the model was trained on the group, once. evaluated: a held-out sum, never trained on.
  filtered: not trained on, all its answers right or all wrong. in flight: being worked on.
  lost: asked for, but neither ended nor in flight. twice: trained on in two steps.{unused}""")
    for fault in audit.faults:
        print(textwrap.fill(one_line(f"Fault: {fault}."), WIDTH))


def verdict(right: dict[int, list[bool]]) -> str:
    """Return a sentence: how many held-out sums were solved before and after, and the difference.

    `right` has by evaluated step, in ascending order, whether each sum was solved. Before is its first
    step, after its last. Raise ValueError for fewer than two steps.
    """
    first, *_, last = right.values()
    return (
        f"Verdict: of {len(last)} held-out sums the model solved {sum(first)} before training and "
        f"{sum(last)} after ({100 * (fmean(last) - fmean(first)):+.1f} points)."
    )
