"""An Engine without a model: tokens follow from the seed, time from `token_delay_s`."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from penstock.actors.engine import Aborted, PromptRefused, verify_weights
from penstock.common.errors import EngineFailed
from penstock.common.wire.messages import Float32s, Int32s, Rollout, Sampling, Span, Version, Weights

EOS = 2
CALL = 32
"""The token after the letters of the tests' tokenizer, if that has tool calls."""
DIGITS = (3, 13)
"""Token ids from 3 to 12 are the digits 0 to 9 of the tests' tokenizer."""

_KEPT = 100

Misbehaviour = Literal["crash", "exit", "hang", "refuse"]


@dataclass
class FakeEngine:
    """Samples digits; a prompt that contains `poison` makes it misbehave.

    crash raises EngineFailed, exit ends the process as kill -9 would, hang never samples a token,
    refuse raises PromptRefused. `requests` lists what was asked, `taken` the versions taken. With
    `ends_every_s` groups end only then, several at once. One that `talks` calls a tool in the first two
    turns of a conversation. `naps` lists each sleep and wake; what is asked of a sleeping engine fails,
    and with a `device`, the file that its learner locks, also a token that is sampled meanwhile. The
    first `wrong_loads` of its `loads` give other log-probabilities than the learner's.
    """

    slots: int = 64
    token_delay_s: float = 0.0
    poison: int = -1
    misbehaviour: Misbehaviour = "crash"
    requests: MutableSequence[str] = field(default_factory=list)
    aborted: MutableSequence[str] = field(default_factory=list)
    taken: MutableSequence[Version] = field(default_factory=list)
    most_at_once: int = 0
    ends_every_s: float = 0.0
    talks: bool = False
    device: str = ""
    naps: list[str] = field(default_factory=list)
    nap_delay_s: float = 0.1
    scored: MutableSequence[str] = field(default_factory=list)
    wrong_loads: int = 0
    score_delay_s: float = 0.0
    loads: int = 0

    diary: str = ""
    """A file that gets a line for each completion of a request that ended, see tests/chaos/tokens.py."""

    def __post_init__(self) -> None:
        self._tokens = 0
        self._weights: deque[Weights] = deque(maxlen=1)
        self._in_flight: dict[str, tuple[int, asyncio.Event]] = {}
        self._dropped = False

    @classmethod
    def from_environment(cls, slots: int) -> FakeEngine:
        """An engine as FAKE_TOKEN_DELAY_S, FAKE_POISON and FAKE_MISBEHAVIOUR describe it.

        Its lists keep the newest only, as the memory of a long run must not grow.
        """
        return cls(
            slots,
            float(os.environ.get("FAKE_TOKEN_DELAY_S", "0")),
            int(os.environ.get("FAKE_POISON", "-1")),
            os.environ.get("FAKE_MISBEHAVIOUR", "crash"),  # type: ignore[arg-type]
            requests=deque(maxlen=_KEPT),
            aborted=deque(maxlen=_KEPT),
            scored=deque(maxlen=_KEPT),
            taken=deque(maxlen=_KEPT),
            talks=bool(os.environ.get("FAKE_TALKS")),
            device=os.environ.get("FAKE_DEVICE", ""),
            diary=os.environ.get("FAKE_DIARY", ""),
        )

    @property
    def version(self) -> Version | None:
        return self.taken[-1] if self.taken and not self._dropped else None

    async def stop(self) -> None:
        pass

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int,
        since: Version | None = None,
    ) -> tuple[Rollout, ...]:  # fmt: skip
        self.requests.append(request_id)
        abort = asyncio.Event()
        self._in_flight[request_id] = (num_generations, abort)
        self.most_at_once = max(self.most_at_once, len(self._in_flight))
        try:
            if self.poison in prompt_ids:
                await self._misbehave(request_id, abort)
            return await self._sample(request_id, sampling, num_generations, abort)
        finally:
            del self._in_flight[request_id]

    async def _misbehave(self, request_id: str, abort: asyncio.Event) -> None:
        if self.misbehaviour == "refuse":
            raise PromptRefused(f"the engine refused {request_id}")
        if self.misbehaviour == "crash":
            raise EngineFailed("the fake engine crashed")
        if self.misbehaviour == "exit":
            os._exit(137)
        await abort.wait()
        raise Aborted(request_id)

    async def _sample(
        self, request_id: str, sampling: Sampling, count: int, abort: asyncio.Event
    ) -> tuple[Rollout, ...]:
        drawn = [draw_tokens(sampling, index) for index in range(count)]
        if self.talks and request_id.endswith((".0", ".1")):
            drawn = [np.array([CALL, EOS][: sampling.max_tokens], dtype="<i4")]
        versions: list[Weights] = []
        for _ in range(max(len(tokens) for tokens in drawn)):
            await asyncio.sleep(self.token_delay_s)
            if abort.is_set():
                partial = tuple(cut(tokens, versions) for tokens in drawn)
                self._note(request_id, sampling, partial)
                raise Aborted(request_id, partial)
            self._check_awake()
            versions.append(self._weights[-1])
            self._tokens += count
        if self.ends_every_s:
            await asyncio.sleep(
                self.ends_every_s - asyncio.get_running_loop().time() % self.ends_every_s
            )
        rollouts = tuple(make_rollout(tokens, versions) for tokens in drawn)
        self._note(request_id, sampling, rollouts)
        return rollouts

    def _note(self, request_id: str, sampling: Sampling, rollouts: Sequence[Rollout | None]) -> None:
        """Write to the diary, in one piece, what a request sampled of which completion."""
        if not self.diary:
            return
        name, _, only = request_id.partition("#")
        common = {"ticket": name.partition("/")[0], "most": sampling.max_tokens}
        lines = [
            common
            | {
                "index": int(only or index),
                "sampled": len(one.token_ids) if one else 0,
                "ended": one is not None and one.finish_reason != "cut",
            }
            for index, one in enumerate(rollouts)
        ]
        with open(self.diary, "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._in_flight:
            self._in_flight[request_id][1].set()

    def _check_awake(self) -> None:
        """Fail if the engine sleeps, or the learner uses the device."""
        if self.naps and self.naps[-1] != "wake":
            raise EngineFailed("a sleeping engine was asked to work")
        if self.device:
            with open(self.device) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    async def sleep(self, level: int) -> None:
        assert not self._in_flight
        self._check_awake()
        self.naps.append("falls asleep")
        await asyncio.sleep(self.nap_delay_s)
        self.naps[-1] = f"sleep {level}"
        self._dropped = level == 2

    async def wake(self) -> None:
        await asyncio.sleep(self.nap_delay_s)
        self.naps.append("wake")
        self._check_awake()

    async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
        """What the learner says of the text, or something else while weights are loaded wrongly."""
        weights = self._weights[-1]
        (probe,) = (one for one in weights.probes if np.array_equal(one.token_ids, token_ids))
        await asyncio.sleep(self.score_delay_s)
        said = probe.logprobs - np.float32(self.loads <= self.wrong_loads)
        self.scored.append(request_id)
        return said

    async def take_weights(self, weights: Weights, again: bool = False) -> None:
        self.loads += 1
        self._check_awake()
        self._dropped = False
        await asyncio.to_thread(verify_weights, weights)
        self._weights.append(weights)
        self.taken.append(weights.version)

    def room(self) -> int:
        return self.slots - sum(count for count, _ in self._in_flight.values())

    def tokens_generated(self) -> int:
        return self._tokens

    def prefix_cache(self) -> tuple[int, int]:
        return 0, 0


def draw_tokens(sampling: Sampling, index: int) -> Int32s:
    """The tokens of one completion: digits, then the end-of-sequence token if it fits."""
    random = np.random.default_rng(sampling.seed + index)
    digits = random.integers(*DIGITS, size=int(random.integers(1, sampling.max_tokens + 1)))
    return np.append(digits, EOS)[: sampling.max_tokens].astype("<i4")


def cut(tokens: Int32s, versions: list[Weights]) -> Rollout | None:
    """What there is of a completion after so many steps: all of it, a part, or None without a token."""
    so_far = tokens[: len(versions)]
    if not len(so_far):
        return None
    rollout = make_rollout(so_far, versions)
    return rollout if len(so_far) == len(tokens) else replace(rollout, finish_reason="cut")


def make_rollout(tokens: Int32s, versions: list[Weights]) -> Rollout:
    """A rollout of these tokens; token t was sampled under versions[t]."""
    edges = [t for t in range(len(tokens)) if t == 0 or versions[t] != versions[t - 1]]
    ends = [*edges[1:], len(tokens)]
    return Rollout(
        token_ids=tokens,
        logprobs=np.full(len(tokens), -np.log(10.0), dtype="<f4"),
        mask=np.ones(len(tokens), dtype=bool),
        spans=tuple(
            Span(versions[start].version, start, end, versions[start].hash)
            for start, end in zip(edges, ends, strict=True)
        ),
        finish_reason="stop" if tokens[-1] == EOS else "length",
    )
