"""Where metrics go beside metrics.jsonl: W&B, TensorBoard."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.common.errors import ConfigError


class Tracker(Protocol):
    """Takes a step's metrics."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Report a step."""

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Report what was sampled in a step, if it has tables."""

    def close(self) -> None:
        """End the run."""


class WandbTracker:
    """Weights & Biases, set up by its own variables (WANDB_PROJECT, WANDB_MODE, ...)."""

    def __init__(self, folder: Path, run: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "LEARNER_REPORT_TO names wandb, which is not installed: pip install wandb"
            ) from error
        self._run = wandb.init(dir=str(folder), name=run, resume="allow", id=run)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """See Tracker."""
        self._run.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """See Tracker. W&B escapes what a table holds."""
        import wandb

        names: list[str | int] = list(rows[0]) if rows else []
        data = [[row.get(str(name)) for name in names] for row in rows]
        self._run.log({"completions": wandb.Table(columns=names, data=data)}, step=step)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class TensorBoardTracker:
    """Event files under tensorboard/ in the run's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "LEARNER_REPORT_TO names tensorboard, which is not installed: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """See Tracker."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """See Tracker; TensorBoard has no tables."""

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


def start_trackers(names: Sequence[str], folder: Path, run: str) -> list[Tracker]:
    """The trackers that LEARNER_REPORT_TO names."""
    kinds: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WandbTracker(folder, run),
        "tensorboard": lambda: TensorBoardTracker(folder),
    }
    return [kinds[name]() for name in names]
