"""A run's learning curve as one picture: the reward of its steps, and its held-out questions."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.errors import ConfigError
from penstock.common.files.atomic import write_whole
from penstock.deploy.report.run_data import Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches. Raise ConfigError if matplotlib is not installed."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"curves are drawn by matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from error
    rcParams["text.parse_math"] = False  # a reward's name may hold dollars
    rcParams["svg.fonttype"] = "none"
    rcParams["svg.hashsalt"] = "penstock"  # the same curves make the same file
    return Figure(figsize=(width, height), layout="constrained")


def draw_curve(
    reward: Points, heldout: Points, path: Path, heldout_label: str = "held-out accuracy"
) -> None:
    """Write a PNG to `path`, replacing it: each step's reward, and a point per evaluation.

    Both share an axis from 0 to 1 if all their values lie there. If not, each has an axis of its own. A
    curve without points is left out. Raise ConfigError if matplotlib is not installed, OSError if the
    file cannot be written.
    """
    drawn = [(points, label, style) for points, label, style in (
        (reward, "reward, as sampled", {"color": "0.6"}),
        (heldout, heldout_label, {"color": "C0", "marker": "o"}),
    ) if points]  # fmt: skip
    shares = all(0 <= value <= 1 for points, _, _ in drawn for value in points.values())
    figure = new_figure(7, 4)
    all_axes = figure.subplots(1 if shares else len(drawn), sharex=True, squeeze=False)[:, 0]
    for number, (points, label, style) in enumerate(drawn):
        axes = all_axes[number % len(all_axes)]
        if len(points) == 1:
            style["marker"] = "o"
        axes.plot(list(points), list(points.values()), label=label, **style)
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if shares:
            axes.set_ylim(0, 1)
    all_axes[-1].set_xlabel("Updates")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    write_whole(path, out.getvalue())
