"""`penstock report` and `penstock plot`: a run as a page, and its learning curve as a picture."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from penstock.common.config.command import Command
from penstock.common.errors import ConfigError
from penstock.common.files.atomic import write_whole
from penstock.common.files.run_folder import RunFolder, RunPath
from penstock.common.log import configure_logs
from penstock.common.text import one_line, printable, short
from penstock.deploy.report.page import make_page
from penstock.deploy.report.picture import draw_curve
from penstock.deploy.report.run_data import check_is_run, read_run


class Report(Command):
    """Write a report of a run, or of two side by side, as one HTML file that needs no network.

    The file has curves, times, samples, an audit, settings and the machine. No queue server is asked.
    """

    runs: CliPositionalArg[list[RunPath]] = Field(
        min_length=1, max_length=2, description="the folder of a run, or of two to compare"
    )
    out: Path | None = Field(None, description="the file; by default report.html in the first folder")

    def execute(self) -> int:
        """Write the report and return 0.

        Raise ConfigError for a folder that is no run's, or a file that cannot be written.
        """
        configure_logs("report", "text")
        for path in self.runs:
            check_is_run(path)
        runs = [read_run(path, label) for path, label in zip(self.runs, labels(self.runs), strict=True)]
        page = make_page(runs, datetime.now().astimezone()).encode("utf-8", "backslashreplace")
        out = self.out or RunFolder(self.runs[0]).report
        with _writing(out):
            write_whole(out, page)
        print(printable(f"Report  {out}  ({len(page) / 1e6:.1f} MB, needs no network)"))
        return 0


class Plot(Command):
    """Draw a run's learning curve as a PNG: the reward of each step, and the held-out questions."""

    run: CliPositionalArg[RunPath] = Field(description="the run's folder, such as runs/first")
    out: Path | None = Field(None, description="the file; by default learning_curve.png in the folder")

    def execute(self) -> int:
        """Write the picture and return 0. Raise ConfigError if there is nothing to draw."""
        configure_logs("plot", "text")
        run = read_run(self.run, "", ("curves", "held-out questions", "settings"))
        reward, heldout = run.points("reward"), run.heldout
        if not reward and not heldout:
            raise ConfigError(
                "; ".join(run.missing) or f"{self.run} has no step with a reward yet: wait"
            )
        asked = run.set_values.get("LEARNER_METRIC_FOR_BEST_MODEL", "")
        chosen = asked if asked in heldout else next(iter(heldout), "")
        out = self.out or RunFolder(self.run).learning_curve
        with _writing(out):
            draw_curve(reward, heldout.get(chosen, {}), out, f"held-out {short(one_line(chosen), 60)}")
        print(printable(f"Learning curve  {out}"))
        return 0


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes the file `out`, into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}): name a file in another folder with --out"
        ) from error


def labels(paths: Sequence[Path]) -> list[str]:
    """Return the runs' names: those of their folders or, if these are equal, the paths."""
    names = [path.resolve().name for path in paths]
    return [str(path) for path in paths] if len(set(names)) < len(names) else names
