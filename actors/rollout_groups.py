"""The rollouts of a ticket: completions of one request, conversations or agents, side by side."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from penstock.actors.agents.endpoint import Endpoint
from penstock.actors.agents.rollout import AgentRollout
from penstock.actors.agents.sequences import Limits
from penstock.actors.conversation import Conversation, InThread, Sample
from penstock.actors.engine import Aborted, Engine
from penstock.actors.partial_groups import Begun, count_tokens, join, kept, rest_of
from penstock.actors.turns import TurnTemplate
from penstock.common.episodes.pool import EpisodeFailed, EpisodePool
from penstock.common.wire.contract import Contract
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Ticket

_SPARE_THREADS = 4
_SILENT_S = 2.0
"""A request that was given up sooner shows nothing: the engine may have been busy with its prompt."""


class Completions:
    """Samples rollouts without tools and environments by `engine`, with one request per ticket.

    A ticket that another actor began has a request for each completion that is not finished. `folder` is
    the model's, with its tokenizer.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._parts: dict[str, list[str]] = {}  # requests of a ticket that another actor began

    async def generate(self, request_id: str, ticket: Ticket, begun: Begun = ()) -> tuple[Rollout, ...]:
        """Return the rollouts of a ticket, as many as the ticket asks for, in the order of their seeds.

        `request_id` is the name of the request, for `abort`. Finished rollouts in `begun` are returned
        unchanged, the others are continued; () starts all of them. Raise Aborted after `abort`,
        PromptRefused if the engine cannot serve this prompt, EngineFailed if the engine is broken,
        MalformedMessage if a completion is no Rollout.
        """
        try:
            if not any(begun):
                return await self._engine.generate(
                    request_id, ticket.prompt_ids, ticket.sampling, ticket.num_generations
                )
            found = await self._continue(request_id, ticket, begun)
            if any(one is None or one.finish_reason == "cut" for one in found):
                raise Aborted(request_id, found)
        except Aborted as error:
            partial = kept(error.partial, ticket.sampling)
            lost = count_tokens(error.partial) - count_tokens(partial)
            raise Aborted(request_id, partial, lost) from error
        return cast(tuple[Rollout, ...], found)

    async def _continue(self, request_id: str, ticket: Ticket, begun: Begun) -> Begun:
        """Return the ticket's completions, side by side; after `abort` as far as they are sampled.

        If the engine fails at one, cancel the others and raise its error.
        """
        names = [f"{request_id}#{index}" for index in range(ticket.num_generations)]
        self._parts[request_id] = names
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._complete(name, ticket, index, begun[index]))
                    for index, name in enumerate(names)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            del self._parts[request_id]
        return tuple(task.result() for task in tasks)

    async def _complete(
        self, name: str, ticket: Ticket, index: int, begun: Rollout | None
    ) -> Rollout | None:
        """Return completion `index` of a ticket, of which another actor sampled `begun`.

        The rest is sampled by the request `name`. After its abort return what there is. Raise
        PromptRefused, EngineFailed or MalformedMessage if the engine does.
        """
        if begun and begun.finish_reason != "cut":
            return begun
        prompt_ids, sampling = rest_of(ticket, index, begun)
        try:
            (rest,) = await self._engine.generate(name, prompt_ids, sampling, 1)
        except Aborted as error:
            if not any(error.partial):
                return begun
            rest = cast(Rollout, error.partial[0])
        return await asyncio.to_thread(join, begun, rest, ticket.sampling.stop, self._text_of)

    def _text_of(self, token_ids: Int32s) -> str:
        """Return the text of tokens, special ones too, as the engine compares it with stop strings."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, read once."""
        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    async def abort(self, request_id: str) -> None:
        """End a ticket's request early: its `generate` raises Aborted. Ignore an unknown one."""
        for name in (request_id, *self._parts.get(request_id, ())):
            await self._engine.abort(name)

    def room(self) -> int:
        """Return how many more rollouts can start now; 0 or less if none can."""
        return self._engine.room()

    def sampled(self, request_id: str) -> int:
        """Return how many tokens a running ticket's turns have: 0, as these rollouts have no turns."""
        return 0

    def waits_for_tools(self) -> bool:
        """Return False: rollouts without tools never wait for one."""
        return False

    async def close(self) -> None:
        """Do nothing: these rollouts need only the engine, which its owner stops."""


