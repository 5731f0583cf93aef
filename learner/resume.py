"""How a learner resumes: load the newest whole checkpoint, then retrain the journal's tail.

The tail is retrained by the functions of a live step. On one machine with one thread count, a run that
was killed and resumed has the same weights, bit for bit, as a run that was not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from penstock.common.config.command import mistake
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.reading import reading
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.claims import Claim, read_chain
from penstock.common.journal.segments import REMEDY
from penstock.common.log import get_logger
from penstock.common.text import short
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import ScoredGroup, Verdict
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.policy.collective import TrainablePolicy
from penstock.learner.policy.update import Update
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.metrics import update_metrics
from penstock.learner.report.recorder import Recorder
from penstock.learner.state.checkpoint import Checkpoint
from penstock.learner.state.fingerprint import warn_of_another_machine
from penstock.learner.state.ledger import Ledger

log = get_logger(__name__)


@dataclass(slots=True)
class Past:
    """The state of a resumed run: Updates made in all, and how many of them were retrained now."""

    step: int
    retrained: int = 0
    bad_steps: int = 0  # Updates in a row, up to the newest, that skipped an optimizer step


def retrain_tail(
    run_folder: RunFolder,
    claim: Claim,
    policy: TrainablePolicy,
    ledger: Ledger,
    recorder: Recorder,
    checkpoint: Checkpoint | None,
    changes: Mapping[str, Any] | None = None,
) -> Past:
    """Train the journal's batches after the checkpoint again and return the Past. Publish nothing.

    `claim` states which records count. `checkpoint` None starts at the first record. `policy` is loaded
    from the checkpoint; if this has no optimizer state, the policy must have its weights already. The
    empty `ledger` gets the state of the journal's end. `recorder` deletes the metrics after the
    checkpoint and half-written evaluations; metrics and completions are written again.
    Example: checkpoint of step 40, journal until step 43: the batches of steps 41 to 43 are trained.
    Batches are built with the settings in their records, except for `changes` (values by setting, such
    as {"epsilon": "0.3"}; None: no changes). They are trained with the policy's settings, so a changed
    loss or learning rate has an effect from the checkpoint on. Another machine is logged. Raise
    ConfigError if the journal is damaged, a setting is wrong, or a group in it is of another release;
    raise RunTaken if superseded, or DiskFull.
    """
    past = Past(checkpoint.step if checkpoint else 0)
    if checkpoint:
        _load(checkpoint, policy, ledger)
    machine = checkpoint.machine if checkpoint else {}
    recorder.cut_after(past.step)
    for position, record in read_chain(run_folder, claim, checkpoint.position if checkpoint else None):
        with reading(f"{run_folder.journal}, {position}", REMEDY):
            ledger.restore(record["ledger"])
            if record["kind"] == "batch":  # made after the end of the evaluation before
                ledger.earlier_answers.clear()
            ledger.earlier_answers += record.get("answers", [])
            if record["kind"] == "header" and record["machine"] != machine:
                machine = dict(record["machine"])
                warn_of_another_machine(machine)
            due = record["kind"] == "batch" and record["step"] > past.step
            batch = _read_batch(record, changes or {}) if due else None
        if batch is not None:
            update = _retrain(batch, policy, recorder)
            past.bad_steps = past.bad_steps + 1 if update.skipped else 0
            past.step = batch.step
            past.retrained += 1
    return past


def _load(checkpoint: Checkpoint, policy: TrainablePolicy, ledger: Ledger) -> None:
    """Load a checkpoint into `policy` and `ledger`, and log this.

    A checkpoint without optimizer state is not loaded into the policy, which has its weights already; a
    warning is logged. A warning is logged too if another machine wrote the checkpoint.
    """
    if checkpoint.bare_weights:
        log.warning("The checkpoint has no optimizer state: the resumed run is not exactly the same.")
    else:
        policy.load(checkpoint.trainer)
    ledger.restore(checkpoint.ledger)
    log.info("Resuming from a checkpoint.", step=checkpoint.step, folder=str(checkpoint.folder))
    warn_of_another_machine(checkpoint.machine)


@dataclass(frozen=True, slots=True)
class _RecordedBatch:
    """The content of a record of the kind `batch`."""

    step: int
    groups: list[ScoredGroup]
    filtered: list[Verdict]
    reward_weights: dict[str, float]
    settings: LearnerSettings
    metrics: dict[str, Any]


def _read_batch(record: Mapping[str, Any], changes: Mapping[str, Any]) -> _RecordedBatch:
    """Return the batch of a journal record of the kind `batch`, its settings changed by `changes`.

    `changes` has values by setting, such as {"epsilon": "0.3"}. Raise ConfigError if these are wrong,
    ValueError for a reward without its weight, and KeyError, TypeError or the like for other damage.
    """
    LearnerSettings(**record["settings"])  # fails as damage of the file if the changes are not at fault
    found = _RecordedBatch(
        step=int(record["step"]),
        groups=[decode(group, ScoredGroup) for group in record["groups"]],
        filtered=[decode(verdict, Verdict) for verdict in record.get("filtered", ())],
        reward_weights={name: float(weight) for name, weight in record["reward_weights"].items()},
        settings=settings_of(record["settings"], changes),
        metrics=dict(record["metrics"]),
    )
    rewards = [scored.rewards for scored in found.groups] + [one.rewards for one in found.filtered]
    if unknown := {name for row in rewards for name in row} - set(found.reward_weights):
        missing = short(", ".join(sorted(unknown)))
        raise ValueError(f"a batch lacks the weight of the reward {missing}: restore the run's journal")
    return found


def _retrain(batch: _RecordedBatch, policy: TrainablePolicy, recorder: Recorder) -> Update:
    """Train a recorded batch as its step did, and return the Update.

    The weights of `policy` change. `recorder` writes the step's metrics, and its completions if the
    recorded settings log them. Trackers get neither. The step is logged. Raise RunTaken if superseded,
    or DiskFull.
    """
    step, settings = batch.step, batch.settings
    built = build_batch(batch.groups, batch.reward_weights, step - 1, settings)
    update = policy.update(built, step - 1)
    if settings.log_completions:
        make_rows = partial(
            completion_rows, step, batch.groups, batch.filtered, built, batch.reward_weights
        )
        recorder.completions(step, make_rows, track=False)
    recorder.metrics(step, batch.metrics | update_metrics(update), track=False)
    log.info("Retrained a step from the journal.", step=step)
    return update


def settings_of(recorded: Mapping[str, Any], changes: Mapping[str, str]) -> LearnerSettings:
    """Return the settings that a journal recorded, with the values of `changes` in place of its own.

    Both have values by field name, such as {"epsilon": "0.3"} for LEARNER_EPSILON. trust_remote_code is
    True only by `changes`, not because a file says so. Raise ConfigError for an unknown setting or a
    wrong value.
    """
    try:
        return LearnerSettings(**{**recorded, "trust_remote_code": False, **changes})
    except ValidationError as error:
        mistakes = "\n".join(mistake(detail, ("LEARNER", *detail["loc"])) for detail in error.errors())
        found = f"wrong settings, in the journal or given now: {mistakes[:800]}"
        raise ConfigError(f"{found}. Correct those given now, or restore the journal") from error


def encode_groups(groups: list[ScoredGroup]) -> list[bytes]:
    """Return the groups of a batch as the journal stores them: each as an encoded message, in order."""
    return [encode(group) for group in groups]
