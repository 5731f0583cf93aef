"""The whole learner on a real queue server, with a policy that learns nothing and a worker."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

from blake3 import blake3
from pyarrow import parquet

from penstock.common.broker.connection import Connection
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.config.settings import RunSettings
from penstock.common.errors import PenstockError
from penstock.common.files.disk import Disk
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.phases import Phases
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import Ticket, Verdict
from penstock.learner.loop import Learner
from penstock.learner.policy.collective import Form
from penstock.learner.policy.update import TokenRecord, Update
from penstock.learner.state.checkpoint import newest_checkpoint, newest_position
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.judge import judge
from tests.learner.builders import claim_next, make_group, make_plan, make_settings, newest_of_next

WEIGHTS_HASH = blake3(b"weights").hexdigest()
"""Of each version that FakePolicy exports."""


class Killed(BaseException):
    """What kill -9 is in a test."""


class FakePolicy:
    """Counts its Updates, and dies in the one that is asked for."""

    def __init__(self, dies_in: int | None = None, skips: tuple[int, ...] = ()):
        self.dies_in, self.skips, self.updates = dies_in, skips, 0

    def update(self, _batch, _step):
        if self.dies_in == self.updates:
            raise Killed
        self.updates += 1
        skipped = int(self.updates in self.skips)
        return Update(0.0, 0.0, 0.0, 1, skipped, 1.0, TokenRecord.join([]))

    def export(self, folder: Path, form: Form = "checkpoint"):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("weights")

    def save(self, folder: Path):
        folder.mkdir()

    def load(self, folder: Path):
        assert folder.is_dir()


class Worker(threading.Thread):
    """Answers every ticket at once, until it is told to leave.

    Every `filtered`-th group has no spread.
    """

    def __init__(self, url: str, keys):
        super().__init__(daemon=True)
        self.filtered = 0
        self.connection, self.keys = Connection(url, 5, 5), keys
        self.leaving = threading.Event()

    def run(self):
        while not self.leaving.wait(0.005):
            for stream in (self.keys.eval_tickets, self.keys.tickets):
                self.answer(WorkStream(self.connection, self.keys, stream, "w", 30.0, 3))

    def answer(self, work: WorkStream):
        try:
            entries = work.take(50)
        except PenstockError:  # no learner has set the run up yet
            return
        for entry in entries:
            ticket = decode(entry.payload, Ticket)
            if ticket.purpose == "train" and self.has_no_spread(ticket.id):
                verdict = Verdict(ticket.id, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (1, 1))
                work.handoff(entry, self.keys.scored, encode(verdict))
                continue
            rewards = (1.0,) if ticket.purpose == "eval" else (1.0, 0.0)
            scored = make_group(ticket, rewards=rewards, digest=WEIGHTS_HASH)
            work.handoff(entry, self.keys.outcomes_for(ticket.purpose), encode(scored))

    def has_no_spread(self, ticket: str) -> bool:
        return bool(self.filtered) and int(ticket.partition(":")[2]) % self.filtered == 0


class Run:
    """A run's folder and its server's keys; `start` is one incarnation of the learner."""

    def __init__(self, folder: Path, connection, keys, worker: Worker | None = None):
        self.folder, self.connection, self.keys, self.worker = folder, connection, keys, worker
        folder.mkdir()
        self.run_folder = RunFolder(folder)

    def start(
        self,
        steps: int,
        dies_in: int | None = None,
        skips: tuple[int, ...] = (),
        policy: FakePolicy | None = None,
        stopping: threading.Event | None = None,
        disk_timeout_s: float = 600,
        **settings,
    ):
        made = make_settings(**settings)
        plan = make_plan(made, steps=steps, eval_questions=2)
        run = RunSettings(
            name=self.folder.name, dir=self.folder.parent, progress_timeout_s=10,
            disk_timeout_s=disk_timeout_s,
        )  # fmt: skip
        known = RunView(self.connection, self.keys).incarnation()
        claim = claim_next(self.folder, newest_position(self.run_folder), known)
        queue = LearnerQueue(self.connection, self.keys, claim.incarnation)
        queue.claim("nonce", "test")
        command = SimpleNamespace(learner=made, run=run)
        policy, stopping = policy or FakePolicy(dies_in, skips), stopping or threading.Event()
        folder = LearnerFolder(self.folder, claim.incarnation, Disk(disk_timeout_s, stopping))
        checkpoint = newest_checkpoint(folder, claim)
        Learner(
            command, plan, folder, claim, policy, checkpoint, queue, "nonce", stopping, Phases()
        ).train()

    def newest_checkpoint(self):
        """What the learner that starts next finds."""
        return newest_of_next(self.folder)

    def evaluated(self) -> list[int]:
        rows = (self.folder / "evaluations.jsonl").read_text().splitlines()
        return sorted({json.loads(row)["step"] for row in rows})

    def sampled(self) -> list[tuple[int, str, str]]:
        """Step, ticket and state of all that is in the tables of completions."""
        return [
            (row["step"], row["ticket"], row["state"])
            for path in sorted((self.folder / "completions").iterdir())
            for row in parquet.read_table(path).to_pylist()
        ]

    def check(self):
        assert judge(self.folder)["faults"] == []
        totals, places, _ = RunView(self.connection, self.keys).audit()
        assert not places
        assert totals["issued"] == sum(totals.values()) - totals["issued"]
