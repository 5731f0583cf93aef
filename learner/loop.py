"""The learner's loop, and how it resumes and ends."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.config.command import LearnerCommand
from penstock.common.errors import NoSignal, NotFinite
from penstock.common.failpoint import failpoint
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.journal.claims import Claim
from penstock.common.log import get_logger
from penstock.common.wire.codec import encode, pack
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import ScoredGroup, Verdict
from penstock.learner.algorithm.batch import Batch, build_batch
from penstock.learner.data.plan import Plan
from penstock.learner.policy.collective import TrainablePolicy
from penstock.learner.policy.flops import peak_flops
from penstock.learner.policy.processes import world_size
from penstock.learner.policy.update import Update
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.eval_metrics import summarise
from penstock.learner.report.metrics import group_metrics, update_metrics
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import encode_groups, retrain_tail
from penstock.learner.state.best_model import keep_if_best
from penstock.learner.state.checkpoint import (
    Checkpoint,
    save_checkpoint,
)
from penstock.learner.state.fingerprint import this_machine
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.state.versions import write_version
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.intake import Arrivals
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.ticket_flow import TicketFlow, ignore_phase

log = get_logger(__name__)


class Learner:
    """One incarnation of the learner."""

    def __init__(
        self,
        command: LearnerCommand,
        plan: Plan,
        folder: LearnerFolder,
        claim: Claim,
        policy: TrainablePolicy,
        checkpoint: Checkpoint | None,
        enter_phase: Callable[[str], None] = ignore_phase,
    ) -> None:
        self._settings = command.learner
        self._command = command
        self._folder = folder
        self._plan = plan
        self._claim = claim
        self._policy = policy
        self._checkpointed = checkpoint
        self._last: dict[str, Any] = {}  # metrics of the last step that was made here
        self._enter_phase = enter_phase
        self._peak = peak_flops(command.learner.peak_tflops)

    def start(
        self,
        connection: Connection,
        queue: LearnerQueue,
        nonce: str,
        stopping: threading.Event,
    ) -> None:
        """Retrain the tail of the journal, join the streams, publish the current version."""
        self._recorder = Recorder(self._folder, self._settings.report_to, self._command.run.name)
        ledger = Ledger()
        past = retrain_tail(
            self._folder, self._claim, self._policy, ledger, self._recorder, self._checkpointed
        )
        self._step = self._saved = past.step
        self._bad_steps = past.bad_steps
        self._parent = ""
        segment_bytes = round(self._settings.journal_segment_mib * 2**20)
        journal = Journal(self._folder, segment_bytes)
        self._commit_log = CommitLog(ledger, journal, queue)
        self._flow = TicketFlow(
            connection, queue, self._commit_log, self._plan, self._command.run, nonce, stopping,
            self._enter_phase,
        )  # fmt: skip
        for ticket in ledger.eval_open():
            ledger.close(ticket, "stale", "the learner that asked was restarted")
        self._commit_log.record("header", **self._header())
        self._flow.join()
        self._publish()

    def _header(self) -> dict:
        return {
            "incarnation": self._folder.incarnation,
            "step": self._step,
            "steps": self._plan.steps,
            "model_folder": str(self._plan.model_folder),
            "contract": self._plan.contract.hash,
            "machine": this_machine(),
            "settings": self._settings.model_dump(mode="json"),
        }

    def train(self, stopping: threading.Event) -> None:
        """Take groups, journal them, acknowledge, update, publish; until the steps are made."""
        log.info("training", step=self._step, steps=self._plan.steps, credit=self._settings.credit)
        while self._step < self._plan.steps:
            started = time.monotonic()
            try:
                groups = self._flow.take_groups(self._step)
            except NoSignal:  # the record shows what nothing could be learned from
                arrivals = self._flow.intake.take_arrivals()
                self._record_completions(self._step + 1, [], arrivals, Batch(()))
                raise
            if groups is None:
                break
            self._note_evaluations()
            arrivals = self._flow.intake.take_arrivals()
            metrics = self._journal(groups, arrivals, time.monotonic() - started)
            batch = build_batch(groups, self._plan.reward_weights, self._step, self._settings)
            update_started = time.monotonic()
            update = self._policy.update(batch, self._step)
            update_s = time.monotonic() - update_started
            failpoint("updated")
            self._step += 1
            self._watch_finite(update, groups)
            self._publish()
            step_s = time.monotonic() - started
            metrics |= update_metrics(update)
            metrics |= {
                "perf/step_s": step_s,
                "perf/tokens_per_s": batch.completion_tokens / step_s,
                "perf/update_s": update_s,
                "perf/flops_per_s": update.flops / update_s,
            }
            if self._peak:
                metrics["perf/mfu"] = update.flops / update_s / (self._peak * world_size())
            self._record(metrics)
            self._record_completions(self._step, groups, arrivals, batch)
            failpoint("recorded")
            due = self._step - self._saved >= self._settings.save_steps
            if due and self._step < self._plan.steps:  # the last one is made when the books are closed
                self._checkpoint()
        self._finish(stopping)

    def _journal(self, groups: list[ScoredGroup], arrivals: Arrivals, wait_s: float) -> dict[str, Any]:
        """Write the batch down and acknowledge it: from here on it is certain to be trained."""
        metrics = group_metrics(groups, arrivals, self._plan.reward_weights)
        metrics["perf/rollout_wait_s"] = wait_s
        step = self._step + 1
        for group in groups:
            self._commit_log.ledger.close(group.group.ticket.id, "trained", f"step {step}")
        self._commit_log.record(
            "batch",
            step=step,
            version=f"{self._folder.incarnation}.{self._step}",
            groups=encode_groups(groups),
            filtered=[encode(verdict) for verdict in self._shown(arrivals)],
            reward_weights=self._plan.reward_weights,
            settings=self._settings.model_dump(mode="json"),
            metrics=metrics,
        )
        return metrics

    def _shown(self, arrivals: Arrivals) -> list[Verdict]:
        """The filtered groups that the record of completions is to show."""
        return arrivals.filtered if self._settings.log_completions else []

    def _record_completions(
        self, step: int, groups: list[ScoredGroup], arrivals: Arrivals, batch: Batch
    ) -> None:
        weights = self._plan.reward_weights
        rows = completion_rows(step, groups, self._shown(arrivals), batch, weights)
        if rows and self._settings.log_completions:
            self._recorder.completions(step, rows)

    def _watch_finite(self, update: Update, groups: list[ScoredGroup]) -> None:
        """Keep a batch whose gradients were not finite; raises NotFinite after too many in a row."""
        if not update.skipped:
            self._bad_steps = 0
            return
        self._bad_steps += 1
        path = self._folder.not_finite / f"{self._step:08d}.msgpack"
        self._folder.write_file("a batch that was not finite", path, pack(encode_groups(groups)))
        log.error("gradients are not finite: the step changed nothing", step=self._step, batch=str(path))
        if self._bad_steps >= self._settings.max_nonfinite_steps:
            raise NotFinite(
                f"the gradients of {self._bad_steps} Updates in a row held NaN or infinity "
                f"(LEARNER_MAX_NONFINITE_STEPS); their groups are in {path.parent}. Look at these, or "
                "lower LEARNER_LEARNING_RATE, before you resume"
            )

    def _publish(self) -> None:
        """Write the present weights as a version and announce it, evaluating it if it is due."""
        version = Version(self._folder.incarnation, self._step)
        weights = write_version(self._folder, self._policy, version, self._parent)
        self._parent = weights.hash
        self._flow.publish(weights, self._step, self._evaluation_due())
        self._note_evaluations()

    def _evaluation_due(self) -> bool:
        every = self._settings.eval_steps
        due = self._step in (0, self._plan.steps) or (every and self._step % every == 0)
        has_questions = bool(self._plan.source.eval_questions)
        return bool(due) and has_questions and self._step not in self._recorder.evaluated_steps()

    def _note_evaluations(self) -> None:
        columns = [question.columns for question in self._plan.source.eval_questions]
        while self._flow.evaluated:
            result = self._flow.evaluated.pop(0)
            metrics = summarise(result.answers, self._settings.main_reward)
            self._recorder.results("eval", {"step": result.version.step, **metrics})
            self._keep_if_best(result.version, metrics)
            self._recorder.evaluation(result, columns, metrics)  # last: what is there is not done again
            shown = {name.removeprefix("eval/"): round(value, 4) for name, value in metrics.items()}
            log.info("evaluation", step=result.version.step, **shown)

    def _keep_if_best(self, version: Version, metrics: dict[str, float]) -> None:
        metric = f"eval/rewards/{self._settings.main_reward}/mean"
        if not self._settings.save_best_model or metric not in metrics:
            return
        answered = int(metrics["eval/questions"] - metrics["eval/unanswered"])
        value = metrics[metric]
        if keep_if_best(self._folder, version, metric, value, answered):
            log.info("the best model so far", step=version.step, **{metric: metrics[metric]})

    def _record(self, metrics: dict[str, Any]) -> None:
        self._recorder.metrics(self._step, metrics)
        self._last = metrics
        log.info(
            f"step {self._step}/{self._plan.steps}",
            reward=round(metrics.get("reward", math.nan), 3),
            staleness=round(metrics.get("sample/staleness_mean", 0.0), 2),
            tokens_per_s=round(metrics["perf/tokens_per_s"]),
            wait_s=round(metrics["perf/rollout_wait_s"], 2),
            groups_in_flight=self._commit_log.ledger.train_open,
        )

    def _checkpoint(self) -> None:
        checkpoint = save_checkpoint(
            self._folder,
            self._policy,
            self._step,
            self._commit_log.position,
            self._commit_log.recorded,
            self._settings,
        )
        self._saved = self._step
        adapter = checkpoint.model / "adapter" / "adapter_model.safetensors"
        extra = {"adapter_bytes": adapter.stat().st_size} if adapter.is_file() else {}
        log.info("checkpoint", step=self._step, folder=str(checkpoint.folder), **extra)

    def _finish(self, stopping: threading.Event) -> None:
        """End the run if its steps are made; leave it ready to be resumed if not."""
        self._flow.finish_evaluation(self._step)
        self._note_evaluations()
        complete = self._step >= self._plan.steps and not stopping.is_set()
        if complete:
            self._flow.close_rest()
        if self._settings.evaluate_only:
            log.info("only evaluated: no checkpoint")
        elif complete or self._saved != self._step:
            self._checkpoint()
        if complete:
            self._flow.release_workers()
            self._recorder.results(
                "train",
                {"step": self._step, "questions": len(self._plan.source.questions), **self._last},
            )
        self._recorder.close()
        log.info("the run is complete" if complete else "stopped; start again to resume",
                 step=self._step)  # fmt: skip
