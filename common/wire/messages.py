"""The messages between the roles: frozen dataclasses, checked when built and when decoded.

    Ticket       learner  -> actors      one prompt to sample num_generations completions from
    Group        actor    -> rewarders   the rollouts of one ticket
    ScoredGroup  rewarder -> learner     a group with its rewards
    Verdict      anyone   -> learner     the end of a ticket that brings no group (filtered, dead)
    Weights      learner  -> actors      a version of the policy: its folder and its hash

Dimensions in names: G rollouts of a group, T tokens of a completion, P tokens of a prompt.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np

from penstock.common.errors import MalformedMessage
from penstock.common.wire.ids import Purpose, TicketId, Version

SCHEMA = 3
"""Version of the wire format. Every message carries this number."""

Int32s = Annotated[np.ndarray, "<i4"]
Float32s = Annotated[np.ndarray, "<f4"]
Bools = Annotated[np.ndarray, "|b1"]

ANSWER = "answer"
"""Name of the extra column with the answers that the rewarder extracted from an evaluation group."""

FinishReason = Literal["stop", "length"]
EndState = Literal["trained", "filtered", "stale", "dead", "evaluated", "unused"]
END_STATES: tuple[EndState, ...] = get_args(EndState)


def _require(condition: bool, message: str) -> None:
    """Raise MalformedMessage with this message unless the condition holds."""
    if not condition:
        raise MalformedMessage(message)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of sampling. Temperature 0 is greedy; rollout i of a group gets the seed `seed + i`.

    Raise MalformedMessage for a value out of range.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    seed: int

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a value out of range."""
        _require(self.temperature >= 0.0, f"temperature {self.temperature} is negative")
        _require(0.0 < self.top_p <= 1.0, f"top_p {self.top_p} is not in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, f"min_p {self.min_p} is not in [0, 1]")
        _require(self.top_k >= 0, f"top_k {self.top_k} is negative (0 means all)")
        _require(self.max_tokens > 0, f"max_tokens {self.max_tokens} is not positive")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One prompt to sample from, with all data that actors and rewarders need.

    An actor starts a training ticket when the step of its weights is at least `min_step`, and an
    evaluation ticket when its weights are exactly `version`.
    """

    id: TicketId
    purpose: Purpose
    prompt_ids: Int32s
    num_generations: int
    sampling: Sampling
    version: Version
    min_step: int
    contract: str
    columns: dict[str, Any]

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a wrong id or purpose, an empty prompt, or no generations."""
        found = TicketId(self.id).purpose
        _require(found == self.purpose, f"ticket {self.id} has the purpose {self.purpose!r}")
        _require(len(self.prompt_ids) > 0, f"ticket {self.id} has an empty prompt")
        _require(self.num_generations > 0, f"ticket {self.id} asks for no generation")


@dataclass(frozen=True, slots=True)
class Span:
    """A range [start, end) of a completion's tokens, sampled by `version`.

    `hash` is the hash of the weights that the actor had loaded, see Weights.
    """

    version: Version
    start: int
    end: int
    hash: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.

    token_ids (T,); logprobs (T,) of the policy that sampled them, after temperature; mask (T,) is True
    for tokens that the policy sampled; spans cover [0, T) in order: 5 tokens may have [0, 3) and [3, 5).
    Raise MalformedMessage if lengths or spans do not fit, or a log-probability is not finite.
    """

    token_ids: Int32s
    logprobs: Float32s
    mask: Bools
    spans: tuple[Span, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        """Raise MalformedMessage if sizes, spans, finish reason or a log-probability are wrong."""
        length = len(self.token_ids)
        _require(length > 0, "a rollout has no token")
        sizes = f"{length} tokens, {len(self.logprobs)} logprobs and {len(self.mask)} mask entries"
        _require(len(self.logprobs) == len(self.mask) == length, sizes)
        _require(bool(np.isfinite(self.logprobs).all()), "a log-probability is not finite")
        _require(self.finish_reason in ("stop", "length"), f"finish {self.finish_reason!r}")
        edge = 0
        for span in self.spans:
            _require(span.start == edge and span.end > edge, f"spans do not tile: {self.spans}")
            edge = span.end
        _require(edge == length, f"spans end at {edge} of {length} tokens")


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one ticket, by one actor. Raise MalformedMessage if their number is wrong."""

    ticket: Ticket
    rollouts: tuple[Rollout, ...]
    actor: str

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless there are as many rollouts as the ticket asks for."""
        found, expected = len(self.rollouts), self.ticket.num_generations
        _require(found == expected, f"{self.ticket.id}: {found} rollouts, not {expected}")


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards: G numbers per reward name, None where the reward does not apply.

    `texts` are the decoded completions. `failures` is empty, or has for each rollout the reason why it
    could not be scored, "" if it was scored. A failed rollout has no reward and is not trained. `extra`
    holds columns that rewards logged, G values each, and `metrics` numbers that rewards logged. Raise
    MalformedMessage if sizes differ, a number is not finite, or a failed rollout has a reward.
    """

    group: Group
    rewards: dict[str, tuple[float | None, ...]]
    texts: tuple[str, ...]
    rewarder: str
    failures: tuple[str, ...] = ()
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise MalformedMessage for wrong sizes, no reward, infinity, or a reward of a failure."""
        size = len(self.group.rollouts)
        _require(bool(self.rewards), f"{self.group.ticket.id}: no reward at all")
        _require(len(self.texts) == size, f"{len(self.texts)} texts for {size} rollouts")
        for name, values in self.rewards.items():
            _require(len(values) == size, f"reward {name}: {len(values)} values for {size}")
            finite = all(value is None or np.isfinite(value) for value in values)
            _require(finite, f"reward {name} is not finite: {values}")
        _require(len(self.failures) in (0, size), f"{len(self.failures)} failures for {size} rollouts")
        for index, failure in enumerate(self.failures):
            scored = any(values[index] is not None for values in self.rewards.values())
            _require(not (failure and scored), f"rollout {index} has rewards, and failed: {failure}")
        for name, column in self.extra.items():
            _require(len(column) == size, f"extra column {name}: {len(column)} values for {size}")
        for name, value in self.metrics.items():
            _require(bool(np.isfinite(value)), f"metric {name} is not finite: {value}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a ticket that brings no group, with the figures that metrics count.

    `prompt` and `completion` are the first letters of the question and of the first completion that has
    a reward. Raise MalformedMessage for another state, rewards of different sizes, or infinite numbers.
    """

    ticket_id: TicketId
    state: Literal["filtered", "dead"]
    reason: str
    rewards: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    prompt: str = ""
    completion: str = ""

    def __post_init__(self) -> None:
        """Raise MalformedMessage for another state, rewards of other sizes, or infinity."""
        _require(self.state in ("filtered", "dead"), f"verdict {self.state!r} is unknown")
        sizes = {len(values) for values in self.rewards.values()}
        _require(len(sizes) <= 1 and 0 not in sizes, f"rewards of {self.ticket_id} differ in number")
        values = [value for row in self.rewards.values() for value in row if value is not None]
        values += self.metrics.values()
        _require(bool(np.isfinite(values).all()), f"a reward of {self.ticket_id} is not finite")


@dataclass(frozen=True, slots=True)
class Weights:
    """A published version: a folder with config, tokenizer and model.safetensors.

    `hash` is the SHA-256 of model.safetensors, and `parent` is the hash of the version before.
    """

    version: Version
    path: str
    hash: str
    parent: str


Outcome = ScoredGroup | Verdict
"""The result of a ticket."""
