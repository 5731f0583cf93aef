"""Checkpoints: written aside, hashed, synced, renamed. A damaged checkpoint is found and not used.

checkpoints/{incarnation:06d}-{step:08d}/
    model/          the policy as a Hugging Face folder, with its card in README.md
    trainer/        weights and optimizer for resuming; not with LEARNER_SAVE_ONLY_MODEL
    state.json      step, the ledger's table, the journal's position, the machine
    manifest.json   BLAKE3 hash of every file above
"""

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, DiskFailed
from penstock.common.files.disk import failure_of
from penstock.common.files.hashing import has_hash, hash_file
from penstock.common.files.reading import DAMAGE, explain, parse_json
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Claim, Position, lengths_on_chain, read_claims
from penstock.common.journal.segments import segments_before
from penstock.common.log import get_logger
from penstock.common.text import short
from penstock.common.wire.codec import fields_as
from penstock.common.wire.ids import LARGEST
from penstock.common.wire.limits import check_range
from penstock.learner.policy.collective import TrainablePolicy
from penstock.learner.policy.processes import world_size
from penstock.learner.state.fingerprint import this_machine
from penstock.learner.state.ledger import Ledger, LedgerTable

log = get_logger(__name__)

_MANIFEST = "manifest.json"
_DAMAGE = (OSError, *DAMAGE)


class _State(TypedDict):
    """The content of state.json."""

    step: int
    position: dict[str, Any]
    ledger: dict[str, Any]
    trained_with: dict[str, Any]
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a whole checkpoint, from which a run is resumed."""

    folder: Path
    step: int
    position: Position
    ledger: LedgerTable
    trained_with: dict[str, Any]  # must be the same when `trainer` is loaded, see `training_kind`
    machine: dict[str, Any]  # that wrote the checkpoint, see `this_machine`

    @property
    def model(self) -> Path:
        """The folder of the policy in Hugging Face form, inside the checkpoint's folder."""
        return self.folder / "model"

    @property
    def trainer(self) -> Path:
        """The folder of weights and optimizer state. It is missing with LEARNER_SAVE_ONLY_MODEL."""
        return self.folder / "trainer"

    @property
    def bare_weights(self) -> Path | None:
        """The model's folder if there is no `trainer` (LEARNER_SAVE_ONLY_MODEL), else None."""
        return None if self.trainer.is_dir() else self.model


def save_checkpoint(
    folder: LearnerFolder,
    policy: TrainablePolicy,
    step: int,
    position: Position,
    ledger: LedgerTable,
    settings: LearnerSettings,
    card: str = "",
) -> Checkpoint:
    """Write and return the checkpoint after `step` Updates, and delete old checkpoints.

    The folder is named by position.incarnation and `step`; one of that name is replaced. `position` is
    the journal's end and `ledger` the table there: a resume continues with the records after it. `card`
    is the text of the model's README.md; "" writes none. Of `settings`, save_only_model leaves out the
    optimizer's state, and the newest save_total_limit undamaged checkpoints stay. With journal_retention
    "resume", the journal before the oldest of two or more kept is deleted too, if all are undamaged.
    `training_kind` of the settings is stored. A full disk is waited for until its timeout raises
    DiskFull; with several ranks it raises DiskFull at once: the others wrote their part. Raise RunTaken
    if a later learner has claimed the folder, NotFinite if a weight is NaN or infinity, ConfigError if a
    claim's file is damaged.
    """
    state: dict[str, Any] = {"step": step, "position": asdict(position), "ledger": ledger}
    state |= {"trained_with": training_kind(settings), "machine": this_machine()}

    def fill(aside: Path) -> None:
        """Write the files of the checkpoint, and last the hash of each, into the folder `aside`.

        With a `card` write the model's README.md, unless save_only_model the optimizer's state. Raise
        NotFinite if a weight is NaN or infinity, OSError if a file cannot be written.
        """
        policy.export(aside / "model")
        if card:
            (aside / "model" / "README.md").write_text(card, encoding="utf-8")
        if not settings.save_only_model:
            policy.save(aside / "trainer")
        (aside / "state.json").write_text(json.dumps(state))
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        hashes = {str(path.relative_to(aside)): hash_file(path) for path in files}
        (aside / _MANIFEST).write_text(json.dumps(hashes, indent=1))

    path = folder.checkpoint(position.incarnation, step)
    folder.write_folder("a checkpoint", path, fill, waits=world_size() == 1)
    _delete_old(folder, settings)
    return _read(path)


