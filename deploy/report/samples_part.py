"""The best and worst completions of a report. All their texts come from a model and a data set."""

from collections.abc import Sequence
from typing import Any

from penstock.common.text import one_line
from penstock.deploy.report.markup import Html, element, text_of
from penstock.deploy.report.run_data import RunData
from penstock.deploy.samples import heading

LONGEST_TEXT = 2000
"""Most characters of a prompt or a completion that are shown."""


def samples_part(runs: Sequence[RunData]) -> list[Html]:
    """Return the section's content: per run its best and its worst completions, side by side."""
    note = (
        "Trained completions of the newest 50 steps with the largest and the smallest reward, one per "
        "group. The command penstock samples RUN shows others."
    )
    columns = [
        element("div", element("h3", run.label), _list("Best", run.best), _list("Worst", run.worst))
        for run in runs
    ]
    return [element("p", note), element("div", *columns, class_="columns")]


def _list(title: str, rows: Sequence[dict[str, Any]]) -> Html:
    """Return the completions `rows` under a title, or a sentence that there are none."""
    shown = [_sample(row) for row in rows] or [element("p", "No trained completion with a reward.")]
    return element("div", element("h4", title), *shown)


def _sample(row: dict[str, Any]) -> Html:
    """Return a completion: a line with its origin and rewards, prompt, completion and gold answer."""
    texts = {"prompt": row["prompt"], "completion": row["completion"], "solution": row["solution"]}
    parts = [
        element("dt", name) + element("dd", element("pre", text_of(text, LONGEST_TEXT)))
        for name, text in texts.items()
        if text
    ]
    return element("article", element("p", one_line(heading(row))), element("dl", *map(Html, parts)))
