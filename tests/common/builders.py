"""Valid messages to take apart, and a run on a real server to play through."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.wire.messages import (
    Delta,
    Group,
    PartialGroup,
    Rollout,
    Sampling,
    ScoredGroup,
    Span,
    Ticket,
    TicketId,
    Verdict,
    Version,
    Weights,
    WeightsFile,
    hash_of_shards,
    shard_names,
)
from penstock.learner.streams.learner_queue import LearnerQueue

V0 = Version(1, 0)


def weights_hash(version: Version) -> str:
    """The hash that the tests' weights of a version have."""
    return hashlib.sha256(str(version).encode()).hexdigest()


def make_span(version: Version, start: int, end: int, digest: str = "") -> Span:
    """A span sampled by the tests' weights of a version, unless another hash is given."""
    return Span(version, start, end, digest or weights_hash(version))


def make_ticket(number: int = 7, num_generations: int = 2) -> Ticket:
    return Ticket(
        id=TicketId.train(number),
        purpose="train",
        prompt_ids=np.array([5, 6, 7], dtype="<i4"),
        num_generations=num_generations,
        sampling=Sampling(1.0, 1.0, 0, 0.0, 16, 42),
        version=V0,
        min_step=0,
        contract="abc",
        columns={"solution": "12", "level": 3, "tags": ["a", None]},
    )


def make_rollout(length: int = 3) -> Rollout:
    return Rollout(
        token_ids=np.arange(length, dtype="<i4"),
        logprobs=np.full(length, -0.5, dtype="<f4"),
        mask=np.ones(length, dtype="|b1"),
        spans=(make_span(V0, 0, 1), make_span(Version(1, 1), 1, length)),
        finish_reason="stop",
    )


def make_group() -> Group:
    return Group(make_ticket(), (make_rollout(3), make_rollout(5)), "actor-1")


def make_partial() -> PartialGroup:
    """A finished completion, one that was cut short, and one without a token."""
    one, two = (
        replace(each, spans=tuple(replace(span, actor="actor-1") for span in each.spans))
        for each in (make_rollout(3), make_rollout(5))
    )
    return PartialGroup(TicketId.train(7), (one, replace(two, finish_reason="cut"), None))


def make_scored() -> ScoredGroup:
    return ScoredGroup(make_group(), {"accuracy": (1.0, None)}, ("12", "13"), "rewarder-1")


def make_sharded() -> Weights:
    """A version in two files."""
    shards = tuple(WeightsFile(name, 1 << 33, "ab" * 32) for name in shard_names(2))
    return Weights(Version(2, 9), "/2.9", hash_of_shards(shards), "", 3 << 33, shards=shards)


def make_messages() -> list[object]:
    """One of each kind."""
    return [
        make_ticket(),
        make_group(),
        make_partial(),
        make_scored(),
        Verdict("train:7", "filtered", "all rewards equal", {"accuracy": (1.0, 1.0)}, (3, 5)),
        Weights(
            Version(2, 9),
            "/weights/2.9",
            "ff" * 32,
            "00" * 32,
            1 << 33,
            "http://10.0.0.5:1",
            "token",
            deltas=(Delta(Version(2, 9), "00" * 32, "ee" * 32, 1 << 26),),
        ),
        make_sharded(),
    ]


class Run:
    """A run of its own on a server: what the learner, workers and the monitor see of it."""

    LEASE_S = 0.2

    def __init__(self, connection: Connection, keys: Keys, incarnation: int = 1) -> None:
        self.connection = connection
        self.keys = keys
        self.learner = LearnerQueue(connection, keys, incarnation)
        self.view = RunView(connection, keys)
        self.learner.claim("nonce", "test")

    def issue(self, *numbers: int, version: Version = V0, payload: bytes = b"ask") -> list[Version]:
        return self.learner.issue("train", [(TicketId.train(n), version, payload) for n in numbers])

    def actor(
        self,
        name: str = "actor",
        lease_s: float = LEASE_S,
        max_attempts: int = 3,
        connection: Connection | None = None,
        largest: int = 1 << 30,
    ) -> WorkStream:
        return WorkStream(
            connection or self.connection,
            self.keys,
            self.keys.tickets,
            name,
            lease_s,
            max_attempts,
            largest,
        )

    def rewarder(self, name: str = "rewarder", connection: Connection | None = None) -> WorkStream:
        return WorkStream(
            connection or self.connection, self.keys, self.keys.rollouts, name, self.LEASE_S, 3
        )

    def entries(self, stream: str) -> list[tuple[bytes, bytes]]:
        """(ticket, payload) of each entry of a stream, in order."""
        found = self.connection.execute("XRANGE", stream, "-", "+")
        return [(fields[b"t"], fields[b"d"]) for _, fields in found]

    def contents(self) -> dict[str, object]:
        """All the run holds, without entry ids: equal for equal histories.

        Attempts are left out where nobody works any more: a last failure may be counted twice.
        """
        totals, places, _ = self.view.audit()
        attempts = {
            place.ticket: place.attempts for place in places if place.stream in self.keys.work_streams
        }
        streams = (*self.keys.work_streams, *self.keys.outcome_streams, self.keys.dead)
        return {
            "totals": totals,
            "open": sorted(
                (place.ticket, place.stream, place.first_version, place.consumer) for place in places
            ),
            "attempts": attempts,
            "streams": [self.entries(stream) for stream in streams],
            "exist": all(place.exists for place in places),
        }