def _delete_old(folder: LearnerFolder, settings: LearnerSettings) -> None:
    """Delete checkpoints but the newest save_total_limit that are undamaged and part of the run.

    Damaged ones stay until so many newer ones are kept, with an error in the log. Of each only
    state.json is checked, and whether its learner wrote it before a later one's claim. With
    journal_retention=resume and two or more kept, delete the journal's files before the oldest of them.
    Do nothing if a later learner has claimed the folder. Raise ConfigError if a claim's file is damaged.
    """
    found = _newest_first(folder)  # before the claims: none of a later learner's is among them
    claims = read_claims(folder)
    if max(claims, default=0) > folder.incarnation:
        return
    ends = {**lengths_on_chain(folder, claims[folder.incarnation]), folder.incarnation: sys.maxsize}
    positions = {path: at for path in found if (at := _known_position(path))}
    valid = [path for path, at in positions.items() if at.offset <= ends.get(at.incarnation, -1)]
    kept = valid[: settings.save_total_limit]
    _delete_others(found, set(positions), kept, settings.save_total_limit)
    if settings.journal_retention == "resume" and len(kept) > 1:
        _trim_journal(folder, kept, positions[kept[-1]])


def _known_position(folder: Path) -> Position | None:
    """Return the journal position of a checkpoint; None, also if a disk that broke hides it."""
    with suppress(DiskFailed):
        return _position(folder)
    return None


def _delete_others(found: list[Path], undamaged: set[Path], kept: list[Path], most: int) -> None:
    """Delete the checkpoints in `found` that are not in `kept`, which has up to `most`, newest first.

    Log an error for those that are not `undamaged`, and leave them to the next start, which sets them
    aside; once `most` newer ones are kept, delete them too.
    """
    for path in found:
        if path in undamaged.difference(kept) or (len(kept) == most and path < kept[-1]):
            shutil.rmtree(path)
        elif path not in undamaged:
            log.error("A damaged checkpoint is left to the next start.", folder=str(path))


def _trim_journal(run_folder: RunFolder, kept: list[Path], oldest: Position) -> None:
    """Delete the journal's files that a resume from `oldest`, the oldest kept checkpoint, does not read.

    These are all files of earlier incarnations, and those of its own that end at or before its offset.
    `kept` are the folders of the checkpoints that were kept, newest first. If one is damaged, log an
    error and delete nothing; the newest, just written, is not checked.
    """
    doomed = segments_before(run_folder, oldest.incarnation, oldest.offset)
    try:
        damaged = [folder for folder in kept[1:] if _find_damage(folder)] if doomed else []
    except DiskFailed:  # one that cannot be read may be needed with all of the journal
        damaged = kept[1:]
    if damaged:
        log.error("The journal is not trimmed: a checkpoint is damaged.", folder=str(damaged[0]))
        return
    for path in doomed:
        path.unlink()


def newest_position(run_folder: RunFolder) -> Position | None:
    """Return the journal position of the newest checkpoint whose state.json fits its hash, or None."""
    return next(filter(None, map(_position, _newest_first(run_folder))), None)


