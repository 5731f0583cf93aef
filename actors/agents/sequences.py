"""The sequences of an agent's rollout: which one a call goes on, and the tokens of each.

A call whose messages begin with exactly those of a sequence, the answer included, goes on that sequence:
what the chat template adds is appended to the sampled tokens (actors/turns.py). Any other call begins a
new sequence, whose prompt is the rendering of all its messages. Examples, with A1 the first answer:

    [S, U] -> A1, [S, U, A1, T]    one sequence
    [S, U] -> A1, [S', U2]         two sequences: the history was rewritten
    [S, U] twice at a time         two sequences
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from penstock.actors.agents.form import CallRefused, ChatRequest, key_of
from penstock.actors.conversation import InThread, Tokens
from penstock.actors.turns import Message, TurnTemplate
from penstock.common.chat.renderer import RendererFailed
from penstock.common.episodes.pool import EpisodeFailed
from penstock.common.text import short
from penstock.common.wire.messages import FinishReason, Int32s, Rollout

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most tokens of a sequence's prompt and after it, and the most sequences of a rollout."""

    prompt: int
    completion: int
    sequences: int


@dataclass(slots=True, eq=False)
class ChatSequence:
    """Messages, with their keys, and the tokens that stand for them. `busy` while a call is served."""

    tools: str
    messages: list[Message] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    prompt_ids: Int32s = field(default_factory=lambda: np.zeros(0, dtype="<i4"))
    tokens: Tokens = field(default_factory=Tokens)
    finish: FinishReason = "stop"
    busy: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """A call's place: its sequence, the tokens after the last answer, and how many more fit."""

    sequence: ChatSequence
    suffix: Int32s
    left: int

    @property
    def prompt(self) -> Int32s:
        """Return the token ids (L,) before the answer: first prompt, all added since, and `suffix`."""
        ids: Int32s = np.concatenate([self.sequence.prompt_ids, *self.sequence.tokens.ids, self.suffix])
        return ids


