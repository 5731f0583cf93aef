"""What `penstock up` does with an earlier run's folder: move it away, or begin from its checkpoint."""

import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.files.atomic import read_json_lines, whole_folder
from penstock.common.files.hashing import has_hash
from penstock.common.files.lock import hold_lock
from penstock.common.files.reading import parse_json, reading
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.claims import Position, read_claims
from penstock.common.journal.segments import list_segments
from penstock.common.text import short
from penstock.common.wire.codec import fields_as


def move_away(folder: RunFolder) -> Path:
    """Rename a run's folder, if it is there, to NAME.1, or to NAME.2 if that is taken, and so on.

    Return where the folder is now: at its old path if there was none, or it has only what a start leaves
    whose learner did not claim the run. Raise RunTaken if `penstock up` or a learner uses it,
    ConfigError if it cannot be renamed.
    """
    if not folder.path.exists():
        return folder.path
    with hold_lock(folder.up_lock, "`penstock up`"), hold_lock(folder.learner_lock, "learner"):
        if set(folder.path.iterdir()) <= {
            folder.up_lock, folder.learner_lock, folder.logs, folder.server
        }:  # fmt: skip
            return folder.path
        names = (folder.path.with_name(f"{folder.path.name}.{number}") for number in count(1))
        target = next(path for path in names if not os.path.lexists(path))
        try:
            folder.path.rename(target)
        except OSError as error:
            raise ConfigError(
                f"LEARNER_RESUME: {folder.path} cannot be renamed to {target} ({error}): rename it "
                "yourself, or choose another RUN_NAME"
            ) from error
    print(f"The earlier run is in {target} now (LEARNER_RESUME).", flush=True)
    return target


def find_checkpoint(path: Path) -> Path:
    """Return the folder of the checkpoint at `path`: itself, or the one that its model is in.

    Raise ConfigError if there is no checkpoint of a run.
    """
    found = path.resolve()
    found = found.parent if found.name == "model" else found
    is_whole = found.name[:1].isdigit() and (found / "state.json").is_file()  # not one that is put aside
    if found.parent.name == "checkpoints" and is_whole:
        return found
    near = sorted(str(one) for one in found.parent.glob("[0-9]*-[0-9]*"))[-5:]
    there = f"there are {', '.join(near)}" if near else "a run keeps them in its folder checkpoints/"
    raise ConfigError(
        f"LEARNER_RESUME={path}: expected auto, must, new, or the folder of a checkpoint such as "
        f"runs/first/checkpoints/000001-00000050, found none there; {there}"
    )


def check_whole(checkpoint: Path) -> None:
    """Raise ConfigError if a file of the checkpoint has not its hash: the run would begin at step 0."""
    path, remedy = checkpoint / "manifest.json", "Name another checkpoint"
    try:
        with reading(path, remedy):
            for name, expected in parse_json(path.read_bytes()).items():
                if not has_hash(checkpoint / name, expected):
                    raise ValueError(f"{short(name)} differs from its hash there")
    except OSError as error:
        raise ConfigError(f"LEARNER_RESUME={checkpoint}: cannot be read: {error}. {remedy}") from error


def began_from(folder: RunFolder, asked: Path) -> bool:
    """Return whether the run's folder was made of the checkpoint at `asked`, and say that it goes on."""
    named = os.fsencode(asked.resolve()).removesuffix(b"/model")
    if goes_on := folder.begun_from.is_file() and folder.begun_from.read_bytes() == named:
        print(f"The run began from {asked} before, and goes on. Choose another RUN_NAME to begin anew.")
    return goes_on


def begin_from(checkpoint: Path, folder: RunFolder, named: Path) -> None:
    """Make the run's folder, which is not there, as the run was when it wrote `checkpoint`.

    `named` is where the checkpoint was when LEARNER_RESUME named it. Copied are the
    checkpoint, the journal and the claims up to it, metrics and evaluations up to its step, and what the
    run was started with. The earlier run's folder is only read. Raise ConfigError for a damaged state of
    the checkpoint, or a damaged claim.
    """
    source = RunFolder(checkpoint.parent.parent)
    step, at = read_state(checkpoint)
    with whole_folder(folder.path) as aside:
        made = RunFolder(aside)
        shutil.copytree(checkpoint, made.checkpoints / checkpoint.name)
        made.journal.mkdir()
        made.claims.mkdir()
        for number in sorted(read_claims(source)):
            if number <= at.incarnation:
                shutil.copy(source.claim(number), made.claims)
                _copy_journal(source, made, number, at.offset if number == at.incarnation else None)
        for rows, copy in ((source.metrics, made.metrics), (source.evaluations, made.evaluations)):
            kept = [row for row in read_json_lines(rows) if row["step"] <= step]
            copy.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        made.begun_from.write_bytes(os.fsencode(named))
        for file in (source.record, source.settings):
            if file.is_file():
                shutil.copy(file, aside)
    print(f"The run {folder.path.name} begins after step {step} of {source.path}.", flush=True)


def read_state(checkpoint: Path) -> tuple[int, Position]:
    """Return a checkpoint's step, and its place in the journal. Raise ConfigError for damage."""
    path = checkpoint / "state.json"
    with reading(path, "Name another checkpoint"):
        state: dict[str, Any] = parse_json(path.read_bytes())
        return int(state["step"]), Position(**fields_as(Position, state["position"], "position"))


def _copy_journal(source: RunFolder, made: RunFolder, incarnation: int, end: int | None) -> None:
    """Copy an incarnation's journal up to the offset `end`, or whole for None. OSError if it fails."""
    for segment in list_segments(source, incarnation):
        if end is not None and segment.start >= end:
            return
        copy = made.journal / segment.path.name
        shutil.copy(segment.path, copy)
        if end is not None and segment.end > end:
            os.truncate(copy, end - segment.start)
