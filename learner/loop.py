"""The learner's loop: take groups, journal them, train, publish the new weights."""

import math
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

from penstock.common.broker.costs import FleetCosts
from penstock.common.config.role_command import LearnerCommand
from penstock.common.errors import NoSignal, NotFinite
from penstock.common.failpoint import failpoint
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.journal.claims import Claim
from penstock.common.log import get_logger
from penstock.common.phases import WAITING_FOR_GROUPS, Phases, costs_by_name
from penstock.common.wire.codec import encode, pack
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import ScoredGroup, Verdict, Weights
from penstock.learner.algorithm.batch import Batch, build_batch
from penstock.learner.data.plan import Plan
from penstock.learner.lending import DeviceLender
from penstock.learner.policy.collective import UPDATE, TrainablePolicy
from penstock.learner.policy.flops import peak_flops
from penstock.learner.policy.processes import world_size
from penstock.learner.policy.update import Update
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.eval_metrics import judge, summarise
from penstock.learner.report.hub import make_hub
from penstock.learner.report.metrics import (
    check_agreement,
    describe_shares,
    group_metrics,
    update_metrics,
)
from penstock.learner.report.model_card import model_card
from penstock.learner.report.progress_writer import ProgressWriter
from penstock.learner.report.recorder import Recorder
from penstock.learner.report.small_batches import SmallBatches
from penstock.learner.resume import encode_groups, retrain_tail
from penstock.learner.state.best_model import keep_if_best
from penstock.learner.state.checkpoint import Checkpoint, save_checkpoint
from penstock.learner.state.fingerprint import this_machine
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.state.versions import write_version
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.ticket_flow import TakenGroups, TicketFlow

log = get_logger(__name__)


