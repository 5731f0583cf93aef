"""Curves of one or two runs as SVG. A picture holds numbers alone: names stand beside it, as HTML."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from penstock.deploy.report.markup import Html, element, text_of
from penstock.deploy.report.picture import new_figure
from penstock.deploy.report.run_data import Points, RunData

MOST_POINTS = 400
"""Most points of a drawn curve. Of 10,000 steps each point is the mean of 25."""

_MOST_SERIES, _MARKED = 6, 20
_COLOURS = ("#3b82d0", "#d9730d", "#2e9e5b", "#c03f87", "#8a63d2", "#a58300", "#1a97a0")
_REWARD = re.compile(r"rewards/(.+)/mean")


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture: its title, what it shows, and by label the metrics that are drawn.

    With `late` the first step is left out, to which all counts that went before it.
    """

    title: str
    about: str
    metrics: Mapping[str, str]
    late: bool = False


_RATIO = "sampling/importance_sampling_ratio"
_CHARTS = (
    Chart("Completion length", "tokens, of trained and filtered groups", {
        "mean": "completions/mean_length", "longest": "completions/max_length",
    }),
    Chart("Entropy", "nats per token: how unsure the model is of the next one", {"entropy": "entropy"}),
    Chart("Importance ratio", "the trained policy's probability of a token over the sampling one's", {
        "mean": f"{_RATIO}/mean", "smallest": f"{_RATIO}/min", "largest": f"{_RATIO}/max",
    }),
    Chart("Staleness", "age of the trained tokens, in versions of the weights", {
        "mean": "sample/staleness_mean", "largest": "sample/staleness_max",
    }),
    Chart("Seconds of a step", "of the learner, without the first step", {
        "whole step": "perf/step_s", "waiting for groups": "perf/rollout_wait_s",
        "Update": "perf/update_s",
    }, late=True),
    Chart("Tokens per second", "completion tokens trained, over the whole step", {
        "tokens/s": "perf/tokens_per_s",
    }),
    Chart("Groups not trained", "per step; filtered: all rewards of the group are equal", {
        "filtered": "groups/filtered", "stale": "groups/stale", "dead": "groups/dead",
    }),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """A drawn curve: its label, points, colour, and whether it is dashed."""

    label: str
    points: Points
    colour: str
    dashed: bool


def figures(runs: Sequence[RunData]) -> Iterator[Html]:
    """Yield a picture with its legend for each chart that has a point in one of `runs`.

    Raise ConfigError if the library for curves is not installed.
    """
    yield from _charts([_reward_chart(runs)], runs)
    names = dict.fromkeys(name for run in runs for name in run.heldout)
    heldout = {name: [run.heldout.get(name, {}) for run in runs] for name in names}
    if heldout:
        about = "mean of each reward; of an accuracy, the share right"
        yield _figure("Held-out questions", about, heldout, [run.label for run in runs])
    yield from _charts(_CHARTS, runs)


def _reward_chart(runs: Sequence[RunData]) -> Chart:
    """Return the chart of each reward function, and of their total if a run does not have just one."""
    per_run = [dict.fromkeys(name for row in run.rows.values() for name in row) for run in runs]
    found = [
        {match[1]: name for name in names if (match := _REWARD.fullmatch(name))} for names in per_run
    ]
    total = {"total": "reward"} if any(len(functions) != 1 for functions in found) else {}
    drawn = {label: name for functions in found for label, name in functions.items()}
    return Chart("Reward by function", "mean over trained and filtered groups", total | drawn)


def _charts(charts: Sequence[Chart], runs: Sequence[RunData]) -> Iterator[Html]:
    """Yield a figure for each of `charts` that has a point in a run."""
    for chart in charts:
        series = {
            label: [_cut(run.points(name), chart.late) for run in runs]
            for label, name in chart.metrics.items()
        }
        if any(points for found in series.values() for points in found):
            yield _figure(chart.title, chart.about, series, [run.label for run in runs])


def _cut(points: Points, late: bool) -> Points:
    """Return a curve, with `late` without its first point if there are more."""
    return dict(list(points.items())[1:]) if late and len(points) > 1 else points


def _figure(
    title: str, about: str, series: Mapping[str, Sequence[Points]], labels: Sequence[str]
) -> Html:
    """Return a figure: title, legend, and the picture of `series`, which has curves per run by label.

    The first six series are drawn. `labels` are the runs' names.
    """
    shown = dict(list(series.items())[:_MOST_SERIES])
    lines = list(_lines(shown, labels))
    more = len(series) - len(shown)
    note = f"{about}; {more} more are in metrics.jsonl" if more else about
    keys = [element("span", element("i", style=_key(line)), line.label, class_="key") for line in lines]
    caption = element(
        "figcaption", element("b", title), " ", element("small", note), Html("<br>"), *keys
    )
    return element("figure", caption, _draw(lines, title))


def _lines(series: Mapping[str, Sequence[Points]], labels: Sequence[str]) -> Iterator[Line]:
    """Yield a line per curve that has a point. The second run's are dashed.

    The colour is that of the series; of a single series, that of the run.
    """
    for number, (label, curves) in enumerate(series.items()):
        for run, points in enumerate(curves):
            if points:
                name = f"{label} ({labels[run]})" if len(labels) > 1 else label
                colour = _COLOURS[number if len(series) > 1 else run]
                yield Line(name, points, colour, run > 0)


def _key(line: Line) -> str:
    """Return the style of a line's mark in the legend."""
    return f"border-top: 3px {'dashed' if line.dashed else 'solid'} {line.colour}"


def thin(points: Points) -> list[tuple[float, float, float, float]]:
    """Return a curve with at most MOST_POINTS points: step, mean, smallest and largest value of each.

    A point stands for as many steps as all others, the last one perhaps for fewer.
    Example:
        >>> thin({1: 0.5, 2: 1.5})
        [(1.0, 0.5, 0.5, 0.5), (2.0, 1.5, 1.5, 1.5)]
    """
    steps, size = sorted(points), -(-len(points) // MOST_POINTS) or 1
    parts = (steps[start : start + size] for start in range(0, len(steps), size))
    return [
        (fmean(part), fmean(values), min(values), max(values))
        for part in parts
        for values in [[points[step] for step in part]]
    ]


def _draw(lines: Sequence[Line], title: str) -> Html:
    """Return the picture of `lines` as an SVG element. A band shows the values that a mean stands for.

    Raise ConfigError if the library for curves is not installed.
    """
    figure = new_figure(4.6, 2.5)
    axes = figure.subplots()
    for line in lines:
        steps, means, lows, highs = zip(*thin(line.points), strict=True)
        style = "--" if line.dashed else "-"
        mark = "." if len(steps) <= _MARKED else ""
        axes.plot(steps, means, style, marker=mark, color=line.colour, linewidth=1.4)
        if len(steps) < len(line.points):
            axes.fill_between(steps, lows, highs, color=line.colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True, nbins=6, min_n_ticks=1)
    axes.ticklabel_format(useOffset=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    return _inline(out.getvalue(), title)


def _inline(svg: str, title: str) -> Html:
    """Return matplotlib's `svg` as an element of a page, with black as the colour of the page's text.

    All before the first group is left out: links to namespaces, metadata, and a style that would count
    for the whole page. So are the ids of groups, which all pictures share. `title` is for a program that
    reads the page aloud.
    """
    body = svg[svg.index("<g id=") :].replace("#000000", "currentColor")
    size = re.search(r'viewBox="([\d. ]+)"', svg)
    box = size[1] if size else "0 0 331 180"
    body = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", body)
    return Html(f'<svg viewBox="{box}" role="img" aria-label="{text_of(title, 99)}">{body}')
