"""A run as an actor meets it: a learner's side made by hand, and the actor in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from penstock.actors.loop import run
from penstock.actors.weights.source import WeightSource
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings, RunSettings, WeightsFrom
from penstock.common.errors import PenstockError
from penstock.common.files.run_folder import RunFolder
from penstock.common.transfer.model_folder import ModelFetcher
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.ids import Purpose
from penstock.common.wire.messages import Group, Probe, Sampling, Ticket, Verdict, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.actors.talking import save_chat_tokenizer
from tests.fake_engine import FakeEngine
from tests.helpers import wait_until

LEASE_S = 1.0
SAMPLING = Sampling(1.0, 1.0, 0, 0.0, 8, 7)


@dataclass
class Run:
    """The learner's hands: announce versions, issue tickets, look at what came."""

    connection: Connection
    keys: Keys
    folder: Path
    run_folder: RunFolder
    queue: LearnerQueue = field(init=False)
    contract: Contract = field(init=False)

    def __post_init__(self) -> None:
        self.folder.joinpath("tokenizer.json").write_text(json.dumps({"model": "none"}))
        self.contract = Contract(
            str(self.folder), hash_tokenizer(self.folder), "float32", 64,
            (RewardSpec("accuracy"),), True, 4, 8,
        )  # fmt: skip
        self.queue = LearnerQueue(self.connection, self.keys, 1)
        self.queue.claim("nonce", "test")
        self.queue.set_state("running")
        self.queue.publish_contract(encode(self.contract))

    def weight_source(self, way: WeightsFrom = "auto") -> WeightSource:
        """What the actor of this run finds weights with, and a cache beside the run's folder."""
        cache = self.run_folder.path.parent / "cache"
        settings = RunSettings(name="run", cache_dir=cache, allow_file_store=True)
        view = RunView(self.connection, self.keys)
        copy = ModelFetcher(view, settings, threading.Event(), way)
        return WeightSource(self.run_folder, copy, way)

    def announce(
        self,
        step: int,
        wrong: bool = False,
        probes: tuple[Probe, ...] = (),
        adapter: AdapterSpec | None = None,
    ) -> Weights:
        incarnation = self.queue.incarnation
        folder = self.run_folder.version(incarnation, step)
        folder.mkdir(parents=True, exist_ok=True)
        content = f"weights {step}".encode()
        digest = blake3(content).hexdigest()
        weights = Weights(
            Version(incarnation, step), str(folder), digest, "", len(content),
            probes=probes, adapter=adapter,
        )  # fmt: skip
        folder.joinpath(weights.file).write_bytes(b"other bytes" if wrong else content)
        return self.queue.announce(weights)

    def ticket(self, number: int, **changes: object) -> Ticket:
        values: dict[str, object] = {
            "id": f"train:{number}", "purpose": "train",
            "prompt_ids": np.array([1, 4, 5], dtype="<i4"), "num_generations": 4,
            "sampling": SAMPLING, "version": Version(1, changes.get("min_step", 0)), "min_step": 0,
            "contract": self.contract.hash, "columns": {"solution": "5"},
        }  # fmt: skip
        return Ticket(**(values | changes))  # type: ignore[arg-type]

    def eval_ticket(self, number: int, step: int) -> Ticket:
        version = Version(1, step)
        name = f"eval:{version}:{number}"
        return self.ticket(number, id=name, purpose="eval", version=version, num_generations=1)

    def issue(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            item = (ticket.id, ticket.version, encode(ticket))
            self.queue.issue(ticket.purpose, [item])

    def groups(self) -> dict[str, Group]:
        """The groups on `rollouts` by ticket; two of one ticket fail the test."""
        found = self._entries(self.keys.rollouts)
        assert len({name for name, _ in found}) == len(found), found
        return {name: decode(data, Group) for name, data in found}

    def verdicts(self) -> dict[str, Verdict]:
        return {name: decode(data, Verdict) for name, data in self._entries(self.keys.scored)}

    def _entries(self, stream: str) -> list[tuple[str, bytes]]:
        entries = self.connection.execute("XRANGE", stream, "-", "+")
        return [(fields[b"t"].decode(), fields[b"d"]) for _, fields in entries]

    def waiting(self) -> list[dict[bytes, bytes]]:
        """The fields of each entry on the stream of tickets that no actor holds."""
        if self.pending():
            return []
        return [fields for _, fields in self.connection.execute("XRANGE", self.keys.tickets, "-", "+")]

    def stream(self, consumer: str, lease_s: float = LEASE_S) -> WorkStream:
        """The ticket stream as another actor sees it."""
        return WorkStream(self.connection, self.keys, self.keys.tickets, consumer, lease_s, 3)

    def pending(self, purpose: Purpose = "train") -> int:
        stream = self.keys.tickets_for(purpose)
        return int(self.connection.execute("XPENDING", stream, "workers")["pending"])


class ActorThread:
    """The actor's loop in a thread; `error` is what ended it."""

    def __init__(
        self,
        url: str,
        run_name: str,
        folder: Path,
        engine: FakeEngine,
        join_timeout_s: float = 5.0,
        stall_timeout_s: float = 60.0,
        progress_timeout_s: float = 60.0,
        **actor: float,
    ) -> None:
        self.engine = engine
        self.stopping = threading.Event()
        self.error: PenstockError | None = None
        self._settings = ActorCommand(
            redis_url=url,
            run=RunSettings(
                name=run_name,
                dir=folder,
                lease_s=LEASE_S,
                join_timeout_s=join_timeout_s,
                progress_timeout_s=progress_timeout_s,
            ),
            actor=ActorSettings(**{"stall_timeout_s": stall_timeout_s, "grace_s": 20.0} | actor),
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            run(self._settings, self.stopping, lambda *_: self.engine)
        except PenstockError as error:
            self.error = error

    def wait(self) -> None:
        wait_until(lambda: not self.thread.is_alive(), "the actor's end")

    def stop(self) -> None:
        self.stopping.set()
        self.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chat")
    save_chat_tokenizer(made)
    return made


@pytest.fixture
def a_run(connection: Connection, keys: Keys, tmp_path: Path, run_name: str) -> Run:
    """A run that a learner has set up."""
    return Run(connection, keys, tmp_path, RunFolder(tmp_path / run_name))


@pytest.fixture
def start_actor(
    queue_server: LocalServer, run_name: str, tmp_path: Path
) -> Iterator[Callable[..., ActorThread]]:
    """Start actors with fake engines; what still runs at the end of the test is stopped."""
    actors: list[ActorThread] = []

    def start(engine: FakeEngine | None = None, **settings: float) -> ActorThread:
        actors.append(
            ActorThread(queue_server.url, run_name, tmp_path, engine or FakeEngine(), **settings)
        )
        return actors[-1]

    yield start
    for actor in actors:
        actor.stop()