class Learner:
    """One incarnation of the learner, from the step it resumes at to the end of the run.

    `folder` and `queue` are the run's folder and queue server, both claimed for this incarnation:
    `claim` states how much of the journal counts, and `nonce` is the folder's random text on the server.
    `policy` has the initial weights, or those of a `checkpoint` without optimizer state; `checkpoint`
    None: the run has none. When `stopping` is set, the loop ends at its next wait. `phases` is told what
    the learner does. `lender` has the device, which actors may use during a wait; None: it is
    the learner's own.
    Creating a learner retrains the batches that the journal has after the checkpoint, ends open
    evaluation tickets as stale, writes the journal's header, and restores on the queue server what it
    lacks. Raise ConfigError if the journal is damaged, a tracker does not start or the hub refuses the
    token, DiskFull, RunTaken, ServerUnavailable, or DataError for streamed rows.
    """

    def __init__(
        self,
        command: LearnerCommand,
        plan: Plan,
        folder: LearnerFolder,
        claim: Claim,
        policy: TrainablePolicy,
        checkpoint: Checkpoint | None,
        queue: LearnerQueue,
        nonce: str,
        stopping: threading.Event,
        phases: Phases,
        lender: DeviceLender | None = None,
    ) -> None:
        self._settings = settings = command.learner
        self._plan, self._folder, self._policy = plan, folder, policy
        self._stopping, self._phases, self._peak = stopping, phases, peak_flops(settings.peak_tflops)
        self._announced = Weights(Version(0, 0), "", "", "")  # the newest announcement; empty at first
        self._last: dict[str, Any] = {}  # metrics of the newest step that this process made
        self._spent: Counter[str] = Counter()  # seconds by phase, of all steps of this process
        self._small_batches = SmallBatches(settings.groups_per_step)
        self._hub = make_hub(settings, folder.uploads)
        self._recorder = Recorder(
            folder, settings.report_to, command.run.name, settings.model_dump(mode="json")
        )
        self._tables = ThreadPoolExecutor(1, "completions")
        self._table: tuple[int, Future[Any]] | None = None  # a step, and its table that is being made
        ledger = Ledger()
        past = retrain_tail(folder, claim, policy, ledger, self._recorder, checkpoint)
        self._step, self._bad_steps = past.step, past.bad_steps
        self._saved = checkpoint.step if checkpoint else 0  # of the newest checkpoint
        segment_bytes = round(settings.journal_segment_mib * 2**20)
        self._queue, self._commit_log = queue, CommitLog(ledger, Journal(folder, segment_bytes), queue)
        for ticket in ledger.eval_open():  # this incarnation asks again, with tickets of its own
            ledger.close(ticket, "stale", "the learner that asked was restarted")
        self._commit_log.record(
            "header", incarnation=folder.incarnation, step=self._step, steps=plan.steps,
            model_folder=str(plan.model_folder), contract=plan.contract.hash, machine=this_machine(),
            settings=settings.model_dump(mode="json"),
        )  # fmt: skip
        self._flow = TicketFlow(
            queue, self._commit_log, plan, command.run, nonce, stopping, phases,
            partial(lender.lending, policy) if lender else nullcontext,
        )  # fmt: skip
        self._flow.join()
        self._costs = FleetCosts(queue.connection, queue.keys.costs)
        self._progress = ProgressWriter(queue, self._step, plan.steps, settings.groups_per_step)

    def train(self) -> None:
        """Publish the weights, make the steps that are left, then end the run or leave it to a resume.

        Waits for: groups_per_step scored groups; all answers of a running evaluation.
        Unblocked by: rewarders, which put outcomes on the streams that the learner reads.
        Produces: per step a journal record, an Update, published weights, a line in metrics.jsonl; every
        save_steps steps and at the end a checkpoint.
        Ends when: the steps of the plan are made, or the learner is asked to stop.

        Raise DeadlineExceeded after RUN_PROGRESS_TIMEOUT_S without an outcome, NoSignal for too many
        groups with nothing to learn, NotFinite for NaN or infinity, DiskFull, RunTaken if superseded,
        RunNotReady, ServerUnavailable, MalformedMessage, ConfigError for the server or a claim's file,
        DataError for streamed rows.
        """
        self._publish()
        what = f"Training from step {self._step} to {self._plan.steps}"
        log.info("Evaluating." if self._settings.evaluate_only else f"{what}.")
        if self._step >= self._plan.steps > 0:
            log.warning(
                f"All {self._plan.steps} steps were made by an earlier start: nothing is trained now. "
                "For more raise LEARNER_MAX_STEPS or LEARNER_NUM_TRAIN_EPOCHS, for a new run choose "
                "another RUN_NAME."
            )
        while self._step < self._plan.steps:
            self._phases.begin_step()
            taken = self._take_groups()  # wait: within max_staleness, with signal, oldest first
            if taken is None:  # asked to stop
                break
            with self._phases.enter("journalling groups"):
                metrics = self._journal(taken)  # write, sync; then acknowledge on the queue server
            with self._phases.enter("building the batch"):
                batch = build_batch(taken.groups, self._plan.reward_weights, self._step, self._settings)
            update = self._update(batch, taken.groups)  # log-probabilities, loss, optimizer steps
            with self._phases.enter("publishing weights"):
                self._publish()  # write aside, hash, rename, announce; maybe evaluate
            with self._phases.enter("recording the step"):
                self._record(taken, batch, update, metrics)  # metrics, completions, log line
            self._checkpoint_if_due()
        self._finish()

    def _take_groups(self) -> TakenGroups | None:
        """Wait for the next batch's groups and return them, None when asked to stop.

        Issue tickets meanwhile, and record the evaluations that ended. Raise NoSignal if too many groups
        had nothing to learn; before, with LEARNER_LOG_COMPLETIONS on, the filtered ones (equal rewards)
        are written to the table of completions of the step to come. Raise DeadlineExceeded after
        RUN_PROGRESS_TIMEOUT_S without any outcome, ConfigError for a damaged best.json, RunTaken,
        DiskFull, ServerUnavailable, DataError for streamed rows.
        """
        try:
            taken = self._flow.take_groups(self._step)
        except NoSignal as error:
            self._record_completions(self._step + 1, [], error.filtered, Batch(()))
            self._write_table()
            raise
        self._record_evaluations()
        self._write_table()  # that of the last step, which was made during the wait
        return taken

    def _journal(self, taken: TakenGroups) -> dict[str, Any]:
        """Commit the groups as the batch of the next step, and return metrics of them by name.

        Their tickets end as trained, the journal gets a synced record, then the queue server's entries
        are acknowledged. From here on a resume retrains the batch. The metrics are of rewards, lengths
        and outcomes, with perf/rollout_wait_s, the seconds waited for groups. Raise DiskFull, RunTaken,
        or ServerUnavailable.
        """
        metrics = group_metrics(taken.groups, taken.arrivals, self._plan.reward_weights)
        metrics["perf/rollout_wait_s"] = self._phases.seconds(WAITING_FOR_GROUPS)
        step = self._step + 1
        for group in taken.groups:
            self._commit_log.ledger.close(group.group.ticket.id, "trained", f"step {step}")
        filtered = taken.arrivals.filtered if self._settings.log_completions else []
        self._commit_log.record(
            "batch",
            step=step,
            version=f"{self._folder.incarnation}.{self._step}",
            groups=encode_groups(taken.groups),
            filtered=[encode(verdict) for verdict in filtered],
            reward_weights=self._plan.reward_weights,
            settings=self._settings.model_dump(mode="json"),
            metrics=metrics,
        )
        return metrics

    def _update(self, batch: Batch, groups: list[ScoredGroup]) -> Update:
        """Train on `batch`, which was made of `groups`, count the step, and return the Update.

        Outcomes are read meanwhile. If an optimizer step was skipped for a gradient with NaN or
        infinity, store and log `groups`. Raise NotFinite if LEARNER_MAX_NONFINITE_STEPS Updates in a row
        had such a step, DiskFull or RunTaken if the groups cannot be stored, RuntimeError if another
        rank is lost, ConfigError if the memory is not enough, RunTaken if the outcomes are another
        learner's by now, Disagreement if the engine's log-probabilities are not the trainer's.
        """
        with self._phases.enter(UPDATE), self._flow.reading_ahead(self._step):
            update = self._policy.update(batch, self._step)
        failpoint("updated")
        self._step += 1
        self._bad_steps = self._bad_steps + 1 if update.skipped else 0
        if update.skipped:
            self._report_not_finite(groups)
        check_agreement(update, self._settings)
        return update

    def _report_not_finite(self, groups: list[ScoredGroup]) -> None:
        """Write `groups`, the batch of the present step, to not_finite/STEP.msgpack, and log an error.

        Raise NotFinite if this Update is the LEARNER_MAX_NONFINITE_STEPS-th in a row whose gradient held
        NaN or infinity. Raise DiskFull or RunTaken if the file cannot be written.
        """
        path = self._folder.not_finite / f"{self._step:08d}.msgpack"
        self._folder.write_file(path, pack(encode_groups(groups)))
        log.error(f"Step {self._step} skipped an optimizer step: gradient not finite.", groups=str(path))
        if self._bad_steps >= self._settings.max_nonfinite_steps:
            raise NotFinite(
                f"the gradients of {self._bad_steps} Updates in a row held NaN or infinity, expected "
                f"finite numbers (LEARNER_MAX_NONFINITE_STEPS); their groups are in {path.parent}. Look "
                "at these, or lower LEARNER_LEARNING_RATE, before you resume"
            )

    def _record_completions(
        self, step: int, groups: list[ScoredGroup], filtered: Sequence[Verdict], batch: Batch
    ) -> None:
        """Begin to make the step's table of completions, in a thread, if LEARNER_LOG_COMPLETIONS is on.

        The rows are the rollouts of the trained `groups`, with their advantages from `batch`, and one of
        each of `filtered`, groups with equal rewards. A table that cannot be made is logged and left
        out. `_write_table` writes the table. Raise its errors for the table before.
        """
        self._write_table()
        if self._settings.log_completions:
            weights = self._plan.reward_weights
            make_rows = partial(completion_rows, step, groups, filtered, batch, weights)
            self._table = step, self._tables.submit(self._recorder.make_table, step, make_rows)

    def _write_table(self) -> None:
        """Wait for the table that is being made, if there is one; write it, also to the trackers.

        This comes before a checkpoint, because a resume makes only the tables of later steps again, and
        before later metrics. Raise RunTaken if superseded, DiskFull.
        """
        if self._table:
            step, making = self._table
            self._table = None
            self._recorder.write_table(step, making.result())

    def _publish(self) -> None:
        """Write the weights as a version, announce it to the actors, and start its evaluation if due.

        Before the announcement the version's hash is journalled, and a running evaluation is waited for.
        Ended evaluations are recorded. Versions that nobody needs are deleted. Raise NotFinite if a
        weight holds NaN or infinity, DeadlineExceeded after RUN_PROGRESS_TIMEOUT_S without an answer,
        DiskFull, RunTaken, ServerUnavailable, DataError if an evaluation's ticket is too large, or
        ConfigError for a damaged best.json.
        """
        version = Version(self._folder.incarnation, self._step)
        due = self._evaluation_due()
        weights = write_version(
            self._folder, self._policy, version, self._announced.hash, self._plan.probe_texts,
            self._plan.contract.adapter, with_model=due and self._settings.save_best_model,
            being_fetched=self._queue.being_fetched,
        )  # fmt: skip
        self._announced = self._flow.publish(weights, due)
        self._record_evaluations()

    def _evaluation_due(self) -> bool:
        """Return whether the present step's version is to be evaluated, and its answers are not on disk.

        Due are step 0, the last step, and with eval_steps 5 also 5, 10, 15. Nothing is due without
        held-out questions.
        """
        every = self._settings.eval_steps
        ends = self._step == 0 or self._step >= self._plan.steps
        due = ends or (every > 0 and self._step % every == 0)
        asked = due and len(self._plan.source.eval_questions) > 0
        return asked and self._step not in self._recorder.evaluated_steps()

    def _record_evaluations(self) -> None:
        """Write, track and log each evaluation that ended since the last call; keep the best model.

        In this order eval_results.json is replaced, with save_best_model the model is copied if it is
        the best, and the answers are appended to evaluations.jsonl. Raise RunTaken, DiskFull, or
        ConfigError for a damaged best.json.
        """
        columns = [question.columns for question in self._plan.source.eval_questions]
        for result in self._flow.evaluator.take_ended():
            self._write_table()
            by = (self._settings.main_reward, self._settings.right_from)
            metrics = summarise(result.answers, *by)
            self._recorder.results("eval", {"step": result.version.step, **metrics})
            self._keep_if_best(result.version, metrics)
            # Last: a version whose answers are on disk is not evaluated again after a crash.
            right = [judge(answer, *by) for answer in result.answers]
            self._recorder.evaluation(result, columns, metrics, right)
            if (name := f"eval/rewards/{self._settings.main_reward}/mean") in metrics:
                self._progress.evaluated(result.version.step, metrics[name])
            figures = [f"{name[5:]} {value:.3f}" for name, value in metrics.items() if "@" in name]
            missing = f"{metrics['eval/unanswered']:.0f} of {metrics['eval/questions']:.0f} unanswered"
            log.info(f"Evaluated step {result.version.step}: {', '.join([*figures, missing])}.")

    def _keep_if_best(self, version: Version, metrics: dict[str, float]) -> None:
        """With LEARNER_SAVE_BEST_MODEL copy and log the model of `version` if it is the best so far.

        The copy, in best/, replaces the best model before. The best has the largest mean of the main
        reward in `metrics`, those of its evaluation, with no fewer answered questions than the best
        before. Without this mean nothing is done. Raise RunTaken, DiskFull, or ConfigError for a damaged
        best.json.
        """
        name = f"eval/rewards/{self._settings.main_reward}/mean"
        if self._settings.evaluate_only or not self._settings.save_best_model or name not in metrics:
            return
        answered = int(metrics["eval/questions"] - metrics["eval/unanswered"])
        if keep_if_best(self._folder, version, name, metrics[name], answered):
            log.info(f"Step {version.step} has the best model so far: {name} {metrics[name]:.3f}.")

    def _record(self, taken: TakenGroups, batch: Batch, update: Update, metrics: dict[str, Any]) -> None:
        """Write the metrics and completions of the step that was made, and log the step.

        `metrics` are those of the groups in `taken`; the values of `update`, and times and rates
        (perf/..), are added to this dictionary, which is kept for model cards and the run's results.
        Among them are the seconds of each phase since the step before was recorded, also those of actors
        and rewarders. Trackers get both. Raise RunTaken, DiskFull, ServerUnavailable or another error of
        Connection.execute.
        """
        step_s, update_s = self._phases.step_s, self._phases.seconds(UPDATE)
        metrics |= update_metrics(update) | {
            "perf/step_s": step_s,
            "perf/tokens_per_s": batch.completion_tokens / step_s,
            "perf/update_s": update_s,
            "perf/version_bytes": self._announced.size,
            "perf/delta_bytes": self._announced.delta_bytes,
            "perf/flops_per_s": update.flops / update_s,
        }
        profile = self._phases.take_profile()
        costs = costs_by_name("learner", profile) | self._costs.take()
        metrics |= {f"perf/{name}": seconds for name, seconds in costs.items()}
        self._spent.update({name: cost.seconds for name, cost in profile.items()})
        if self._peak:
            metrics["perf/mfu"] = update.flops / update_s / (self._peak * world_size())
        self._write_table()
        self._recorder.metrics(self._step, metrics)
        self._last = metrics
        reward, staleness = metrics.get("reward", math.nan), metrics.get("sample/staleness_mean", 0.0)
        waited_s = metrics["perf/rollout_wait_s"]
        self._small_batches.add(len(taken.groups), taken.arrivals)
        log.info(
            f"Step {self._step}/{self._plan.steps}: reward {reward:.3f}, staleness {staleness:.2f}, "
            f"{metrics['perf/tokens_per_s']:.0f} tokens/s, waited {waited_s:.1f} s"
            f"{self._small_batches.describe()}."
        )
        self._small_batches.warn()
        self._progress.made_step(self._step, len(taken.groups), metrics)
        self._record_completions(self._step, taken.groups, taken.arrivals.filtered, batch)
        failpoint("recorded")

    def _checkpoint_if_due(self) -> None:
        """Write a checkpoint if save_steps steps were made since the newest one; else do nothing.

        After the last step nothing is written here. Raise NotFinite if a weight holds NaN or infinity,
        RunTaken, DiskFull, or ConfigError for a damaged claim.
        """
        if self._step - self._saved >= self._settings.save_steps and self._step < self._plan.steps:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Write and log a checkpoint of the present step, and delete those over save_total_limit.

        With a hub its model is uploaded in the background, as LEARNER_HUB_STRATEGY says. Raise NotFinite
        if a weight holds NaN or infinity, RunTaken, DiskFull, or ConfigError for a damaged claim.
        """
        self._write_table()
        position, recorded = self._commit_log.position, self._commit_log.recorded
        checkpoint = save_checkpoint(
            self._folder, self._policy, self._step, position, recorded, self._settings,
            model_card(self._settings, self._step, self._last),
        )  # fmt: skip
        self._saved = self._step
        ended = self._step >= self._plan.steps
        try:
            self._folder.link(self._folder.latest, checkpoint.model)
            self._folder.link(self._folder.final, checkpoint.model if ended else None)
        except OSError as error:  # the links are for people alone
            log.warning(f"The links `latest` and `final` could not be made: {error}.")
        if self._hub:
            self._hub.saved(checkpoint.model, self._step, ended)
        adapter = checkpoint.model / "adapter" / "adapter_model.safetensors"
        size = f" (adapter: {adapter.stat().st_size} bytes)" if adapter.is_file() else ""
        log.info(f"Checkpoint of step {self._step} written to {checkpoint.folder.name}{size}.")

    def _finish(self) -> None:
        """End the run if all steps are made and no stop was asked for; else leave it ready to resume.

        In both cases wait for a running evaluation (unless asked to stop) and the hub's upload, write a
        checkpoint unless evaluate_only is set or a stopped run has nothing new, close the trackers, and
        log the steps made and where their time went. At the run's end also close open tickets as unused,
        set the run's state to "ended", at which actors and rewarders leave, and write
        train_results.json. Raise DeadlineExceeded if the evaluation gets no answer, NotFinite, DiskFull,
        RunTaken, ServerUnavailable, or ConfigError for a damaged claim or best.json.
        """
        self._write_table()
        self._flow.finish_evaluation()
        self._record_evaluations()
        complete = self._step >= self._plan.steps and not self._stopping.is_set()
        if complete:
            self._flow.close_rest()
        if self._settings.evaluate_only:
            log.info("Only evaluated: no checkpoint is written.")
        elif complete or self._saved != self._step:
            self._checkpoint()
        self._flow.evaluator.keep()  # if the stop cut it off: a resume reads on from the checkpoint
        if complete:
            self._flow.release_workers()
            questions = len(self._plan.source.questions)
            self._recorder.results("train", {"step": self._step, "questions": questions, **self._last})
        if self._hub:
            self._hub.finish()
        self._recorder.close()
        if self._spent:
            log.info(f"The learner's time: {describe_shares(self._spent)}.")
        ending = "The run is complete" if complete else "Stopped; start again to resume"
        made = "" if self._settings.evaluate_only else f": {self._step} of {self._plan.steps} steps made"
        log.info(f"{ending}{made}.")
