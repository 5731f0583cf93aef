"""The messages between the roles: frozen dataclasses, checked when built and when decoded.

    Ticket       learner  -> actors      one prompt to sample num_generations completions from
    Group        actor    -> rewarders   the rollouts of one ticket
    PartialGroup actor    -> actors      what is sampled of a group whose actor had to end
    ScoredGroup  rewarder -> learner     a group with its rewards
    Verdict      anyone   -> learner     the end of a ticket that brings no group (filtered, dead)
    Weights      learner  -> actors      a version of the policy: its folder and its hash

Dimensions in names: G rollouts of a group, T tokens of a completion, P tokens of a prompt.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np

from penstock.common.text import SHOWN
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.generation import check_generation
from penstock.common.wire.ids import LARGEST, Purpose, TicketId, Version
from penstock.common.wire.limits import (
    HIGHEST_TEMPERATURE,
    LARGEST_INT32,
    LONGEST_PATH,
    LOWEST_LOGPROB,
    LOWEST_TEMPERATURE,
    MOST_COMPLETIONS,
    MOST_SEQUENCES,
    check_array,
    check_metrics,
    check_names,
    check_plain,
    check_range,
    check_rewards,
    check_texts,
    require,
)
from penstock.common.wire.plain import brief
from penstock.common.wire.transcript import Transcript

SCHEMA = 14
"""Version of the wire format. Every message carries this number."""

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
"""The file of a version: a whole model, or a LoRA adapter to the weights of the model's folder."""
INDEX_FILE = "model.safetensors.index.json"
"""Beside a model in several files, such as model-00002-of-00003.safetensors: which has which tensor."""
MOST_SHARDS = 1024
"""Most files of a version, without their index."""
UNSCORED = "could not be scored"
"""In the reason of a filtered group's verdict, if rewards failed for some of its completions."""
DELTA_FILE = "model.delta"
"""Beside it, what makes it of the file of the version before."""
DELTA_PART = 1 << 19
"""Bytes of each part of a delta on the queue server, but the last one."""
MOST_DELTAS = 16
"""Most deltas that are announced with a version."""

LONGEST_PROBE = 1024
"""Most tokens of a probe, and most probes of a version."""
LOWEST_PROBED = -1e9
"""Lowest log-probability of a probe's token, in nats."""
MOST_PROBED = 16_384
"""Most tokens of all probes of a version."""
Int32s = Annotated[np.ndarray, "<i4"]
Float32s = Annotated[np.ndarray, "<f4"]
Bools = Annotated[np.ndarray, "|b1"]

ANSWER = "answer"
"""Name of the extra column with the answers that the rewarder extracted from an evaluation group."""

_RELEASE = "install one release of penstock everywhere, or see who else writes to the queue server"
_POSSIBLE = (
    f"expected log-probabilities in [{LOWEST_LOGPROB:g}, 0]: check the actor's log; lowest, highest:"
)

