"""The files of a run: the path of each, and how the learner writes them."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from penstock.common.errors import RunTaken
from penstock.common.files.atomic import whole_folder, write_whole
from penstock.common.files.disk import Disk, T


def version_name(incarnation: int, step: int) -> str:
    """Return the name of a version's folder, for a run and where others fetch it: 000002-00000040."""
    return f"{incarnation:06d}-{step:08d}"


def run_path(path: Path) -> Path:
    """Return `path`, a run's folder. Raise ValueError if it is missing, but there is runs/`path`."""
    if not path.exists() and (other := Path("runs") / path).is_dir():
        raise ValueError(f"there is no folder {path}; did you mean {other}?")
    return path


RunPath = Annotated[Path, AfterValidator(run_path)]
"""The type of an argument of a command that is the folder of a run."""


class RunFolder:
    """The paths of a run's files below its folder `path`, as attributes. Creates none of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.learner_lock = path / "learner.lock"
        self.up_lock = path / "up.lock"  # held by `penstock up`
        self.device_locks = path / "device"  # held by who uses a shared device
        self.nonce = path / "nonce"  # ties the folder to its run on the queue server
        self.begun_from = path / "begun_from"  # the checkpoint that LEARNER_RESUME named
        self.record = path / "run.json"  # what the last start was made of
        self.settings = path / "settings.env"  # the learner's settings at the last start
        self.claims = path / "claims"
        self.journal = path / "journal"
        self.checkpoints = path / "checkpoints"
        self.latest, self.final = path / "latest", path / "final"  # links to models of checkpoints
        self.versions = path / "versions"  # published weights
        self.best = path / "best"  # the best model by held-out questions
        self.best_link = self.best / "model"  # leads to the model of the folder in it
        self.uploads = path / "uploads"  # links to what is being uploaded to a hub
        self.not_finite = path / "not_finite"  # batches whose gradients held NaN or infinity
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.completions = path / "completions"
        self.tensorboard = path / "tensorboard"
        self.learning_curve = path / "learning_curve.png"  # of the demo and `penstock plot`
        self.report = path / "report.html"  # of `penstock report`
        self.logs = path / "logs"  # of each process that `penstock up` runs
        self.log = path / "log.txt"  # of the demo
        self.replay = path / "replay"  # default output of `penstock replay`
        self.server = path / "queue"  # data of the queue server that `penstock up` started
        self.server_url = self.server / "url"  # address with password, mode 0600
        self.server_configuration = self.server / "server.conf"
        self.server_users = self.server / "users.acl"
        self.server_log = self.server / "server.log"

    def only_lock(self, role: str) -> Path:
        """Return the file that `penstock up --only` holds on this host while it runs this role."""
        return self.path / f"up.{socket.gethostname()}.{role}.lock"

    def claim(self, incarnation: int) -> Path:
        """Return the file by which a learner claimed this incarnation, such as claims/000002.json."""
        return self.claims / f"{incarnation:06d}.json"

    def segment(self, incarnation: int, start: int) -> Path:
        """Return the journal file that begins at byte `start`: journal/000002-000000000900.journal.

        `start` counts the bytes of all journal files of this incarnation, from 0.
        """
        return self.journal / f"{incarnation:06d}-{start:012d}.journal"

    def checkpoint(self, incarnation: int, step: int) -> Path:
        """Return the folder of the checkpoint after `step` Updates: checkpoints/000002-00000040."""
        return self.checkpoints / f"{incarnation:06d}-{step:08d}"

    def version(self, incarnation: int, step: int) -> Path:
        """Return the absolute path of versions/000002-00000040: weights after `step` (40) Updates."""
        return self.versions.absolute() / version_name(incarnation, step)

    def best_model(self, step: int) -> Path:
        """Return best/00000040, the folder for the model after `step` (40) Updates if it is the best."""
        return self.best / f"{step:08d}"

    def completion_table(self, step: int) -> Path:
        """Return the Parquet file of a step's completions: completions/completions_00040.parquet."""
        return self.completions / f"completions_{step:05d}.parquet"

    def results(self, name: Literal["train", "eval"]) -> Path:
        """Return train_results.json, the training's final metrics, or eval_results.json, by `name`.

        eval_results.json has the metrics of the last evaluation.
        """
        return self.path / f"{name}_results.json"

    def newest_incarnation(self) -> int:
        """Return the largest incarnation that a file in claims/ names, 0 if there is none."""
        try:
            names = os.listdir(self.claims)
        except FileNotFoundError:
            return 0
        numbers = (name[:-5] for name in names if name.endswith(".json"))
        return max((int(number) for number in numbers if number.isdecimal()), default=0)


