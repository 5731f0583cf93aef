"""A run's folder as two incarnations of the learner leave it, written by the learner's own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Position, next_claim
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Verdict, Version
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import encode_groups, retrain_tail
from penstock.learner.state.best_model import keep_if_best
from penstock.learner.state.checkpoint import (
    check_loadable,
    newest_checkpoint,
    newest_position,
    save_checkpoint,
)
from penstock.learner.state.fingerprint import this_machine
from penstock.learner.state.incarnations import read_nonce
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.state.versions import write_version
from penstock.learner.streams.evaluation import Answer, Evaluated
from tests.crashes.policy import HashPolicy
from tests.fuzz.valid import WEIGHTS, Issued, scored
from tests.learner.builders import claim_next


class WrittenRun:
    """The folder, and what a resume makes of it: the policy's weights by step."""

    def __init__(self, folder: Path, issued: Issued) -> None:
        self.folder = folder
        self.issued = issued
        self.weights = {0: ""}
        self._policy, self._ledger = HashPolicy(), Ledger()
        self._answer = scored(issued.train)
        for incarnation, steps in ((1, (1, 2)), (2, (3, 4))):
            self._live(incarnation, steps)

    def _live(self, incarnation: int, steps: tuple[int, ...]) -> None:
        """Write what an incarnation writes that makes these steps."""
        claim_next(self.folder, newest_position(RunFolder(self.folder)))
        folder = LearnerFolder(self.folder, incarnation)
        read_nonce(folder)
        recorder, journal = Recorder(folder, [], "x"), Journal(folder, segment_bytes=3_000)
        settings = self.issued.settings.model_dump(mode="json")
        header = {"machine": this_machine(), "settings": settings, "contract": self.issued.contract.hash}
        self._record(
            journal,
            "header",
            incarnation=incarnation,
            step=steps[0] - 1,
            steps=9,
            model_folder="m",
            **header,
        )
        version = Version(incarnation, steps[0] - 1)
        write_version(folder, self._policy, version, "")
        keep_if_best(folder, version, "eval/rewards/accuracy/mean", 0.1 * incarnation, 1)
        self._record(
            journal, "evaluated", version=str(version), results=[[0, ["1"], [{"accuracy": 1.0}]]]
        )
        answer = Answer(0, ("1",), ("1",), ({"accuracy": 1.0},), (1,), ("stop",))
        recorder.evaluation(Evaluated(version, (answer,)), [self.issued.eval.columns], {})
        for step in steps:
            position = self._step(folder, journal, recorder, step)
        save_checkpoint(
            folder, self._policy, steps[-1], position, self._ledger.snapshot(), self.issued.settings
        )
        if incarnation == 2:
            self._step(folder, journal, recorder, steps[-1] + 1)
        recorder.results("eval", {"step": 1, "eval/avg@1": 0.5})

    def _step(self, folder: LearnerFolder, journal: Journal, recorder: Recorder, step: int) -> Position:
        ticket = self._ledger.next_train_ticket()
        self._ledger.opened(ticket, Version(folder.incarnation, step - 1))
        self._ledger.close(ticket, "trained")
        filtered = [
            Verdict(
                TicketId("train:9"),
                "filtered",
                "no spread",
                {"accuracy": (0.0,), "format": (0.0,)},
                (3,),
            )
        ]
        batch = build_batch([self._answer], WEIGHTS, step - 1, self.issued.settings)
        position = self._record(
            journal, "batch", step=step, version=f"{folder.incarnation}.{step - 1}",
            groups=encode_groups([self._answer]), filtered=[encode(one) for one in filtered],
            reward_weights=WEIGHTS, settings=self.issued.settings.model_dump(mode="json"),
            metrics={"reward": 0.5},
        )  # fmt: skip
        self._policy.update(batch, step - 1)
        self.weights[step] = self._policy.weights
        recorder.metrics(step, {"reward": 0.5})
        recorder.completions(
            step, lambda: completion_rows(step, [self._answer], filtered, batch, WEIGHTS)
        )
        return position

    def _record(self, journal: Journal, kind: str, **fields: Any) -> Position:
        ends = self._ledger.take_unrecorded()
        return journal.append(kind, **fields, ends=ends, ledger=self._ledger.snapshot())


def resume(folder: Path, issued: Issued) -> tuple[int, str]:
    """Read a run's folder as the next learner does; return the step and the policy's weights."""
    run_folder = RunFolder(folder)
    checkpointed = newest_position(run_folder)
    number = run_folder.newest_incarnation() + 1
    claim = next_claim(run_folder, number, "fuzz", checkpointed)
    checkpoint = newest_checkpoint(LearnerFolder(folder, number), claim)
    if checkpoint:
        check_loadable(checkpoint, issued.settings)
    policy, ledger = HashPolicy(), Ledger()
    recorder = Recorder(LearnerFolder(folder, number), [], "x")
    past = retrain_tail(run_folder, claim, policy, ledger, recorder, checkpoint)
    json.dumps(ledger.snapshot())
    ledger.opened(ledger.next_train_ticket(), Version(number, past.step))
    recorder.evaluated_steps()
    return past.step, policy.weights
