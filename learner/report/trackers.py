"""Where metrics go beside metrics.jsonl: W&B, TensorBoard, and trackers of the user."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import get_logger
from penstock.common.own_code import find_code, import_code, public_names, split_source
from penstock.common.text import as_text, hide_passwords, one_line
from penstock.learner.state.incarnations import read_nonce

log = get_logger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """A receiver of a run's metrics and completions, step by step.

    A tracker that also has a method `log_settings(settings)` gets the run's settings at each start.
    """

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Take the metrics of step `step`, by name, of the training or of an evaluation.

        Most values are numbers; a few are texts or None.
        """

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Take completions that step `step` trained or filtered: for each its columns, at least one.

        A row maps a column, such as "prompt" or a reward's name, to its value.
        """

    def close(self) -> None:
        """Send or write what is left. The learner calls this once, when it ends without an error."""


MakeTracker = Callable[[Path, str], Tracker]
"""What LEARNER_REPORT_TO names: called with the run's folder and the run's name."""


class WandbTracker:
    """A run of Weights & Biases, set up by the variables WANDB_PROJECT, WANDB_MODE and others.

    Creating the tracker starts the run called `run`, or continues it, with its local files in `folder`.
    Its id is the name and the first 8 digits of the folder's nonce, so that a run of the same name in
    another folder or on another machine is another one. Raise ImportError if the package wandb is not
    installed, ConfigError if the nonce cannot be read.
    """

    def __init__(self, folder: Path, run: str) -> None:
        import wandb

        name = f"{run}-{read_nonce(RunFolder(folder))[:8]}"
        self._run = wandb.init(dir=str(folder), name=run, resume="allow", id=name)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Send `settings`, by name, to W&B as the run's config, in place of an earlier start's."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send `metrics`, by name, to W&B as those of step `step`."""
        self._run.log(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send rows, one per completion, to W&B as the table `completions` of step `step`.

        W&B escapes markup in it. The first row names the columns; a value that a later row lacks is
        None.
        """
        import wandb

        names: list[str | int] = list(rows[0]) if rows else []
        data = [[row.get(str(name)) for name in names] for row in rows]
        self._run.log({"completions": wandb.Table(columns=names, data=data)}, step=step)

    def close(self) -> None:
        """End the W&B run, which sends what is left."""
        self._run.finish()


class TensorBoardTracker:
    """Writes event files of TensorBoard under tensorboard/ in the run's folder `folder`.

    The run's name `run` is not used. Raise ImportError if the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, run: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(RunFolder(folder).tensorboard))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Write `settings`, by name, as the text `settings`, a line for each."""
        lines = (f"    {name}: {one_line(as_text(value))}" for name, value in settings.items())
        self._writer.add_text("settings", "\n".join(lines))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write those of `metrics`, by name, that are numbers, as points at step `step`."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self) -> None:
        """Write what is left, and close the event file."""
        self._writer.close()


_BUILT_IN: Mapping[str, MakeTracker] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}


class Trackers:
    """The trackers in `names`, the value of LEARNER_REPORT_TO. Later failures never end the run.

    Creating Trackers starts each of them with the run's folder `folder` and the run's name `run`. A name
    is "wandb", "tensorboard", or "file.py:function" or "package.module.function" of the user. Raise
    ConfigError if a tracker is not found, fails to start or lacks a method. `settings`, plain values by
    name, are sent to those that have a method `log_settings`, with *** for passwords.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, run: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._started = [(name, _start(name, folder, run)) for name in names]
        self._failed: set[str] = set()
        shown = {name: _without_passwords(value) for name, value in (settings or {}).items()}
        self.tell(lambda one: one.log_settings(shown) if hasattr(one, "log_settings") else None)

    def tell(self, call: Callable[[Tracker], None]) -> None:
        """Call `call` with each tracker, in the order of the names. No failure of a tracker is raised.

        A tracker's first failure is logged, its later ones are not; it is still called the next time.
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


def _without_passwords(value: Any) -> Any:
    """Return a setting's value with *** for the passwords and logins of URLs in its texts."""
    if isinstance(value, list):
        return [_without_passwords(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_passwords(one) for name, one in value.items()}
    return hide_passwords(value) if isinstance(value, str) else value


def _start(name: str, folder: Path, run: str) -> Tracker:
    """Return the tracker `name`, started with the run's folder `folder` and the run's name `run`.

    `name` is "wandb", "tensorboard", or a function of the user as "file.py:function" or
    "package.module.function", whose module is run. Raise ConfigError if it is not found, if its start
    raises an error or SystemExit, or if the object it makes lacks a method of Tracker. A PenstockError
    passes through as it is.
    """
    try:
        tracker = (_BUILT_IN.get(name) or _load(name))(folder, run)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        if name in _BUILT_IN and isinstance(error, ImportError):
            problem = f" names {name}, which cannot be imported ({error}): pip install {name}"
        else:
            problem = f"={name}: the tracker does not start: {type(error).__name__}: {error}; mend it"
        raise ConfigError(
            f"LEARNER_REPORT_TO{problem}, or leave {name} out of LEARNER_REPORT_TO"
        ) from error
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"LEARNER_REPORT_TO={name}: expected an object with the methods log, log_completions and "
            f"close, found {type(tracker).__name__}: return another object, or leave {name} out"
        )
    return tracker


def _load(name: str) -> MakeTracker:
    """Return the function of `name`: "file.py:function" or "package.module.function". Run its module.

    The function is not called. Raise ConfigError if the file, the module or something callable of this
    name is not there. An error that running the module raises passes through.
    """
    source, function = split_source(name)
    module = import_code(find_code(source, f"LEARNER_REPORT_TO={name}"))
    found: MakeTracker | None = getattr(module, function, None)
    if callable(found):
        return found
    raise ConfigError(
        f"LEARNER_REPORT_TO={name}: {source} has no function {function}; it has {public_names(module)}: "
        f"name one of these, or add {function} to {source}"
    )
