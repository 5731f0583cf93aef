"""Checks of the run's folder: whether it can be written and locked, who holds it, and the room."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from penstock.common.files.lock import of_this_host
from penstock.common.files.run_folder import RunFolder
from penstock.deploy.doctor.finding import Finding, assign
from penstock.deploy.doctor.machine import GIB
from penstock.deploy.doctor.settings import Settings
from penstock.deploy.doctor.shape import Shape

_NETWORK = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.glusterfs", "lustre", "ceph", "afs")
_VERSIONS = 5  # those kept, and the one that is written
_TRAINER = 12  # bytes per trained parameter: fp32 weights and AdamW's two moments
_TOKEN = 8  # bytes per token in the journal and the table of completions, compressed

_SMALLER: tuple[dict[str, object], ...] = (
    {"LEARNER_JOURNAL_RETENTION": "resume"},
    {"LEARNER_SAVE_TOTAL_LIMIT": 2},
    {"LEARNER_SAVE_TOTAL_LIMIT": 2, "LEARNER_JOURNAL_RETENTION": "resume"},
    {"LEARNER_LORA_RANK": 16},
    {"LEARNER_LORA_RANK": 16, "LEARNER_JOURNAL_RETENTION": "resume"},
)
"""Settings by which a run writes less, those with the least cost first."""


class Partition(NamedTuple):
    """A mounted file system, as psutil lists it."""

    mountpoint: str
    fstype: str


def check_folder(folder: RunFolder) -> Iterator[Finding]:
    """Yield findings on the place of a run's folder, and on processes that hold it.

    Files are made there for a moment, and deleted again. Neither the folder nor a lock is kept.
    """
    place = existing(folder.path)
    if fault := _find_fault(place):
        found = f"the run's folder {folder.path} cannot be used: {fault}"
        why = "the learner could neither write its journal nor publish weights"
        yield Finding("folder", "error", found, why, _elsewhere(folder.path))
        return
    for lock, what in ((folder.up_lock, "`penstock up`"), (folder.learner_lock, "learner")):
        yield from _check_holder(lock, what)
    partitions = [Partition(one.mountpoint, one.fstype) for one in psutil.disk_partitions(all=True)]
    if (kind := file_system(place, partitions)).startswith(_NETWORK):
        found = f"the run's folder {folder.path} is on a network file system ({kind})"
        why = "locks and renames may be slow there, or not hold between machines"
        yield Finding("folder", "info", found, why, "do: set RUN_DIR to a local disk if there is one")


def check_room(settings: Settings, shape: Shape, steps: int) -> Iterator[Finding]:
    """Yield a finding if the disk has less room than the run of `steps` Updates will write.

    `steps` is 0 if the number is not known: then the journal is left out.
    """
    place = existing(settings.run.folder.path)
    goes_on = settings.learner.resume in ("auto", "must")
    free = shutil.disk_usage(place).free + (written(settings.run.folder) if goes_on else 0)
    if (needed := will_write(settings, shape, steps)) <= free or _find_fault(place):
        return  # nothing can be written at all: `check_folder` reports this
    remedy = f"do: set RUN_DIR to a folder on a disk with {needed / GIB:.1f} GiB free"
    for values in _SMALLER:
        fields = {name.removeprefix("LEARNER_").lower(): value for name, value in values.items()}
        learner = settings.learner.model_copy(update=fields)
        if will_write(settings.model_copy(update={"learner": learner}), shape, steps) <= free:
            remedy = assign(values)
            break
    found = f"the run will write up to {needed / GIB:.1f} GiB; {place} has {free / GIB:.1f} GiB for it"
    why = "the learner waits for room when the disk is full, and then ends"
    yield Finding("room", "error", found, why, remedy)


def will_write(settings: Settings, shape: Shape, steps: int) -> int:
    """Return about how many bytes a run keeps: checkpoints, versions, best model and journal."""
    learner = settings.learner
    weights = shape.parameters * (2 if learner.dtype == "bfloat16" else 4)
    trained = learner.lora_rank * shape.adapter_parameters if learner.lora_rank else shape.parameters
    state = 0 if learner.save_only_model else trained * _TRAINER
    adapter = bool(learner.lora_rank) and not learner.lora_publish_merged
    version = 4 * trained if adapter else weights
    best = weights if learner.eval_dataset or learner.eval_holdout else 0
    kept = min(steps, 3 * learner.save_steps) if learner.journal_retention == "resume" else steps
    tokens = learner.groups_per_step * learner.num_generations * learner.max_completion_length
    checkpoints = (learner.save_total_limit + 1) * (weights + state)
    return checkpoints + _VERSIONS * version + best + kept * tokens * _TOKEN


def written(run: RunFolder) -> int:
    """Return how many bytes that `will_write` counts a run has written; it keeps or replaces them."""
    found: dict[int, int] = {}  # by inode: versions and checkpoints share files
    for part in (run.checkpoints, run.versions, run.best, run.journal, run.completions):
        for folder, _, names in os.walk(part):
            for name in names:
                with contextlib.suppress(OSError):
                    stat = os.lstat(os.path.join(folder, name))
                    found[stat.st_ino] = stat.st_size
    return sum(found.values())


def existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def file_system(place: Path, partitions: Sequence[Partition]) -> str:
    """Return the type of the file system on which `place` lies, such as "ext4"; "" if none is known."""
    path = place.resolve()
    above = [one for one in partitions if path.is_relative_to(one.mountpoint)]
    return max(above, key=lambda one: len(one.mountpoint)).fstype if above else ""


def _find_fault(place: Path) -> str:
    """Return why no run can be written in the folder `place`, "" if it can."""
    if not place.is_dir():
        return f"{place} is no folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".penstock-doctor-", dir=place) as name:
            folder = Path(name) / "a"
            folder.mkdir()
            (folder / "file").write_bytes(b"a")
            (folder / "other").write_bytes(b"b")
            (folder / "other").replace(folder / "file")
            folder.rename(Path(name) / "b")
            with (Path(name) / "b" / "file").open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror} ({place})"
    return ""


def _elsewhere(path: Path) -> str:
    """Return the remedy that puts the run's folder where it can be written."""
    for folder in (Path("runs"), Path.home() / "penstock-runs", Path(tempfile.gettempdir()) / "runs"):
        if not _find_fault(existing(folder / path.name)):
            return assign({"RUN_DIR": folder})
    return "do: set RUN_DIR to a folder that this user may write to"


def _check_holder(lock: Path, what: str) -> Iterator[Finding]:
    """Yield a finding if another process, a `what`, holds the lock of a run's folder."""
    try:
        with lock.open("rb") as file:
            holder = file.readline().decode(errors="replace").strip()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = re.match(r"process ([0-9]+) ", "".join(of_this_host([holder])))
        other = assign({"RUN_NAME": f"{lock.parent.name}-2"})
        remedy = f"type: kill -INT {process[1]}" if process else other
        found = f"another {what} holds the run's folder {lock.parent}: {holder}"
        yield Finding("holder", "error", found, "a second one is refused", remedy)
    except OSError:  # no such file: nobody has begun
        return
