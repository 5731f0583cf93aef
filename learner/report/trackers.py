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
        """See Tracker. The texts become a table, in which W&B escapes markup."""
        import wandb

        names: list[str | int] = list(rows[0]) if rows else []
        data = [[row.get(str(name)) for name in names] for row in rows]
        self._run.log({"completions": wandb.Table(columns=names, data=data)}, step=step)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class TensorBoardTracker:
    """Event files under tensorboard/ in the run's folder."""

    def __init__(self, folder: Path, run: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "LEARNER_REPORT_TO names tensorboard, which is not installed: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(RunFolder(folder).tensorboard))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """See Tracker. Only numbers are written."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """See Tracker. Does nothing: TensorBoard has no tables."""

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class _Tolerant:
    """A tracker whose failures never end the run: the first failure is logged, later ones are not.

    SystemExit counts as a failure: user code must not end the learner with exit code 0.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._failed = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """See Tracker."""
        self._try(lambda: self._tracker.log(metrics, step))

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """See Tracker."""
        self._try(lambda: self._tracker.log_completions(rows, step))

    def close(self) -> None:
        """See Tracker."""
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        """Call the tracker and log its first failure as a warning."""
        try:
            call()
        except (Exception, SystemExit) as error:
            if not self._failed:
                log.warning(
                    f"The tracker {self._name} failed: its later failures are not logged. "
                    "metrics.jsonl has everything.",
                    error=f"{type(error).__name__}: {error}"[:200],
                )
            self._failed = True


_BUILT_IN: Mapping[str, MakeTracker] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}


def start_trackers(names: Sequence[str], folder: Path, run: str) -> list[Tracker]:
    """Start and return the trackers that LEARNER_REPORT_TO names.

    Raise ConfigError if a tracker is not found, fails to start or lacks a method. Failures after the
    start are logged once per tracker and not raised.
    """
    return [_Tolerant(name, _start(name, folder, run)) for name in names]


def _start(name: str, folder: Path, run: str) -> Tracker:
    """Return a started tracker; raise ConfigError, whatever its code raises."""
    try:
        make = _BUILT_IN[name] if name in _BUILT_IN else _load(name)
        tracker = make(folder, run)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"LEARNER_REPORT_TO={name}: the tracker does not start: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"LEARNER_REPORT_TO={name}: expected an object with the methods log, log_completions and "
            f"close, found {type(tracker).__name__}"
        )
    return tracker


def _load(name: str) -> MakeTracker:
    """Run a user's module and return the function named; raise ConfigError if there is none."""
    source, function = split_source(name)
    module = import_code(find_code(source, f"LEARNER_REPORT_TO={name}"))
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(
            f"LEARNER_REPORT_TO={name}: {source} has no function {function}; it has "
            f"{public_names(module)}"
        )
    make: MakeTracker = found
    return make
