"""Stand-ins for the processes around a rewarder: a learner, an actor, and the rewarder in a thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import BEGINNING, WorkStream
from penstock.common.config.role_command import RewarderCommand
from penstock.common.config.settings import RewarderSettings, RunSettings
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.messages import (
    Group,
    Outcome,
    Purpose,
    Rollout,
    Sampling,
    ScoredGroup,
    Span,
    Ticket,
    Verdict,
    Version,
)
from penstock.common.wire.reward_spec import BUILT_IN, RewardSpec
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.rewarders.loop import run
from tests.helpers import wait_until
from tests.rewarders import bad_rewards

VERSION = Version(1, 0)
END_ID = 0
"""A special token: it is not to appear in any text."""


def make_model_folder(folder: Path) -> Path:
    """A model folder with a tokenizer of one token per ASCII character."""
    vocabulary = {"<end>": END_ID} | {chr(code): code - 31 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def token_ids(text: str) -> np.ndarray:
    """What that tokenizer makes of a text."""
    return np.array([ord(character) - 31 for character in text], "<i4")


def reward(name: str, weight: float = 1.0) -> RewardSpec:
    """A built-in reward, or a function of bad_rewards.py, or a reward that nobody knows."""
    source = Path(bad_rewards.__file__)
    if name not in vars(bad_rewards):
        lengths = {"soft_max_length": 8, "soft_cache_length": 4, "cosine_max_len": 8}
        return RewardSpec(
            name, weight, options={key: lengths[key] for key in BUILT_IN.get(name, ()) if key in lengths}
        )
    return RewardSpec(name, weight, str(source), hashlib.sha256(source.read_bytes()).hexdigest())


def make_contract(folder: Path, rewards: Mapping[str, float]) -> Contract:
    """A contract with these reward weights."""
    return Contract(
        model=str(folder),
        tokenizer_hash=hash_tokenizer(folder),
        dtype="float32",
        tokens_per_sequence=64,
        rewards=tuple(reward(name, weight) for name, weight in rewards.items()),
        filter_zero_std=True,
        groups_per_step=1,
        credit=8,
    )


def make_group(contract: Contract, ticket_id: str, *texts: str, **columns: Any) -> Group:
    """The group of one question, `2+2=`, with these completions."""
    ticket = Ticket(
        id=ticket_id,
        purpose="eval" if ticket_id.startswith("eval:") else "train",
        prompt_ids=token_ids("2+2="),
        num_generations=len(texts),
        sampling=Sampling(1.0, 1.0, 0, 0.0, 16, 7),
        version=VERSION,
        min_step=0,
        contract=contract.hash,
        columns={"prompt": "Q?", "answer": "4", "solution": "4", **columns},
    )
    return Group(ticket, tuple(make_rollout(text) for text in texts), "actor-1")


def make_rollout(text: str) -> Rollout:
    """A completion that ends with the special token."""
    ids = np.append(token_ids(text), np.int32(END_ID)).astype("<i4")
    size = len(ids)
    return Rollout(
        ids,
        np.full(size, -1.0, "<f4"),
        np.ones(size, "|b1"),
        (Span(VERSION, 0, size, "ff" * 32),),
        "stop",
    )


class RunUnderTest:
    """The learner and the actor of a run."""

    def __init__(self, connection: Connection, keys: Keys, contract: Contract) -> None:
        self.keys = keys
        self.contract = contract
        self.queue = LearnerQueue(connection, keys, 1)
        self.connection = connection

    def set_up(self) -> None:
        """Do what the learner does at its start."""
        self.queue.claim("nonce", "learner")
        self.queue.publish_contract(encode(self.contract))
        self.queue.set_state("running")

    def change_contract(self, **changes: Any) -> None:
        """Publish another contract."""
        self.contract = replace(self.contract, **changes)
        self.queue.publish_contract(encode(self.contract))

    def hand_in(self, ticket_id: str, *texts: str, **columns: Any) -> None:
        """Issue a ticket and hand its group in, as an actor does."""
        group = make_group(self.contract, ticket_id, *texts, **columns)
        self.hand_in_bytes(ticket_id, encode(group))

    def hand_in_bytes(self, ticket_id: str, payload: bytes) -> None:
        """Issue a ticket and hand anything in."""
        purpose: Purpose = "eval" if ticket_id.startswith("eval:") else "train"
        self.queue.issue(purpose, [(ticket_id, VERSION, b"")])
        tickets = self.stream(self.keys.tickets_for(purpose), "actor-1")
        (entry,) = tickets.take(1)
        assert tickets.handoff(entry, self.keys.rollouts, payload)

    def stream(self, stream: str, consumer: str, lease_s: float = 60) -> WorkStream:
        """A work stream as one consumer sees it."""
        return WorkStream(self.connection, self.keys, stream, consumer, lease_s, 3)

    def outcomes(self, purpose: Purpose, count: int) -> list[Outcome]:
        """The first `count` outcomes, once they are there."""
        wait_until(
            lambda: len(self.queue.outcomes(purpose, BEGINNING, 100)) >= count,
            f"{count} outcomes for {purpose}",
        )
        entries = self.queue.outcomes(purpose, BEGINNING, 100)
        assert len(entries) == count
        kinds: tuple[Any, ...] = (ScoredGroup, Verdict)
        return [decode(entry.payload, *kinds) for entry in entries]


class RewarderThread:
    """A rewarder in a thread, stopped when the block ends; an error of its own ends the test."""

    def __init__(
        self,
        url: str,
        run_name: str,
        lease_s: float = 30.0,
        timeout_s: float = 10.0,
        workers: int = 1,
        progress_timeout_s: float = 60.0,
        user: str = "nobody",
    ) -> None:
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._settings = RewarderCommand(
            _cli_parse_args=[],
            redis_url=url,
            run=RunSettings(
                name=run_name,
                lease_s=lease_s,
                join_timeout_s=5,
                server_timeout_s=10,
                progress_timeout_s=progress_timeout_s,
            ),
            rewarder=RewarderSettings(workers=workers, timeout_s=timeout_s, memory_gib=2, user=user),
        )
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            run(self._settings, self.stopping)
        except BaseException as error:  # handed to the test's own thread
            self.error = error

    def __enter__(self) -> RewarderThread:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        self.join()
        if kind is None and self.error is not None:
            raise self.error

    def join(self) -> None:
        """Wait for its end."""
        self.thread.join(20)
        assert not self.thread.is_alive(), "the rewarder did not end"
