"""Where metrics go beside metrics.jsonl: W&B, TensorBoard, and trackers of the user."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import get_logger
from penstock.common.own_code import find_code, import_code, public_names, split_source

log = get_logger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """A receiver of a run's metrics and completions, step by step."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Take the metrics of a step. Values are numbers, and texts in a few cases."""

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Take the step's table of completions, a mapping of column to value per completion."""

    def close(self) -> None:
        """End the tracker when the run ends."""


MakeTracker = Callable[[Path, str], Tracker]
"""What LEARNER_REPORT_TO names: called with the run's folder and the run's name."""


class WandbTracker:
    """Weights & Biases, set up by WANDB_PROJECT, WANDB_MODE, ... Raise ImportError without wandb."""

    def __init__(self, folder: Path, run: str) -> None:
        import wandb

        self._run = wandb.init(dir=str(folder), name=run, resume="allow", id=run)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send the step's completions as a table, in which W&B escapes markup."""
        import wandb

        names: list[str | int] = list(rows[0]) if rows else []
        data = [[row.get(str(name)) for name in names] for row in rows]
        self._run.log({"completions": wandb.Table(columns=names, data=data)}, step=step)

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


class TensorBoardTracker:
    """Event files under tensorboard/ in the run's folder. Raise ImportError without tensorboard."""

    def __init__(self, folder: Path, run: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(RunFolder(folder).tensorboard))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write those metrics of a step that are numbers."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


_BUILT_IN: Mapping[str, MakeTracker] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}


class Trackers:
    """The trackers that LEARNER_REPORT_TO names, started. Their later failures never end the run.

    Creating Trackers raises ConfigError if a tracker is not found, fails to start or lacks a method.
    """

    def __init__(self, names: Sequence[str], folder: Path, run: str) -> None:
        self._started = [(name, _start(name, folder, run)) for name in names]
        self._failed: set[str] = set()

    def tell(self, call: Callable[[Tracker], None]) -> None:
        """Call `call` with each tracker. A tracker's first failure is logged, its later ones are not.

        SystemExit counts as a failure: user code must not end the learner with exit code 0.
        """
        for name, tracker in self._started:
            try:
                call(tracker)
            except (Exception, SystemExit) as error:
                if name not in self._failed:
                    log.warning(
                        f"The tracker {name} failed: its later failures are not logged. "
                        "metrics.jsonl has everything.",
                        error=f"{type(error).__name__}: {error}"[:200],
                    )
                self._failed.add(name)


def _start(name: str, folder: Path, run: str) -> Tracker:
    """Return a started tracker. Raise ConfigError if it is not found, fails, or lacks a method."""
    try:
        tracker = (_BUILT_IN.get(name) or _load(name))(folder, run)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        if name in _BUILT_IN and isinstance(error, ImportError):
            problem = f" names {name}, which is not installed: pip install {name}"
        else:
            problem = f"={name}: the tracker does not start: {type(error).__name__}: {error}"
        raise ConfigError(f"LEARNER_REPORT_TO{problem}. Correct this, or leave it out") from error
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"LEARNER_REPORT_TO={name}: expected an object with the methods log, log_completions and "
            f"close, found {type(tracker).__name__}"
        )
    return tracker


def _load(name: str) -> MakeTracker:
    """Run the module and return the function of `name`. Raise ConfigError for none, or its errors."""
    source, function = split_source(name)
    module = import_code(find_code(source, f"LEARNER_REPORT_TO={name}"))
    found: MakeTracker | None = getattr(module, function, None)
    if callable(found):
        return found
    raise ConfigError(
        f"LEARNER_REPORT_TO={name}: {source} has no function {function}; it has {public_names(module)}"
    )