class Conversations(Completions):
    """Samples conversations by `engine`, each with a live episode of `pool`; at most `places` at once.

    `contract` has the chat template and the limits of turns and tokens. `folder` is the model's, with
    its tokenizer. A conversation whose episode breaks becomes a rollout with a failure and without a
    reward. `close` closes the pool.
    """

    _UNPROVEN = "Conversations end at their first tool call"

    def __init__(
        self, engine: Engine, contract: Contract, folder: Path, pool: EpisodePool, places: int
    ) -> None:
        assert contract.chat is not None, "a contract with episodes has a chat template"
        super().__init__(engine, folder)
        self._template = TurnTemplate(contract.chat, folder, self._UNPROVEN)
        self._max_turns = contract.episodes.max_turns
        self._most_tokens = contract.tokens_per_sequence
        self._pool = pool
        self._places = places
        self._free = asyncio.Semaphore(places)
        # An agent occupies a thread for its whole rollout, and the template needs one meanwhile.
        self._threads = ThreadPoolExecutor(places + _SPARE_THREADS, "episode")
        self._rollouts = 0  # of the running groups
        self._requests: dict[str, dict[str, int]] = {}  # of the engine, by running group: name, index
        self._tasks: dict[str, dict[int, asyncio.Task[Rollout | None]]] = {}  # by running group, index
        self._talks: dict[tuple[str, int], Conversation] = {}  # by running group and index
        self._aborted: set[str] = set()
        self._sampled: dict[str, Counter[int]] = {}  # tokens, by running group and index
        self._silent_at = -1  # tokens that the engine had sampled when a request began that was given up

    async def generate(self, request_id: str, ticket: Ticket, begun: Begun = ()) -> tuple[Rollout, ...]:
        """Return the ticket's conversations as rollouts, in order of their index, once all ended.

        `request_id` is their common name, for `abort`. Those in `begun` are returned unchanged. A
        conversation whose episode broke has a failure. Raise EpisodeFailed unless two conversations, or
        a ticket's only one, are without a failure. After `abort` raise Aborted with the conversations
        that have ended: the others restart at their first turn, and their tokens are lost. If the
        engine fails at one, cancel the others and raise the first error: PromptRefused for this ticket's
        fault, EngineFailed for a broken engine, MalformedMessage for a completion that is no Rollout.
        """
        size = ticket.num_generations
        self._requests[request_id] = {}
        self._rollouts += size
        sampled: Counter[int] = Counter()
        self._sampled[request_id] = sampled
        try:
            found = await self._converse_all(request_id, ticket, begun or (None,) * size)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._rollouts -= size
            del self._requests[request_id], self._sampled[request_id]
            self._tasks.pop(request_id, None)
            self._aborted.discard(request_id)
        if any(one is None for one in found):
            lost = sum(sampled[index] for index, one in enumerate(found) if one is None)
            raise Aborted(request_id, found, lost)
        rollouts = tuple(one for one in found if one)
        failures = [rollout.failure for rollout in rollouts if rollout.failure]
        if size - len(failures) < min(2, size):
            broke = f"{len(failures)} of {size} episodes broke: {failures[0]}"
            raise EpisodeFailed(
                f"{broke}; expected at least {min(2, size)} whole: correct tool, environment or agent"
            )
        return rollouts

    async def _converse_all(self, request_id: str, ticket: Ticket, begun: Begun) -> Begun:
        """Return the ticket's conversations; None for each that `abort` ended. Those in `begun` stay.

        If the engine fails at one, cancel the others and raise a group with the error.
        """

        async def converse(index: int) -> Rollout | None:
            """Return conversation `index`, None after `abort`."""
            with contextlib.suppress(Aborted):
                return await self._converse(request_id, ticket, index)
            return None

        async with asyncio.TaskGroup() as group:
            missing = [index for index, one in enumerate(begun) if one is None]
            tasks = {index: group.create_task(converse(index)) for index in missing}
            self._tasks[request_id] = tasks
        ended = {index: None if task.cancelled() else task.result() for index, task in tasks.items()}
        return tuple(one or ended[index] for index, one in enumerate(begun))

    async def abort(self, request_id: str) -> None:
        """End a ticket's conversations early: `generate` raises Aborted with those that have ended.

        The engine's requests are aborted. Conversations that wait for something else, such as a tool,
        are given up with their episodes, but not for the end of one that is sampled. An unknown
        `request_id` does nothing.
        """
        if request_id in self._requests:
            self._aborted.add(request_id)
            requests = dict(self._requests[request_id])
            for index, task in self._tasks.get(request_id, {}).items():
                talk = self._talks.get((request_id, index))
                if index not in requests.values() and not (talk and talk.is_sampled):
                    task.cancel()
            for name in requests:
                await self._engine.abort(name)

    def room(self) -> int:
        """Return how many more rollouts can start now, for which engine and episodes both have a place.

        The result is 0 or less if none can.
        """
        return min(self._engine.room(), self._places - self._rollouts)

    def sampled(self, request_id: str) -> int:
        """Return how many tokens were sampled in this start of a running ticket's conversations."""
        return self._sampled[request_id].total() if request_id in self._sampled else 0

    def waits_for_tools(self) -> bool:
        """Return whether tickets are running but no request is at the engine, which samples nothing.

        Each rollout then waits for a tool, a reset, or a place. False without running tickets, and also
        if no token was sampled since a request began that was given up after 2 s: the engine may hang.
        """
        waiting = bool(self._requests) and not any(self._requests.values())
        return waiting and self._engine.tokens_generated() != self._silent_at

    async def close(self) -> None:
        """Close the pool: end its idle processes, and wait for abandoned episodes. End the threads.

        A running episode's process ends when that episode does. The threads' calls that have begun are
        not waited for, others are dropped.
        """
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _converse(self, request_id: str, ticket: Ticket, index: int) -> Rollout:
        """Return a ticket's conversation `index`, from 0; wait first for a place among the live ones.

        `request_id` is the name of the ticket's group. A broken episode gives a rollout with a failure.
        Raise Aborted after `abort`, and PromptRefused, EngineFailed or MalformedMessage if the engine
        does.
        """
        sampled = self._sampled[request_id]

        async def sample(
            name: str, prompt_ids: Int32s, sampling: Sampling, since: Version | None
        ) -> Rollout:
            """Return the engine's completion of a prompt (P,); the request is "REQUEST_ID#NAME".

            The prompt continues a conversation whose first token `since` sampled, None for a first turn.
            `abort` of the group ends the request. Raise Aborted then or if the group was aborted before,
            and PromptRefused, EngineFailed or MalformedMessage if the engine does.
            """
            if request_id in self._aborted:
                raise Aborted(request_id)
            own, began = f"{request_id}#{name}", time.monotonic()
            tokens = self._engine.tokens_generated()
            self._requests[request_id][own] = index
            try:
                (rollout,) = await self._engine.generate(own, prompt_ids, sampling, 1, since)
            except Aborted as error:
                sampled[index] += count_tokens(error.partial)
                raise
            except asyncio.CancelledError:
                if time.monotonic() - began > _SILENT_S:
                    self._silent_at = max(self._silent_at, tokens)
                raise
            finally:
                self._requests[request_id].pop(own, None)
            sampled[index] += len(rollout.token_ids)
            return rollout

        def in_thread(function: Any, *arguments: Any) -> Any:
            """Call `function(*arguments)` in one of the threads; return a future of its result."""
            return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

        async with self._free:
            if request_id in self._aborted:
                raise Aborted(request_id)
            return await self._roll_out(request_id, ticket, index, sample, in_thread)

    async def _roll_out(
        self, request_id: str, ticket: Ticket, index: int, sample: Sample, in_thread: InThread
    ) -> Rollout:
        """Hold conversation `index`, from 0, of a ticket in a new episode, and return it as a rollout.

        `sample` returns a completion of the engine, `in_thread` calls a blocking function in a thread,
        and `request_id` is not used. Raise as `_converse`: Aborted, or an error of the engine.
        """
        limits = (self._most_prompt(ticket), self._max_turns)
        talk = Conversation(ticket, index, self._template, limits)
        self._talks[request_id, index] = talk
        try:
            return await talk.run(self._pool, sample, in_thread)
        finally:
            del self._talks[request_id, index]

    def _most_prompt(self, ticket: Ticket) -> int:
        """Return the most tokens of a rollout's own prompt: the contract's less those of completions."""
        return self._most_tokens - ticket.sampling.max_tokens