def newest_checkpoint(folder: LearnerFolder, claim: Claim) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of the run that `claim` continues, None if there is none.

    Newer ones are logged and renamed to unused-..., so that they do not count among those kept: damaged
    ones, and those written after a later learner's claim. Raise RunTaken if a later learner has claimed
    the folder before a rename, ConfigError if a claim's file is damaged.
    """
    ends = lengths_on_chain(folder, claim)
    for path in _newest_first(folder):
        problem = _find_damage(path)
        if not problem:
            checkpoint = _read(path)
            place, end = checkpoint.position.offset, ends.get(checkpoint.position.incarnation, -1)
            if place <= end:
                return checkpoint
            problem = f"written by a learner that was superseded, at {place} of {end} bytes"
        folder.check_not_superseded()  # the checkpoint may be the successor's
        log.error("A checkpoint is not used.", folder=str(path), problem=problem)
        path.rename(path.with_name(f"unused-{path.name}"))
    return None


def training_kind(settings: LearnerSettings) -> dict[str, Any]:
    """Return by name what shapes the optimizer's state; a checkpoint loads only where these are equal.

    They are dtype, resolved ZeRO stage, LoRA rank and LoRA target modules ([] with rank 0) of
    `settings`, under their LEARNER_ variables, and the number of learner processes.
    """
    return {
        "LEARNER_DTYPE": settings.dtype,
        "LEARNER_ZERO_STAGE": settings.resolved_zero_stage,
        "LEARNER_LORA_RANK": settings.lora_rank,
        "LEARNER_LORA_TARGET_MODULES": settings.lora_target_modules if settings.lora_rank else [],
        "number of learner processes": world_size(),
    }


def check_loadable(checkpoint: Checkpoint, settings: LearnerSettings) -> None:
    """Raise ConfigError if the optimizer's state in a checkpoint does not fit the settings.

    Compared are the values of `training_kind` now and when the checkpoint was written; the error names
    those that changed. A checkpoint without optimizer state always fits.
    """
    now = training_kind(settings)
    changed = [
        f"{short(name)} was {short(then)} and is {now.get(name)}"
        for name, then in checkpoint.trained_with.items()
        if then != now.get(name)
    ]
    if changed and checkpoint.bare_weights is None:
        raise ConfigError(
            f"the run cannot be resumed from {checkpoint.folder}: {'; '.join(changed)}. Set that "
            f"back, or start a new run with LEARNER_MODEL={checkpoint.model}"
        )


def _newest_first(run_folder: RunFolder) -> list[Path]:
    """Return the folders of all checkpoints, damaged ones too, by incarnation and step, newest first."""
    return sorted(run_folder.checkpoints.glob("[0-9]*-[0-9]*"), reverse=True)


def _find_damage(folder: Path) -> str:
    """Return what is wrong with the files of the checkpoint in `folder`, "" if all have their hashes.

    Checked are the files that manifest.json names. A file that cannot be read is damage, but a disk that
    broke is none: raise DiskFailed, as the checkpoint may be whole.
    """
    try:
        _read(folder)
        for name, expected in _hashes(folder).items():
            path = folder / name
            if not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
                return f"{short(name)} is no file of it"
            if not has_hash(path, expected):
                return f"{short(name)} differs from its hash"
    except _DAMAGE as error:
        _raise_if_broken(error, folder)
        return f"unreadable: {explain(error)}"
    return ""


def _hashes(folder: Path) -> dict[str, Any]:
    """Return the hash of each file by its name, as the manifest in `folder` states them, unchecked.

    Raise TypeError if the manifest is no map, ValueError if it is no JSON, OSError if it is not there.
    """
    hashes = parse_json((folder / _MANIFEST).read_bytes())
    if not isinstance(hashes, dict):
        raise TypeError(
            f"the checkpoint's {_MANIFEST} is damaged: expected a map of names to hashes, found a "
            f"{type(hashes).__name__}: put the checkpoint back from a copy, or delete its folder"
        )
    return hashes


def _read(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder` by its state.json; the other files are not read.

    Raise ValueError if state.json has not the hash in the manifest. Other damage of the two files raises
    OSError (also if one is missing), ValueError, KeyError, TypeError or MalformedMessage.
    """
    path = folder / "state.json"
    if not has_hash(path, _hashes(folder)[path.name]):
        changed = f"the checkpoint's {path.name} was changed: its hash is not the one in {_MANIFEST}"
        raise ValueError(f"{changed}. Put the checkpoint back from a copy, or delete its folder")
    state = fields_as(_State, parse_json(path.read_bytes()), path.name)
    position = Position(**fields_as(Position, state.pop("position"), "position"))
    for number in (state["step"], position.incarnation, position.offset):
        check_range(f"{path.name}: a number", number, 0, LARGEST)
    Ledger().restore(state["ledger"])
    return Checkpoint(folder=folder, position=position, **state)


def _position(folder: Path) -> Position | None:
    """Return the journal position of a checkpoint, None if state.json or manifest.json is damaged.

    Raise DiskFailed for a disk that broke.
    """
    try:
        return _read(folder).position
    except _DAMAGE as error:
        _raise_if_broken(error, folder)
        return None


def _raise_if_broken(error: BaseException, folder: Path) -> None:
    """Raise DiskFailed if `error`, met while the checkpoint in `folder` was read, is a broken disk's."""
    if failed := failure_of(error, path=folder):
        remedy = "If only this folder can never be read again, move it away: an older checkpoint is used"
        raise DiskFailed(f"{failed}. {remedy}") from error
