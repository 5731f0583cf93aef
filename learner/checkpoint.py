"""Checkpoints: written aside, synced, hashed, renamed; a damaged one is noticed and passed over.

checkpoints/{incarnation:06d}-{step:08d}/
    model/          the policy as a Hugging Face folder
    trainer/        weights and optimizer for resuming; not with LEARNER_SAVE_ONLY_MODEL
    state.json      step, the ledger's table, the journal's position
    manifest.json   SHA-256 of every file above
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import hash_file, whole_folder
from common.learner_settings import LearnerSettings
from common.log import get_logger
from learner.claim import Claim, read_claims
from learner.journal import Position
from learner.ranks import world_size

log = get_logger(__name__)

_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: where it lies and what a resume goes on from."""

    folder: Path
    step: int
    position: Position
    ledger: dict[str, Any]
    trained_with: dict[str, Any]
    """What must be the same for `trainer` to be loaded, see `training_kind`."""

    @property
    def model(self) -> Path:
        """The policy as a Hugging Face folder."""
        return self.folder / "model"

    @property
    def trainer(self) -> Path:
        """Weights and optimizer for an exact resume."""
        return self.folder / "trainer"

    @property
    def bare_weights(self) -> Path | None:
        """The model, if that is all there is (LEARNER_SAVE_ONLY_MODEL)."""
        return None if self.trainer.is_dir() else self.model


def save_checkpoint(
    run_folder: Path,
    policy: Any,
    step: int,
    position: Position,
    ledger: dict[str, Any],
    settings: LearnerSettings,
) -> Checkpoint:
    """Write the checkpoint of a step, then delete all but the newest few.

    `policy` is a Policy, or its Leader.
    """
    folder = checkpoints_folder(run_folder) / f"{position.incarnation:06d}-{step:08d}"
    with whole_folder(folder) as aside:
        policy.export(aside / "model")
        if not settings.save_only_model:
            policy.save(aside / "trainer")
        state = {
            "step": step,
            "position": asdict(position),
            "ledger": ledger,
            "trained_with": training_kind(settings),
        }
        (aside / "state.json").write_text(json.dumps(state))
        hashes = {str(path.relative_to(aside)): hash_file(path) for path in _files(aside)}
        (aside / _MANIFEST).write_text(json.dumps(hashes, indent=1))
    for old in _newest_first(run_folder)[settings.save_total_limit :]:
        shutil.rmtree(old)
    return _read(folder)


def newest_checkpoint(run_folder: Path, claim: Claim) -> Checkpoint | None:
    """The newest whole checkpoint on the claim's own chain, or None."""
    ends = {found.parent: found.parent_length for found in read_claims(run_folder).values()}
    ends[claim.parent] = claim.parent_length
    for folder in _newest_first(run_folder):
        problem = _find_damage(folder)
        if not problem:
            checkpoint = _read(folder)
            position = checkpoint.position
            if position.offset <= ends.get(position.incarnation, -1):
                return checkpoint
            problem = "written by a learner that was superseded"
        log.error("a checkpoint is passed over", folder=str(folder), problem=problem)
        folder.rename(folder.with_name(f"unused-{folder.name}"))  # it must not count among those kept
    return None


def training_kind(settings: LearnerSettings) -> dict[str, Any]:
    """The settings that decide the form of the optimizer's state, by variable."""
    return {
        "LEARNER_DTYPE": settings.dtype,
        "LEARNER_ZERO_STAGE": settings.resolved_zero_stage,
        "LEARNER_LORA_RANK": settings.lora_rank,
        "LEARNER_LORA_TARGET_MODULES": settings.lora_target_modules if settings.lora_rank else [],
        "number of learner processes": world_size(),
    }


def check_loadable(checkpoint: Checkpoint, settings: LearnerSettings) -> None:
    """Whether the trainer's state fits today's settings; raises ConfigError naming what changed."""
    now = training_kind(settings)
    changed = [
        f"{name} was {then} and is {now[name]}"
        for name, then in checkpoint.trained_with.items()
        if then != now[name]
    ]
    if changed and checkpoint.bare_weights is None:
        raise ConfigError(
            f"the run cannot be resumed from {checkpoint.folder}: {'; '.join(changed)}. Set it back, or "
            f"start a new run with LEARNER_MODEL={checkpoint.model}"
        )


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run_folder / "checkpoints"


def _newest_first(run_folder: Path) -> list[Path]:
    return sorted(checkpoints_folder(run_folder).glob("[0-9]*-[0-9]*"), reverse=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _find_damage(folder: Path) -> str:
    try:
        hashes = json.loads((folder / _MANIFEST).read_text())
        _read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable: {error}"
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if hash_file(path) != expected:
            return f"{name} differs from its hash"
    return ""


def _read(folder: Path) -> Checkpoint:
    state = json.loads((folder / "state.json").read_text())
    return Checkpoint(
        folder, state["step"], Position(**state["position"]), state["ledger"], state["trained_with"]
    )