class Agents(Conversations):
    """Samples the rollouts of agents, which own their loop and call the model through `endpoint`.

    Each agent has a live episode of `pool`; at most `places` run at once. `contract` has the chat
    template and the most tokens and sequences. `folder` is the model's, with its tokenizer. `endpoint`
    has been started; `close` closes it and the pool.
    """

    _UNPROVEN = "Each call of an agent begins a new sequence"

    def __init__(
        self, engine: Engine, contract: Contract, folder: Path, pool: EpisodePool, places: int,
        endpoint: Endpoint,
    ) -> None:  # fmt: skip
        super().__init__(engine, contract, folder, pool, places)
        self._most_sequences = contract.episodes.agent_sequences
        self._endpoint = endpoint
        self._live: dict[str, set[AgentRollout]] = defaultdict(set)

    async def abort(self, request_id: str) -> None:
        """End a group early: its `generate` raises Aborted, its agents are killed. Ignore other ids."""
        await super().abort(request_id)
        for rollout in tuple(self._live.get(request_id, ())):
            rollout.stop(Aborted(request_id))

    async def close(self) -> None:
        """Close the endpoint, then pool and threads. A running agent's process ends with its episode."""
        await self._endpoint.close()
        await super().close()

    async def _roll_out(
        self, request_id: str, ticket: Ticket, index: int, sample: Sample, in_thread: InThread
    ) -> Rollout:
        """Run an agent as rollout `index`, from 0, of a ticket; return what its calls sampled.

        Meanwhile `abort` finds the agent by `request_id`, its group's name. `sample` and `in_thread` are
        as for conversations. Raise Aborted after `abort`, or an error of the engine.
        """
        limits = Limits(self._most_prompt(ticket), ticket.sampling.max_tokens, self._most_sequences)
        rollout = AgentRollout(ticket, index, self._template, limits, sample, in_thread)
        self._live[request_id].add(rollout)
        try:
            return await rollout.run(self._pool, self._endpoint)
        finally:
            self._live[request_id].discard(rollout)
            if not self._live[request_id]:
                del self._live[request_id]
