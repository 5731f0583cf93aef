"""One rollout of an agent that owns its loop: its coroutine calls the model, its tokens stay here.

Waits for: the agent's coroutine, which runs in a sandbox process and calls the actor's endpoint.
Unblocked by: the coroutine's end, the agent's time limit, an abort, or a failure of engine or template.
Produces: a Rollout of as many sequences as the agent's calls began, with the reward that it returned.
Ends when: the coroutine has returned. Calls that are open then get an error.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.actors.agents.endpoint import Endpoint
from penstock.actors.agents.form import (
    CallRefused,
    ChatRequest,
    answer,
    assistant_message,
    ended,
    key_of,
    read_request,
)
from penstock.actors.agents.sequences import Limits, Sequences
from penstock.actors.conversation import InThread, Sample, Tokens, begun, shown, turn_sampling
from penstock.actors.engine import Aborted, PromptRefused
from penstock.actors.turns import Message, TurnTemplate
from penstock.common.episodes.pool import Episode, EpisodeFailed, EpisodePool
from penstock.common.errors import PenstockError
from penstock.common.log import get_logger
from penstock.common.text import SHOWN, short
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Int32s, Rollout, Ticket
from penstock.common.wire.transcript import Transcript

_MOST_SHOWN = 2**20
"""Most characters of a transcript's messages. An agent's calls may have four times as many each."""

_FEWEST_CALLS = 4
"""Open calls that a rollout may have in any case. Else it is twice its most sequences."""

log = get_logger(__name__)


class AgentRollout:
    """Rollout `index`, from 0, of a ticket, made by an agent. `run` it once.

    Make it inside of an event loop. `template` renders the messages of the agent's calls. `limits` are
    the most tokens and sequences. `sample` returns the engine's completion for a request's name, a
    prompt and a sampling. `in_thread` calls a blocking function in a thread. `most_calls` of the agent
    may be open at a time: 4, or twice as many as it may have sequences.
    """

    def __init__(
        self, ticket: Ticket, index: int, template: TurnTemplate, limits: Limits,
        sample: Sample, in_thread: InThread,
    ) -> None:  # fmt: skip
        self._ticket = ticket
        self._index = index
        self._template = template
        self._sequences = Sequences(template, limits, in_thread)
        self._sample = sample
        self._in_thread = self._parse = in_thread
        self.most_calls = max(_FEWEST_CALLS, 2 * limits.sequences)
        self._turns = self._answers = self._calls = 0
        self._unanswered = Counter[bytes]()  # calls by the digest of body or messages
        self._over = False
        self._open: set[asyncio.Task[Any]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, pool: EpisodePool, endpoint: Endpoint) -> Rollout:
        """Run the agent in a new episode of `pool`; return the tokens of its calls, with its reward.

        The agent calls the model at `endpoint` with a key that is refused once it has ended. If the
        agent breaks, takes too long, or lacks an answer of the model (`_check_answers`), or the
        template's process failed, this is logged, and the rollout has a failure and no reward. Raise
        what the engine raised in a call, such as EngineFailed, and what `stop` was given, such as
        Aborted. In any case open calls end with an error, and the agent's process is killed soon,
        without waiting.
        """
        episode: Episode | None = None
        try:
            episode = await begun(self._in_thread(pool.begin, self._ticket.columns))
            self._parse = endpoint.parse
            with endpoint.key_for(self) as key:
                reward, metrics = await self._driven(episode, endpoint.url, key)
            self._check_answers()
            return self._rollout(reward, metrics)
        except EpisodeFailed as error:
            log.warning(f"Rollout {self._index} of {self._ticket.id} broke.", reason=str(error))
            return self._rollout(None, {}, str(error))
        finally:
            self._end_calls()
            if episode is not None:
                episode.abandon()

    def _check_answers(self) -> None:
        """Raise EpisodeFailed if the agent has no answer of the model, or gave a call up for good.

        The messages of such a call were answered neither then nor in a later call: the engine may hang.
        """
        if not self._answers:
            raise EpisodeFailed(
                "the agent returned without an answer of the model, expected one: let it call "
                "the model at base_url with api_key"
            )
        if given_up := len(self._unanswered):
            raise EpisodeFailed(
                f"the agent gave up {given_up} of its calls, expected an answer to each: "
                "raise its client's timeout, or let it send the same messages again"
            )

    async def _driven(
        self, episode: Episode, url: str, key: str
    ) -> tuple[float | None, dict[str, float]]:
        """Call the agent with `url` and `key`; return its reward, None if it has none, and its metrics.

        Raise EpisodeFailed if the agent breaks or takes too long. Raise the error that `stop` is given
        at once: the agent goes on then until its `episode` is ended.
        """
        driving = asyncio.ensure_future(self._in_thread(episode.agent, url, key))
        driving.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait((driving, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            found: tuple[float | None, dict[str, float]] = await driving
            return found
        finally:
            driving.cancel()

    def stop(self, error: Exception) -> None:
        """End the rollout soon: `run` raises the first `error`, but makes an EpisodeFailed a failure."""
        if not self._broken.done():
            self._broken.set_exception(error)

    def _end_calls(self) -> None:
        """Cancel the agent's open calls, which then end with an error, and refuse later ones."""
        self._over = True
        for task in tuple(self._open):
            task.cancel()
        if not self._broken.cancel():
            self._broken.exception()  # marks the error as seen

    async def call(self, body: bytes) -> Any:
        """Return the answer to `body`, the JSON of a call of the agent, as plain data.

        Raise CallRefused for a wrong call, and if the rollout has ended or ends meanwhile. Any other
        failure, as of engine or template, is given to `stop`, which ends the rollout: the agent's reward
        would count what is no fault of the policy. The call raises CallRefused then too.
        """
        if self._over or self._broken.done():
            raise ended()
        task = asyncio.ensure_future(self._complete(body))
        self._open.add(task)
        try:
            return await task
        except CallRefused:
            raise
        except asyncio.CancelledError:  # of this call's connection, or of `_end_calls`
            if self._over:
                raise ended() from None
            raise
        except Exception as error:  # whatever it is, no agent may turn it into a reward
            known = isinstance(error, (PenstockError, Aborted))
            if not known:
                log.exception("The endpoint of agents failed.")
            self.stop(error if known else EpisodeFailed(f"the endpoint failed: {short(repr(error))}"))
            raise ended() from error
        finally:
            self._open.discard(task)

    @contextmanager
    def _asking(self, asked: bytes) -> Iterator[None]:
        """Count a call in `_unanswered` by the digest of `asked` until the block ends.

        An end without an error is an answer to all calls that asked the same; a CallRefused takes this
        one out. Any other error, such as the cancellation of a call that its client gives up, leaves
        the call there.
        """
        digest = hashlib.sha256(asked).digest()
        self._unanswered[digest] += 1
        try:
            yield
        except CallRefused:
            self._unanswered -= Counter([digest])  # never below 0
            raise
        del self._unanswered[digest]

    async def _complete(self, body: bytes) -> Any:
        """Return the answer to `body`, the JSON of a call, as `_answer_to` does.

        Raise CallRefused for a wrong call, and the errors of `_answer_to`.
        """
        with self._asking(body):  # until it is parsed
            request = await self._parse(read_request, body, self._ticket.sampling)
        with self._asking(key_of(request.messages).encode()):
            return await self._answer_to(request)

    async def _answer_to(self, request: ChatRequest) -> Any:
        """Sample an answer to `request`, add it to its sequence, and return it for HTTP.

        Answers and tool calls are counted. Raise CallRefused for a call that does not fit, EpisodeFailed
        if the template's process failed, and the errors of `_sampled`.
        """
        async with self._sequences.turn(request) as turn:
            number, self._turns = self._turns, self._turns + 1
            prompt, most = turn.prompt, min(turn.left, request.max_tokens or turn.left)
            since = turn.sequence.tokens.since
            sampled = await self._sampled(number, prompt, most, since)
            text = self._template.text_of(sampled.token_ids.tolist())
            said, calls = await self._in_thread(
                self._template.read, prompt, sampled.token_ids, request.tools
            )
            if sampled.finish_reason != "stop" or (calls and not request.tools):  # a call may be cut
                said, calls = text, []
            message = assistant_message(text, said, calls, number)
            self._sequences.take(turn, request, sampled, message)
        self._answers += 1
        self._calls += len(message.get("tool_calls", ()))
        name, finish = f"{self._index}.{number}", sampled.finish_reason
        return answer(message, finish, len(prompt), len(sampled.token_ids), name)

    async def _sampled(self, turn: int, prompt: Int32s, most: int, since: Version | None) -> Rollout:
        """Return the engine's completion of `prompt` (L,), with up to `most` tokens, as turn `turn`.

        `since` is the version that sampled the first token of the call's sequence, None without one.
        Raise EpisodeFailed if the engine refuses a prompt, which is within the run's limits: the fault
        is this actor's, and no agent may turn it into a reward. Raise what `sample` raises, as Aborted.
        """
        sampling = turn_sampling(self._ticket.sampling, self._index, turn, most)
        try:
            return await self._sample(f"{self._index}.{turn}", prompt, sampling, since)
        except PromptRefused as error:
            raise EpisodeFailed(f"the engine refused a prompt: {short(error, 300)}") from error

    def _rollout(self, reward: float | None, metrics: dict[str, float], failure: str = "") -> Rollout:
        """Return the sequences with an answer as a rollout: the last one, with the others as `earlier`.

        The transcript has the last one's messages, `reward`, `metrics` and the `failure`, "" for none. A
        failure makes the finish reason "environment". Without an answer the rollout has one token, which
        was not sampled.
        """
        answered = self._sequences.answered
        said = _shown(answered[-1].messages) if answered else ()
        talk = Transcript(said, self._answers, self._calls, 0, reward, failure[:SHOWN], metrics)
        if not answered:
            return Tokens().as_rollout("environment", transcript=talk)
        *earlier, last = answered
        others = tuple(one.tokens.as_rollout(one.finish, one.prompt_ids) for one in earlier)
        finish = "environment" if failure else last.finish
        return last.tokens.as_rollout(finish, last.prompt_ids, talk, others)


def _shown(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return copies of the last messages, in order, of at most 2^20 characters of JSON in all.

    The policy's messages are whole; others are cut to 20,000 characters.
    """
    kept: list[Message] = []
    left = _MOST_SHOWN
    for message in map(shown, reversed(messages)):
        left -= len(key_of(message))
        if left < 0:
            break
        kept.insert(0, message)
    return tuple(kept)