class LearnerFolder(RunFolder):
    """A run's folder as the incarnation `incarnation` of the learner writes it.

    Each attempt to write first raises RunTaken if a later incarnation has claimed the folder. `disk`
    waits while the disk is full; None: a full disk raises DiskFull at once. Example: incarnation 2 waits
    for room, and incarnation 3 starts on another host. When there is room again, incarnation 2 raises
    RunTaken and writes nothing.
    """

    def __init__(self, path: Path, incarnation: int, disk: Disk | None = None) -> None:
        super().__init__(path)
        self.incarnation = incarnation
        self.disk = disk or Disk()

    def check_not_superseded(self) -> None:
        """Raise RunTaken if a later incarnation of the learner has claimed the folder."""
        newest = self.newest_incarnation()
        if newest > self.incarnation:
            now = f"incarnation {newest} of the learner holds the run's folder {self.path}"
            raise RunTaken(
                f"{now} and continues the run: this learner was superseded and stops. To go on with "
                "this one, stop the other learner and start this one again"
            )

    def write(
        self, what: str, path: Path, action: Callable[[], T], needed: int | None, waits: bool = True
    ) -> T:
        """Return what `action` returns; call it again, after a wait, while it fails on a full disk.

        `action` writes `path`; its other errors are raised at once. `what` names the thing written, for
        log and error. `needed` is about how many bytes it takes: a retry waits until as many are free;
        None: unknown. With `waits` False a full disk raises DiskFull at once, else after the timeout of
        `disk`, or when it is told to stop. Raise RunTaken before each attempt if a later incarnation has
        claimed the folder.
        """

        def attempt() -> T:
            """Return what `action` returns. First raise RunTaken if this learner was superseded."""
            self.check_not_superseded()
            return action()

        return (self.disk if waits else Disk()).write(what, path, attempt, needed)

    def write_file(self, path: Path, data: bytes) -> None:
        """Replace or create the file `path` of the run, with the content `data`, as a whole.

        Its folder is created if missing, but no folder above that. Wait while the disk is full. Raise
        DiskFull if no room came, RunTaken if a later learner has claimed the folder, OSError for other
        failures.
        """

        def write() -> None:
            """Make the folder if missing, and write the file. Raise OSError."""
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)

        self.write(path.name, path, write, len(data))

    def write_folder(
        self, what: str, path: Path, fill: Callable[[Path], None], waits: bool = True, sync: bool = True
    ) -> None:
        """Let `fill` write files into a temporary folder, then put it at `path`, in place of one there.

        `what` names the folder in the log and the error. While the disk is full, wait and call `fill`
        again with a new empty folder. A retry waits until there is as much room as the newest numbered
        folder beside `path` takes. Raise RunTaken if a later learner has claimed the folder, DiskFull if
        no room came (at once if not `waits`), and errors of `fill`, after which `path` is unchanged.
        Without `sync` the folder survives a kill, but not a power cut.
        """

        def write() -> None:
            """Let `fill` fill a temporary folder, sync it, rename it to `path`. Raise their errors."""
            with whole_folder(path, sync) as aside:
                fill(aside)

        newest = max(path.parent.glob("[0-9]*"), default=None)
        files = [file for file in newest.rglob("*") if file.is_file()] if newest else []
        self.write(what, path, write, sum(file.stat().st_size for file in files) or None, waits)

    def link(self, path: Path, target: Path | None) -> None:
        """Let `path`, in the run's folder, be a link to `target` in it, in place of an earlier link.

        With None there is no link then. Raise RunTaken if a later learner has claimed the folder,
        OSError if no link can be made, as on a file system without any.
        """
        self.check_not_superseded()
        aside = path.with_name(f".{path.name}")
        aside.unlink(missing_ok=True)
        if target is None:
            return path.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(target, path.parent))
        aside.replace(path)

    def remove_asides(self) -> None:
        """Delete unfinished versions, checkpoints and best models, which a killed learner left.

        These are the folders in versions/, checkpoints/ and best/ whose names begin with a dot. What
        cannot be deleted stays. Raise RunTaken if a later learner has claimed the run's folder.
        """
        for parent in (self.versions, self.checkpoints, self.best):
            self.check_not_superseded()
            for aside in parent.glob(".*"):
                if aside.is_symlink():
                    aside.unlink(missing_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
