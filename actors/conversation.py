"""One rollout of several turns: the policy writes, tools answer, the policy goes on.

Waits for: a place among the live episodes, then by turns the engine and a tool.
Unblocked by: the engine, the tools' time limit, or an abort.
Produces: a Rollout whose tokens are those that the engine sampled and those between them, unchanged.
Ends when: a completion calls no tool, or a limit is reached, or the environment broke.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.actors.engine import PromptRefused
from penstock.actors.tool_calls import ToolCall
from penstock.actors.turns import Message, TurnTemplate, answer_message
from penstock.common.episodes.pool import Episode, EpisodeFailed, EpisodePool
from penstock.common.log import get_logger
from penstock.common.sandbox.frames import LONGEST_ANSWER
from penstock.common.text import SHOWN, encodable, short
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import FinishReason, Int32s, Rollout, Sampling, Span, Ticket
from penstock.common.wire.transcript import FAILED_TOOL, Transcript

log = get_logger(__name__)

InThread = Callable[..., Awaitable[Any]]
"""Runs a blocking function with its arguments in a thread: `await in_thread(function, argument)`."""

Sample = Callable[[str, Int32s, Sampling, Version | None], Awaitable[Rollout]]
"""Returns the engine's completion for a name of the request, a prompt, a sampling and `Tokens.since`."""

_NO_IDS: Int32s = np.zeros(0, dtype="<i4")
_LONGEST_SHOWN = 20_000
"""Most characters that a transcript keeps of a message that is not the policy's."""
_FULL = f"not run: the answers of this turn have over {LONGEST_ANSWER} characters"


@dataclass(slots=True)
class Tokens:
    """The tokens of a sequence after its prompt, in parts, and the spans of the sampled ones."""

    ids: list[Int32s] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    count: int = 0

    @property
    def since(self) -> Version | None:
        """Return the version that sampled the first token; None if the policy has sampled none."""
        return self.spans[0].version if self.spans else None

    def add_sampled(self, rollout: Rollout) -> None:
        """Append the tokens of a completion of the engine, and its spans, moved to their place here."""
        at = self.count
        self.spans += [replace(one, start=one.start + at, end=one.end + at) for one in rollout.spans]
        self._add(rollout.token_ids, rollout.logprobs, rollout.mask)

    def add_answer(self, ids: Int32s) -> None:
        """Append tokens `ids` (T,) that the policy did not sample: log-probability 0, mask False."""
        self._add(ids, np.zeros(len(ids), dtype="<f4"), np.zeros(len(ids), dtype=bool))

    def _add(self, ids: Int32s, logprobs: np.ndarray, mask: np.ndarray) -> None:
        """Append T tokens, their log-probabilities and their mask, (T,) each; raise `count` by T."""
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        self.masks.append(mask)
        self.count += len(ids)

    def as_rollout(
        self,
        finish: FinishReason,
        prompt_ids: Int32s = _NO_IDS,
        transcript: Transcript | None = None,
        earlier: tuple[Rollout, ...] = (),
    ) -> Rollout:
        """Return the tokens as a rollout with these values of its fields.

        Without a token, one with the id 0 that was not sampled is added first, also to this object,
        because a rollout has at least one.
        """
        if not self.count:
            self.add_answer(np.zeros(1, dtype="<i4"))
        return Rollout(
            token_ids=np.concatenate(self.ids),
            logprobs=np.concatenate(self.logprobs),
            mask=np.concatenate(self.masks),
            spans=tuple(self.spans),
            finish_reason=finish,
            prompt_ids=prompt_ids,
            transcript=transcript,
            earlier=earlier,
        )


