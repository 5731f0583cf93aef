"""Going on from what is on disk: the newest whole checkpoint, then the journal's tail.

The tail is retrained by the same functions as a live step, so on one machine with one thread count
a run that was killed and resumed has the same weights, bit for bit, as one that was not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.claims import Claim, read_chain
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import ScoredGroup, Verdict
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.policy.collective import TrainablePolicy
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.metrics import update_metrics
from penstock.learner.report.recorder import Recorder
from penstock.learner.state.checkpoint import Checkpoint
from penstock.learner.state.fingerprint import warn_of_another_machine
from penstock.learner.state.ledger import Ledger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Past:
    """Where the run stands: Updates made, and of these retrained now."""

    step: int
    retrained: int
    bad_steps: int
    """Updates at the end that changed nothing, in a row."""


def retrain_tail(
    run_folder: RunFolder,
    claim: Claim,
    policy: TrainablePolicy,
    ledger: Ledger,
    recorder: Recorder,
    checkpoint: Checkpoint | None,
    changes: Mapping[str, Any] | None = None,
) -> Past:
    """Bring policy and ledger to where the journal ends; nothing is published meanwhile.

    Batches are built with the settings they were decided with, but for `changes`; they are trained as
    the policy's settings say, so a changed loss or learning rate counts from the checkpoint on.

    `policy` began with a bare checkpoint's weights, if it is one.
    """
    step = checkpoint.step if checkpoint else 0
    if checkpoint:
        if checkpoint.bare_weights:
            log.warning("the checkpoint has no optimizer: the run goes on, but not exactly as it was")
        else:
            policy.load(checkpoint.trainer)
        ledger.restore(checkpoint.ledger)
        log.info("resuming from a checkpoint", step=step, folder=str(checkpoint.folder))
        warn_of_another_machine(checkpoint.machine)
    machine = checkpoint.machine if checkpoint else {}
    recorder.cut_after(step)
    retrained = bad_steps = 0
    for _, record in read_chain(run_folder, claim, checkpoint.position if checkpoint else None):
        if record["kind"] == "header" and record["machine"] != machine:
            machine = record["machine"]
            warn_of_another_machine(machine)
        if record["kind"] == "batch" and record["step"] > step:
            groups = decode_groups(record["groups"])
            settings = LearnerSettings(**{**record["settings"], **(changes or {})})
            batch = build_batch(groups, record["reward_weights"], step, settings)
            update = policy.update(batch, step)
            bad_steps = bad_steps + 1 if update.skipped else 0
            step = record["step"]
            retrained += 1
            if settings.log_completions:
                filtered = [decode(verdict, Verdict) for verdict in record.get("filtered", ())]
                rows = completion_rows(step, groups, filtered, batch, record["reward_weights"])
                recorder.completions(step, rows, track=False)
            recorder.metrics(step, record["metrics"] | update_metrics(update), track=False)
            log.info("retrained from the journal", step=step)
        ledger.restore(record["ledger"])
    return Past(step, retrained, bad_steps)


def encode_groups(groups: list[ScoredGroup]) -> list[bytes]:
    """A batch's groups as the journal holds them."""
    return [encode(group) for group in groups]


def decode_groups(groups: list[bytes]) -> list[ScoredGroup]:
    """What `encode_groups` wrote."""
    return [decode(group, ScoredGroup) for group in groups]