class Sequences:
    """The sequences of one rollout, at first none. Calls side by side go on different sequences.

    `template` turns messages into tokens. `limits` are the most tokens of a prompt and after it, and the
    most sequences. `in_thread` calls a blocking function in a thread.
    """

    def __init__(self, template: TurnTemplate, limits: Limits, in_thread: InThread) -> None:
        self._template = template
        self._limits = limits
        self._in_thread = in_thread
        self._all: list[ChatSequence] = []

    @property
    def answered(self) -> list[ChatSequence]:
        """Return a new list of the sequences with an answer, in the order of their last answers."""
        return [sequence for sequence in self._all if sequence.tokens.count]

    @asynccontextmanager
    async def turn(self, request: ChatRequest) -> AsyncIterator[Turn]:
        """Give a call its place for the time of the block: in the sequence it goes on, or a new one.

        The caller adds the answer by `take` in the block; else the sequences are as before. No other
        call gets the sequence meanwhile. Raise CallRefused for too many tokens or sequences, or messages
        that the template refuses, EpisodeFailed if the template's process ended or took over 10 s.
        """
        turn = await self._place(request)
        try:
            yield turn
        finally:
            turn.sequence.busy = False
            if not turn.sequence.tokens.count:
                self._all.remove(turn.sequence)

    def take(self, turn: Turn, request: ChatRequest, sampled: Rollout, message: Message) -> None:
        """Add an answer to the sequence of `turn`, and make this sequence the last of `answered`.

        `sampled` is the answer with its tokens, `message` the same as the agent gets it. Its sequence
        then has the messages of `request`, and `message`. The tokens before the answer are added too.
        """
        sequence = turn.sequence
        if len(turn.suffix):
            sequence.tokens.add_answer(turn.suffix)
        sequence.tokens.add_sampled(sampled)
        sequence.messages = [*request.messages, message]
        sequence.keys = [key_of(one) for one in sequence.messages]
        sequence.finish = sampled.finish_reason
        self._all.remove(sequence)
        self._all.append(sequence)

    async def _place(self, request: ChatRequest) -> Turn:
        """Return a call's place, and mark its sequence as busy. A new one begins also if no exact tokens
        for going on an old one are known. Raise CallRefused and EpisodeFailed as `turn` does.
        """
        sequence = self._continued(request)
        if sequence is not None:
            sequence.busy = True
            try:
                if (turn := await self._further(sequence, request)) is not None:
                    return turn
            except BaseException:  # a cancelled call too
                sequence.busy = False
                raise
            sequence.busy = False
        return await self._first(request)

    def _continued(self, request: ChatRequest) -> ChatSequence | None:
        """Return the sequence with most messages that a request goes on, None for none.

        The request has the same tools, the sequence's messages unchanged, and further ones. A sequence
        that is busy, or whose last answer was cut before its end token, is not gone on.
        """
        keys, tools = [key_of(message) for message in request.messages], key_of(request.tools)
        fitting = [
            one for one in self.answered
            if not one.busy and one.finish == "stop" and one.tools == tools
            and len(one.keys) < len(keys) and keys[: len(one.keys)] == one.keys
        ]  # fmt: skip
        return max(fitting, key=lambda one: len(one.keys), default=None)

    async def _further(self, sequence: ChatSequence, request: ChatRequest) -> Turn | None:
        """Return the turn by which a request goes on a sequence. The sequence is not changed.

        Return None if it cannot be proven that the tokens between are exactly the template's. Raise
        CallRefused if no token is left, EpisodeFailed if the template's process failed.
        """
        *before, said = sequence.messages
        *earlier, last = sequence.tokens.ids
        prompt: Int32s = np.concatenate([sequence.prompt_ids, *earlier])
        added = request.messages[len(sequence.messages) :]
        suffix: Int32s | None = await self._in_thread(
            self._template.extend, before, said, added, request.tools, prompt, last
        )
        if suffix is None:
            return None
        left = self._limits.completion - sequence.tokens.count - len(suffix)
        if left < 1:
            raise CallRefused(
                f"the conversation has {self._limits.completion - left} tokens after its first prompt, "
                f"expected fewer than {self._limits.completion}: end it, begin one with a shorter "
                "history, or raise LEARNER_MAX_COMPLETION_LENGTH",
                code=_TOO_LONG,
            )
        return Turn(sequence, suffix, left)

    async def _first(self, request: ChatRequest) -> Turn:
        """Begin a new, busy sequence with the request's messages as its prompt; return its first turn.

        Raise CallRefused for one sequence too many; raise it and EpisodeFailed as `_prompt` too.
        """
        if len(self._all) >= self._limits.sequences:
            raise CallRefused(
                f"this rollout has {len(self._all)} sequences, and the messages go on none of them: let "
                "the agent send the answers back as they came, or raise LEARNER_AGENT_SEQUENCES"
            )
        sequence = ChatSequence(key_of(request.tools))
        self._all.append(sequence)
        try:
            sequence.prompt_ids = await self._prompt(request)
        except BaseException:  # a cancelled call too
            self._all.remove(sequence)
            raise
        return Turn(sequence, np.zeros(0, dtype="<i4"), self._limits.completion)

    async def _prompt(self, request: ChatRequest) -> Int32s:
        """Return the token ids (P,) of a request's messages, up to the beginning of the answer.

        Raise CallRefused if the template refuses the messages, or there is no id or more than a prompt
        may have; EpisodeFailed if the template's process ended or took over 10 s.
        """
        try:
            messages, tools = request.messages, request.tools
            ids: Int32s = await self._in_thread(self._template.prompt_ids, messages, tools)
        except RendererFailed as error:
            raise EpisodeFailed(f"the chat template failed: {short(error, 300)}") from error
        except ValueError as error:
            raise CallRefused(f"the chat template refuses the messages: {short(error, 300)}") from error
        if not 0 < len(ids) <= self._limits.prompt:
            raise CallRefused(
                f"the messages have {len(ids)} tokens, expected 1 to {self._limits.prompt}: send fewer, "
                "or raise LEARNER_MAX_PROMPT_LENGTH",
                code=_TOO_LONG,
            )
        return ids