FinishReason = Literal["stop", "length", "turns", "template", "environment", "cut"]
"""The end of a rollout: an end token or stop string; the most tokens; the most turns with tool calls; a
chat template to which no further turn can be added exactly; a broken environment or tool; an actor that
had to end, so that another one continues the completion.
"""
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_WRONG_REASON = f"a rollout: expected finish_reason {' or '.join(_REASONS)}; {_RELEASE}; found:"
EndState = Literal["trained", "filtered", "stale", "dead", "evaluated", "unused"]
END_STATES: tuple[EndState, ...] = get_args(EndState)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of sampling. Temperature 0 is greedy; rollout i of a group gets the seed `seed + i`.

    A completion ends behind a text of `stop`, which stays a part of it. It matches `regex`, or is one of
    `choice`, if these are not empty. Raise MalformedMessage for a value out of range.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    regex: str = ""
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless all of the following holds.

        `temperature` is 0 or 0.01 to 100, `top_p` above 0 and at most 1, `min_p` 0 to 1. `top_k` and
        `seed` are 0 to 2^31 - 1, `max_tokens` 1 to 2^31 - 1, `repetition_penalty` 0.1 to 10. `stop` has
        at most 16 texts, `choice` 256, none empty or over 200 characters. `regex` has at most 1000
        characters, no NUL, no `choice` beside it, and its letters times its counts in braces are at most
        100,000.
        """
        if self.temperature != 0.0:  # 0: greedy
            check_range("temperature", self.temperature, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)
        found = f"top_p is {brief(self.top_p)}"
        require(0.0 < self.top_p <= 1.0, f"{found}, expected above 0, at most 1: see LEARNER_TOP_P")
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("top_k", self.top_k, 0, LARGEST_INT32)
        check_range("max_tokens", self.max_tokens, 1, LARGEST_INT32)
        check_range("seed", self.seed, 0, LARGEST_INT32)
        check_generation(self.stop, self.repetition_penalty, self.regex, self.choice)


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
        """Raise MalformedMessage unless all of the following holds.

        `id` has the form of a TicketId, and `purpose` is its purpose. `prompt_ids` (int32, one
        dimension) has a token id, none negative. `num_generations` is 1 to 65,536, `min_step` 0 to the
        step of `version`. `columns` are at most 1024 columns of plain data. Their names and `contract`
        have at most 200 characters.
        """
        found = TicketId(self.id).purpose
        wrong = f"ticket {self.id} says purpose {brief(self.purpose)}, expected {found}; {_RELEASE}"
        require(found == self.purpose, wrong)
        check_array("prompt_ids", self.prompt_ids, "<i4")
        fits = len(self.prompt_ids) > 0 and int(self.prompt_ids.min()) >= 0
        require(fits, f"ticket {self.id}: its prompt has no token id, or a negative one; {_RELEASE}")
        check_range("num_generations", self.num_generations, 1, MOST_COMPLETIONS)
        check_range("min_step", self.min_step, 0, self.version.step)
        check_names("contract", [self.contract])
        check_names("column", self.columns)
        check_plain("column", self.columns)


@dataclass(frozen=True, slots=True)
class Span:
    """A range [start, end) of a completion's tokens, sampled by `version`.

    `hash` is the hash of the weights that the actor had loaded, see Weights. `actor` is "" if the actor
    of the Group sampled the tokens, else the name of the actor before it that did.
    """

    version: Version
    start: int
    end: int
    hash: str
    actor: str = ""


_ARRAYS = (("token_ids", "<i4"), ("prompt_ids", "<i4"), ("logprobs", "<f4"), ("mask", "|b1"))


def _no_ids() -> np.ndarray:
    """Return a new empty array of token ids: int32, little-endian, of one dimension."""
    return np.zeros(0, dtype="<i4")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion, or a conversation of several with the answers of tools between them.

    The rollout of an agent that rewrites its history has several sequences: `earlier` are those before
    the last one, each with its own prompt, and the other fields are the last one's.

    token_ids (T,); logprobs (T,) of the policy that sampled them, after temperature; mask (T,) is True
    for tokens that the policy sampled, and False for those of tools and environments, whose logprobs are
    undefined. The spans cover the sampled tokens in order, and no others: with 5 sampled tokens, an
    answer of 2 and 1 sampled token they may be [0, 3), [3, 5) and [7, 8). `prompt_ids` (P,) is the
    prompt of a rollout whose environment or agent made it, empty if the prompt is the ticket's.
    `transcript` is None for a single completion. Raise MalformedMessage if lengths or spans do not fit,
    a log-probability is not in [LOWEST_LOGPROB, 0], or an earlier sequence has parts of a whole rollout.
    """

    token_ids: Int32s
    logprobs: Float32s
    mask: Bools
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    prompt_ids: Int32s = field(default_factory=_no_ids)
    transcript: Transcript | None = None
    earlier: "tuple[Rollout, ...]" = ()

    @property
    def sequences(self) -> "tuple[Rollout, ...]":
        """The sequences in their order, this one last: a rollout of one sequence has itself alone."""
        return (*self.earlier, self)

    @property
    def length(self) -> int:
        """Number of tokens after the prompts of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def failure(self) -> str:
        """Return why a tool or environment broke; "" if none did, or the rollout is one completion."""
        return self.transcript.failure if self.transcript else ""

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless all of the following holds.

        `token_ids` and `prompt_ids` (int32), `logprobs` (float32) and `mask` (bool) have one dimension,
        all but `prompt_ids` one length over 0. No token id is negative. Log-probabilities are in
        [-104, 0]. `spans` cover the tokens where `mask` is True, in order. `finish_reason` is known. Of
        `earlier` sequences there are at most MOST_SEQUENCES - 1, each with a prompt of its own.
        """
        length = len(self.token_ids)
        for name, dtype in _ARRAYS:
            check_array(name, getattr(self, name), dtype)
        if not len(self.logprobs) == len(self.mask) == length > 0:
            sizes = f"{length} tokens, {len(self.logprobs)} logprobs and {len(self.mask)} mask entries"
            require(False, f"a rollout has {sizes}, expected 1 or more and as many of each; {_RELEASE}")
        self._check_values()
        require(self.finish_reason in _REASONS, _WRONG_REASON, self.finish_reason)
        self._check_spans()
        self._check_earlier()

    def _check_values(self) -> None:
        """Raise MalformedMessage for a negative token id, or a log-probability outside of [-104, 0]."""
        least = int(self.token_ids.min())
        if len(self.prompt_ids):
            least = min(least, int(self.prompt_ids.min()))
        if least < 0:
            require(False, f"a rollout has the token id {least}, expected 0 or more; {_RELEASE}")
        lowest, highest = float(self.logprobs.min()), float(self.logprobs.max())  # NaN if one is NaN
        require(lowest >= LOWEST_LOGPROB and highest <= 0.0, _POSSIBLE, lowest, highest)

    def _check_earlier(self) -> None:
        """Raise MalformedMessage for over 63 earlier sequences, or a wrong one.

        A wrong one has a transcript, has earlier sequences itself, or lacks a prompt of its own.
        """
        most = MOST_SEQUENCES - 1
        require(
            len(self.earlier) <= most,
            f"a rollout: expected at most {most} earlier sequences; {_RELEASE}; found:",
            len(self.earlier),
        )
        for one in self.earlier:
            alone = one.transcript is None and not one.earlier and len(one.prompt_ids) > 0
            wrong = "an earlier sequence has a transcript, sequences or no prompt, expected a prompt"
            require(alone, f"{wrong}; {_RELEASE}")

    def _check_spans(self) -> None:
        """Raise MalformedMessage unless `spans` cover the tokens where `mask` is True, and no others.

        Each span has at least one token and begins at or after the end of the span before it. The name
        of its actor has at most 200 characters, and no lone surrogate.
        """
        covered, edge = np.zeros(len(self.mask), dtype=bool), 0
        for span in self.spans:
            if span.actor:
                check_names("actor", [span.actor])
            if not edge <= span.start < span.end <= len(covered):
                wrong = f"a rollout: expected a span within {edge} to {len(covered)}"
                require(False, f"{wrong}; {_RELEASE}; spans are:", self.spans)
            covered[span.start : span.end] = True
            edge = span.end
        if not np.array_equal(covered, self.mask):
            place = int(np.argmax(covered != self.mask))
            found = "sampled, but in no span" if self.mask[place] else "in a span, but not sampled"
            text = f"token {place} of {len(covered)} of a rollout is {found}; {_RELEASE}; the spans are:"
            require(False, text, self.spans)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one ticket, handed on by one actor, which may have continued those of others.

    Raise MalformedMessage if their number is wrong, or one is not finished.
    """

    ticket: Ticket
    rollouts: tuple[Rollout, ...]
    actor: str

    def __post_init__(self) -> None:
        """Raise MalformedMessage if the number of rollouts is not the ticket's `num_generations`.

        Raise it too if one has the finish reason "cut", and for an `actor` of over 200 characters, or
        with a lone surrogate.
        """
        check_names("actor", [self.actor])
        found = f"{self.ticket.id}: actor {brief(self.actor)} sent {len(self.rollouts)} rollouts"
        asked = self.ticket.num_generations
        require(len(self.rollouts) == asked, f"{found}, the ticket asks for {asked}; {_RELEASE}")
        whole = all(one.finish_reason != "cut" for one in self.rollouts)
        require(whole, f"{found}, one of them cut short, expected whole ones; {_RELEASE}")


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """What was sampled of a ticket's group when its actor had to end. Another actor continues it.

    `rollouts` has an item per rollout, in the order of their seeds: a finished one, one that was cut
    short (finish reason "cut"), or None if it has no token yet. For example, of 4 completions with a
    limit of 1,000 tokens there may be one of 310 that ended with an end token, two of 650 that were cut,
    and None. Raise MalformedMessage for spans that do not name their actor, or a cut rollout that is no
    single completion.
    """

    ticket_id: TicketId
    rollouts: tuple[Rollout | None, ...]

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless all of the following holds.

        There are 1 to 65,536 rollouts. Each of their spans names its actor. A cut one has no transcript,
        no earlier sequences and no prompt of its own, and all of its tokens were sampled.
        """
        place = f"the partial group of {TicketId(self.ticket_id)}"
        size = len(self.rollouts)
        require(0 < size <= MOST_COMPLETIONS, f"{place} has {size} rollouts, expected 1 or more")
        for one in filter(None, self.rollouts):
            spans = [span for sequence in one.sequences for span in sequence.spans]
            require(
                all(span.actor for span in spans), f"{place} has a span without its actor; {_RELEASE}"
            )
            single = one.transcript is None and len(one.sequences) == 1 and not len(one.prompt_ids)
            fits = one.finish_reason != "cut" or (single and bool(one.mask.all()))
            require(fits, f"{place} has a cut rollout that is no single completion; {_RELEASE}")


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
        """Raise MalformedMessage unless all of the following holds.

        `rewards` has at least one reward. Each reward, `texts`, each column of `extra`, and `failures`
        unless empty, have a value per rollout. A reward is None or within 1e9 of 0, and None for a
        failed rollout; a metric is within 1e100 of 0. Columns are plain data. A failure has at most 2000
        letters, a name 200. No text has a lone surrogate.
        """
        size, ticket = len(self.group.rollouts), self.group.ticket.id
        require(bool(self.rewards), f"{ticket}: its rewarder sent no reward, expected one; {_RELEASE}")
        found = f"{ticket}: its rewarder sent {len(self.texts)} texts and {len(self.failures)} failures"
        require(len(self.texts) == size, f"{found}, expected {size} texts; {_RELEASE}")
        check_rewards(self.rewards, size)
        require(len(self.failures) in (0, size), f"{found}, expected 0 or {size} failures; {_RELEASE}")
        for index, failure in enumerate(self.failures):
            scored = failure and any(values[index] is not None for values in self.rewards.values())
            wrong = f"{ticket}: rollout {index} failed, expected no rewards; {_RELEASE}; its failure:"
            require(not scored, wrong, failure)
        check_names("extra column", self.extra)
        for name, column in self.extra.items():
            uneven = f"extra column {name} has {len(column)} values for {size} completions"
            require(len(column) == size, f"{uneven}: let the reward log one for each")
        check_plain("extra column", self.extra)
        check_metrics(self.metrics)
        check_names("rewarder", [self.rewarder])
        check_texts(self.texts)
        check_texts(self.failures, longest=SHOWN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a ticket that brings no group, with the figures that metrics count.

    `prompt` and `completion` are the first characters of the question and of the first completion that
    has a reward. Raise MalformedMessage for another state, rewards of different sizes, or infinite
    numbers.
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
        """Raise MalformedMessage unless all of the following holds.

        `state` is "filtered" or "dead". `reason` has 1 to 2000 characters, `prompt` and `completion` up
        to 2000. Rewards have equally many values, 1 to 65,536, each None or within 1e9 of 0. `lengths`
        is empty or has as many (any without rewards), each 1 to 2^31 - 1. A metric is within 1e100 of 0.
        """
        place = f"the verdict of {TicketId(self.ticket_id)}"
        wrong = f"{place} is {brief(self.state)}, expected filtered or dead and a reason; {_RELEASE}"
        require(self.state in ("filtered", "dead") and bool(self.reason), wrong)
        sizes = {len(values) for values in self.rewards.values()} or {len(self.lengths)}
        size = max(sizes)
        fits = len(sizes) == 1 and len(self.lengths) in (0, size) and (size > 0 or not self.rewards)
        require(fits, f"{place} has rewards and lengths of different sizes; {_RELEASE}")
        require(size <= MOST_COMPLETIONS, f"{place} has over {MOST_COMPLETIONS} values; {_RELEASE}")
        check_rewards(self.rewards, size)
        for length in self.lengths:
            check_range("length", length, 1, LARGEST_INT32)
        check_metrics(self.metrics)
        check_texts((self.reason, self.prompt, self.completion), longest=SHOWN)


@dataclass(frozen=True, slots=True)
class Probe:
    """A text of L token ids, and the log-probabilities of those after the first, (L - 1,), in nats.

    They are the learner's, at temperature 1: an engine that has loaded the weights computes the same.
    """

    token_ids: Int32s
    logprobs: Float32s

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless there are 2 to 1024 ids, none negative, and values of L - 1.

        Log-probabilities are in [-1e9, 0].
        """
        check_array("token_ids", self.token_ids, "<i4")
        check_array("logprobs", self.logprobs, "<f4")
        length = len(self.token_ids)
        sizes = f"{length} tokens and {len(self.logprobs)} logprobs"
        fits = 2 <= length <= LONGEST_PROBE and len(self.logprobs) == length - 1
        require(fits, f"a probe has {sizes}, expected 2 to {LONGEST_PROBE} and one less; {_RELEASE}")
        require(int(self.token_ids.min()) >= 0, f"a probe has a negative token id; {_RELEASE}")
        lowest, highest = float(self.logprobs.min()), float(self.logprobs.max())  # NaN if one is NaN
        require(
            lowest >= LOWEST_PROBED and highest <= 0.0, f"a probe's logprobs are impossible; {_RELEASE}"
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed from the file of weights with the hash `parent` to the file of `version`.

    `hash` is the BLAKE3 hash of the delta's own file, and `size` its bytes.
    """

    version: Version
    parent: str
    hash: str
    size: int

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a hash over 200 characters, a size below 1 or from 10^15 on."""
        check_names("hash", [self.parent, self.hash])
        check_range("the size of a delta", self.size, 1, LARGEST)

    def parts(self) -> Iterator[tuple[str, int]]:
        """Yield the names of its parts in the hash `deltas` on the queue server, and their bytes."""
        for begin in range(0, self.size, DELTA_PART):
            yield f"{self.hash}:{begin // DELTA_PART}", min(DELTA_PART, self.size - begin)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file of a version: its name in the version's folder, its bytes, and its BLAKE3 hash."""

    name: str
    size: int
    hash: str

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a name or hash over 200 characters, a size not 0 to 10^15 - 1."""
        check_names("hash or name", [self.hash, self.name])
        check_range("the size of a file", self.size, 0, LARGEST)


def shard_names(count: int) -> list[str]:
    """Return the names of a model's files if it has so many, and of their index, as in Hugging Face."""
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [*files, INDEX_FILE]


def hash_of_shards(shards: Sequence[WeightsFile]) -> str:
    """Return the hash of a version in several files: SHA-256 over their names, sizes and hashes."""
    lines = "".join(f"{one.name} {one.size} {one.hash}\n" for one in shards)
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Weights:
    """A published version: a folder with one `file` of weights, a whole model or an `adapter`.

    `hash` is the BLAKE3 hash of this file and `size` its bytes; `parent` is the hash of the version
    before. `url` is the file server that has it, with its `token`; "" for none. An engine that has
    loaded it computes the log-probabilities of the `probes`. The `deltas` lead from a version before to
    this one, each to the next. A large model has several files instead, its `shards`, the last of which
    is their index; `hash` is then that of their list, `hash_of_shards`, and `size` their bytes.
    """

    version: Version
    path: str
    hash: str
    parent: str
    size: int = 0
    url: str = ""
    token: str = field(default="", repr=False)
    probes: tuple[Probe, ...] = field(default=(), repr=False, compare=False)
    adapter: AdapterSpec | None = None
    deltas: tuple[Delta, ...] = ()
    shards: tuple[WeightsFile, ...] = ()

    @property
    def delta_bytes(self) -> int:
        """Return the size of the delta that ends in this version, 0 if it has none."""
        return self.deltas[-1].size if self.deltas else 0

    @property
    def file(self) -> str:
        """Return the name of the version's file in its folder, if it has one alone."""
        return ADAPTER_FILE if self.adapter else WEIGHTS_FILE

    @property
    def files(self) -> tuple[WeightsFile, ...]:
        """Return all files that an engine loads."""
        return self.shards or (WeightsFile(self.file, self.size, self.hash),)

    @property
    def tensor_files(self) -> tuple[WeightsFile, ...]:
        """Return the files with tensors, which are all but the index."""
        return tuple(one for one in self.files if one.name != INDEX_FILE)

    def __post_init__(self) -> None:
        """Raise MalformedMessage if a hash or `token` is over 200 characters, `path` or `url` over 4096.

        A lone surrogate in one of the texts is refused too, a size below 0 or of 10^15 and more, and
        more than 1024 probes or 16,384 tokens in them, more than 16 deltas, and wrong `shards`.
        """
        found = f"a version has {len(self.deltas)} deltas, expected at most {MOST_DELTAS}; {_RELEASE}"
        require(len(self.deltas) <= MOST_DELTAS, found)
        tokens = sum(len(probe.token_ids) for probe in self.probes)
        few = len(self.probes) <= LONGEST_PROBE and tokens <= MOST_PROBED
        require(few, f"a version has {len(self.probes)} probes of {tokens} tokens; {_RELEASE}")
        check_names("hash or token", [self.hash, self.parent, self.token])
        check_texts([self.path, self.url], LONGEST_PATH)
        check_range("the size of a version", self.size, 0, LARGEST)
        if self.shards:
            self._check_shards()

    def _check_shards(self) -> None:
        """Raise MalformedMessage unless the shards are 2 to 1024 files and their index, in order.

        Their hashes are 64 hex digits. Hash and size of the version are those of the shards.
        """
        count = len(self.shards) - 1
        few = 2 <= count <= MOST_SHARDS and not self.adapter
        found = f"a version has {count} files and an index, expected 2 to {MOST_SHARDS} (adapters: 1)"
        require(few, f"{found}: raise LEARNER_MAX_SHARD_SIZE")
        names = [one.name for one in self.shards]
        require(names == shard_names(count), f"a version's files have wrong names; {_RELEASE}", names)
        fits = all(re.fullmatch("[0-9a-f]{64}", one.hash) for one in self.shards)
        fits &= self.hash == hash_of_shards(self.shards)
        fits &= self.size == sum(one.size for one in self.shards)
        require(fits, f"a version's hash or size is not that of its files; {_RELEASE}")


Outcome = ScoredGroup | Verdict
"""The result of a ticket."""
