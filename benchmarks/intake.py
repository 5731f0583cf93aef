"""Measure what it costs the learner to read groups: from the queue server's socket to tensors.

    python -m benchmarks.intake [--groups 64] [--tokens 1024] [--rounds 5] [--json]

A group has 8 completions of --tokens tokens. The product's side reads all groups, decodes and checks
them, compares each with its ticket, forms the batch, and packs rows as tensors. The plain side reads the
same bytes with redis-py and drops them. The rounds alternate. The figure is processor time of this
process, which does not count the server's. The goal is 1.5 times the plain side's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import redis
import torch

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import WorkStream
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import RunSettings
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.guard import guard_children
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Group, Rollout, ScoredGroup, Span, Ticket, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.data.order import Shuffled
from penstock.learner.data.plan import Plan
from penstock.learner.data.questions import Question
from penstock.learner.data.tickets import TicketSource
from penstock.learner.policy.packing import build_row, rows_of_ranks
from penstock.learner.resume import encode_groups
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.ticket_flow import TicketFlow

GOAL = 1.5
GENERATIONS, VOCABULARY = 8, 50_000
_WEIGHTS = "0" * 64
_CHUNK = 64


def make_plan(groups: int, tokens: int, steps: int = 1, max_staleness: int = 0) -> Plan:
    """The plan of a run of `steps` steps of so many groups."""
    settings = LearnerSettings(
        num_generations=GENERATIONS,
        groups_per_step=groups,
        max_completion_length=tokens,
        max_staleness=max_staleness,
    )
    contract = Contract(
        "model", "", "float32", tokens + 64, (RewardSpec("accuracy"),), True,
        groups_per_step=groups, credit=settings.credit,
    )  # fmt: skip
    prompts = np.random.default_rng(1).integers(4, VOCABULARY, (groups, 32)).astype("<i4")
    questions = [
        Question(prompt, {"prompt": f"question {number}", "solution": str(number)}, f"row {number}")
        for number, prompt in enumerate(prompts)
    ]
    source = TicketSource(Shuffled([questions], [], 1, shuffle=True), [], settings, contract.hash)
    return Plan(Path("model"), VOCABULARY, contract, source, steps, {"accuracy": 1.0})


def make_group(ticket: Ticket, tokens: int, draw: np.random.Generator) -> ScoredGroup:
    """A scored answer to a ticket, with random tokens."""
    rollouts = tuple(
        Rollout(
            token_ids=draw.integers(4, VOCABULARY, tokens).astype("<i4"),
            logprobs=-draw.random(tokens, dtype="<f4"),
            mask=np.ones(tokens, dtype=bool),
            spans=(Span(ticket.version, 0, tokens, _WEIGHTS),),
            finish_reason="length",
        )
        for _ in range(GENERATIONS)
    )
    rewards = {"accuracy": tuple(float(number % 2) for number in range(GENERATIONS))}
    return ScoredGroup(Group(ticket, rollouts, "actor"), rewards, ("a text",) * GENERATIONS, "rewarder")


class Learner:
    """A learner without a policy, whose tickets are answered by this program."""

    def __init__(self, connection: Connection, folder: Path, name: str, plan: Plan) -> None:
        self.keys, self.stopping = Keys(name), threading.Event()
        self._connection, self._plan = connection, plan
        queue = LearnerQueue(connection, self.keys, 1)
        journal = Journal(LearnerFolder(folder, 1))
        self._commit_log = CommitLog(Ledger(), journal, queue)
        run = RunSettings(name=name, dir=folder)
        self._flow = TicketFlow(queue, self._commit_log, plan, run, "nonce", self.stopping)
        self._flow.join()
        self._flow.publish(Weights(Version(1, 0), "folder", _WEIGHTS, ""), evaluate=False)
        self._flow.issue_tickets(0)

    def answer(self, tokens: int) -> None:
        """Put a scored group on the stream of outcomes for each ticket."""
        draw = np.random.default_rng(2)
        work = WorkStream(self._connection, self.keys, self.keys.tickets, "worker", 30.0, 3)
        while entries := work.take(_CHUNK):
            for entry in entries:
                group = make_group(decode(entry.payload, Ticket), tokens, draw)
                work.handoff(entry, self.keys.outcomes_for("train"), encode(group))

    def commit(self, step: int) -> None:
        """Read the groups of a step, journal them, end their tickets, and issue those of the next."""
        taken = self._flow.take_groups(step)
        assert taken is not None
        for group in taken.groups:
            self._commit_log.ledger.close(group.group.ticket.id, "trained", f"step {step + 1}")
        self._commit_log.record("batch", step=step + 1, groups=encode_groups(taken.groups))
        self._flow.publish(Weights(Version(1, step + 1), "folder", _WEIGHTS, ""), evaluate=False)
        self._flow.issue_tickets(step + 1)

    def read(self) -> int:
        """Read all groups, form the batch, and pack it; return the number of tokens."""
        taken = self._flow.take_groups(0)
        assert taken is not None
        settings = self._plan.source.settings
        batch = build_batch(taken.groups, self._plan.reward_weights, 0, settings)
        (rows,) = rows_of_ranks(batch.sequences, settings.micro_batch_tokens, ranks=1)
        device = torch.device("cpu")
        packed = [build_row([batch.sequences[index] for index in row], device) for row in rows]
        return sum(len(row.mask_N) for row in packed)


def read_plain(client: redis.Redis, stream: str, groups: int) -> int:
    """Read the stream's entries with redis-py and drop them; return their number."""
    after, found = "-", 0
    while found < groups:
        entries = client.xrange(stream, after, "+", _CHUNK)
        found += len(entries)
        after = f"({entries[-1][0].decode()}"
    return found


def measure(
    server: LocalServer, folder: Path, number: int, groups: int, tokens: int
) -> dict[str, float]:
    """Milliseconds of processor time per group for both sides; the side that begins alternates."""
    socket = urlsplit(server.url)
    found = {}
    with (
        closing(Connection(server.url, 10, 10)) as connection,
        closing(redis.Redis.from_url(f"unix://{socket.path}", username=socket.username,
                                     password=socket.password)) as client,
    ):  # fmt: skip
        learner = Learner(
            connection, folder / f"run-{number}", f"run-{number}", make_plan(groups, tokens)
        )
        learner.answer(tokens)
        for side in ("plain", "learner") if number % 2 else ("learner", "plain"):
            began = time.process_time()
            if side == "plain":
                assert read_plain(client, learner.keys.outcomes_for("train"), groups) == groups
            else:
                assert learner.read() == groups * GENERATIONS * tokens
            found[side] = 1000 * (time.process_time() - began) / groups
    return found


def main() -> int:
    """Measure; return 1 if the median ratio misses the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.intake", description=__doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each completion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    guard_children()
    torch.set_num_threads(1)
    rounds = []
    with tempfile.TemporaryDirectory() as made, LocalServer(Path(made) / "server") as server:
        for number in range(options.rounds + 1):
            rounds.append(measure(server, Path(made), number, options.groups, options.tokens))
    rounds = rounds[1:]  # the first one warms up
    ratios = [row["learner"] / row["plain"] for row in rounds]
    median = statistics.median(ratios)
    if options.json:
        print(json.dumps({"rounds": rounds, "median": median, "goal": GOAL}))
    else:
        for row in rounds:
            print(f"plain {row['plain']:.3f} ms  learner {row['learner']:.3f} ms per group")
        print(f"median {median:.1f} ({min(ratios):.1f} to {max(ratios):.1f}); the goal is {GOAL}")
    return int(median > GOAL)


if __name__ == "__main__":
    sys.exit(main())