class Conversation:
    """A conversation about one ticket, as its rollout `index`, from 0. `run` it once.

    `template` renders further turns. `limits` are the most tokens of a prompt that an environment
    extended, and the most completions whose tool calls are run (0: no limit). With 2, a third completion
    with calls ends the conversation.
    """

    def __init__(
        self, ticket: Ticket, index: int, template: TurnTemplate, limits: tuple[int, int]
    ) -> None:
        self._ticket = ticket
        self._index = index
        self._template = template
        self._most_prompt, self._max_turns = limits
        self._tokens = Tokens()
        self._messages: list[Message] = []
        self._said: list[Message] = []
        self._own_prompt = np.zeros(0, dtype="<i4")
        self._tools: Sequence[Any] = ()
        self._turns = self._calls = self._failures = 0
        self.is_sampled = False
        """Whether all of it is sampled, and only its end is left, such as the environment's reward."""

    async def run(self, pool: EpisodePool, sample: Sample, in_thread: InThread) -> Rollout:
        """Hold the conversation in a new episode of `pool`, and return it as a rollout.

        `sample` returns a completion for the name of the request, the tokens so far and a sampling.
        `in_thread` calls blocking functions in a thread. If the environment or a tool breaks, this is
        logged, and the rollout has the tokens so far, a failure and the finish reason "environment";
        else the transcript has the environment's reward. Raise what `sample` raises, such as Aborted.
        The episode is ended in any case.
        """
        episode: Episode | None = None
        try:
            episode = await begun(in_thread(pool.begin, self._ticket.columns))
            self._tools = episode.tools
            await self._begin(episode, in_thread)
            finish: FinishReason | None = None
            while finish is None:
                name = f"{self._index}.{self._turns}"
                sampled = await sample(name, self._ids_so_far(), self._sampling(), self._tokens.since)
                finish = await self._take(sampled, episode, in_thread)
            self.is_sampled = True
            return self._rollout(finish, reward=await in_thread(episode.reward))
        except (EpisodeFailed, PromptRefused) as error:
            if isinstance(error, PromptRefused) and not self._turns:
                raise  # the ticket's own prompt
            log.warning(f"Rollout {self._index} of {self._ticket.id} broke.", reason=str(error))
            return self._rollout("environment", failure=str(error))
        finally:
            if episode is not None:
                episode.abandon()

    async def _begin(self, episode: Episode, in_thread: InThread) -> None:
        """Reset the environment; store the messages, and the prompt's tokens if reset's text extends it.

        Raise EpisodeFailed if reset breaks, the template refuses its text, or the prompt gets too long.
        """
        observation = await in_thread(episode.reset)
        self._messages = self._template.messages_of(self._ticket.columns.get("prompt", ""), observation)
        if observation is None:
            return
        self._said.append({"role": "user", "content": observation})
        try:
            ids = await in_thread(self._template.prompt_ids, self._messages, self._tools)
        except ValueError as error:
            raise EpisodeFailed(f"the template refuses reset's text, change one: {error}") from error
        if len(ids) > self._most_prompt:
            raise EpisodeFailed(
                f"the prompt has {len(ids)} tokens with what reset returned, expected at most "
                f"{self._most_prompt}: return less, or raise LEARNER_MAX_PROMPT_LENGTH"
            )
        self._own_prompt = ids

    def _ids_so_far(self) -> Int32s:
        """Return the tokens of the prompt and of all turns and answers after it, in one array (L,)."""
        prompt = self._own_prompt if len(self._own_prompt) else self._ticket.prompt_ids
        ids: Int32s = np.concatenate([prompt, *self._tokens.ids])
        return ids

    def _sampling(self) -> Sampling:
        """Return the ticket's sampling for the next turn, with the tokens that are left and a new seed.

        The first turn has the ticket's seed + index. Later seeds are a hash of that seed and the turn.
        """
        asked = self._ticket.sampling
        return turn_sampling(asked, self._index, self._turns, asked.max_tokens - self._tokens.count)

    async def _take(
        self, sampled: Rollout, episode: Episode, in_thread: InThread
    ) -> FinishReason | None:
        """Add a completion and the answers to its calls. Return why the conversation ends, else None.

        The calls are run in `episode`, one after the other, by `in_thread`, until their answers
        have over 4,194,304 characters. Return the completion's own reason if it has no calls or was cut,
        "turns" if it is over the limit of completions with calls, "template" if no turn can be appended
        exactly, "length" if no token would be left. Raise EpisodeFailed if a tool broke.
        """
        prompt_ids = self._ids_so_far()
        self._tokens.add_sampled(sampled)
        self._turns += 1
        text, calls = await in_thread(self._template.read, prompt_ids, sampled.token_ids, self._tools)
        message: Message = {"role": "assistant", "content": text}
        if named := [call.as_message for call in calls if call.name]:
            message["tool_calls"] = named
        self._said.append(message)
        if sampled.finish_reason == "length" or not calls:
            return sampled.finish_reason
        if self._max_turns and self._turns > self._max_turns:
            return "turns"
        answers: list[Message] = []
        for call in calls:
            full = sum(len(one["content"]) for one in answers) > LONGEST_ANSWER
            asked = replace(call, error=_FULL) if full else call
            answers.append(await self._answer(asked, episode, in_thread))
        suffix: Int32s | None = await in_thread(
            self._template.extend, self._messages, message, answers, self._tools, prompt_ids,
            sampled.token_ids,
        )  # fmt: skip
        if suffix is None:
            return "template"
        if self._tokens.count + len(suffix) >= self._ticket.sampling.max_tokens:
            return "length"
        self._tokens.add_answer(suffix)
        self._messages += [message, *answers]
        return None

    async def _answer(self, call: ToolCall, episode: Episode, in_thread: InThread) -> Message:
        """Run a tool call, count it, and return a message with the answer, also for the transcript.

        `in_thread` runs the call in `episode`. A call with an `error` is not run: the error is the
        answer. It counts as a failure, as does a tool that raises. Raise EpisodeFailed if the episode
        broke.
        """
        self._calls += 1
        text, failed = call.error, True
        if not call.error:
            answer = await in_thread(episode.call, call.name, call.arguments)
            text, failed = answer.text, answer.failed
        self._failures += failed
        message = answer_message(call.name, text)
        self._said.append(message | {FAILED_TOOL: True} if failed else message)
        return message

    def _rollout(self, finish: FinishReason, reward: float | None = None, failure: str = "") -> Rollout:
        """Return the conversation so far as a rollout that ended by `finish`, with its transcript.

        `reward` is the environment's, None without one; `failure` says why the episode broke, "" if it
        did not.
        """
        said = tuple(shown(message) for message in self._said)
        counts = (self._turns, self._calls, self._failures)
        talk = Transcript(said, *counts, reward, failure[:SHOWN])
        return self._tokens.as_rollout(finish, self._own_prompt, talk)


def turn_sampling(asked: Sampling, index: int, turn: int, max_tokens: int) -> Sampling:
    """Return the sampling of completion `turn` of rollout `index`, both counted from 0.

    It is the ticket's sampling `asked` with `max_tokens` in place of the ticket's limit, and a seed of
    its own, which follows from the ticket's seed, `index` and `turn`.
    """
    seed = asked.seed + index
    if turn:
        digest = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little") >> 1
    return replace(asked, max_tokens=max_tokens, seed=min(seed, 2**31 - 1))


async def begun(starting: Awaitable[Episode]) -> Episode:
    """Return the episode that `starting` gives. After a cancellation of this wait raise CancelledError.

    An episode that begins after that is abandoned.
    """
    future = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(_abandon)
        raise


def _abandon(begun: asyncio.Future[Episode]) -> None:
    """End a done future's episode, without waiting; do nothing if the future failed or was cancelled."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().abandon()


def shown(message: Message) -> Message:
    """Return a copy of a message as the transcript has it, for the rewards.

    The policy's messages are whole; of another one 20,000 characters are kept.
    """
    if message["role"] == "assistant":
        return message | {"content": encodable(message["content"])}
    return message | {"content": short(message["content"], _LONGEST_SHOWN)}
