"""The rollouts of a ticket: completions of one request, conversations or agents, side by side."""

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.actors.agents.endpoint import Endpoint
from penstock.actors.agents.rollout import AgentRollout
from penstock.actors.agents.sequences import Limits
from penstock.actors.conversation import Conversation, InThread, Sample
from penstock.actors.engine import Aborted, Engine
from penstock.actors.turns import TurnTemplate
from penstock.common.episodes.pool import EpisodeFailed, EpisodePool
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Ticket

_SPARE_THREADS = 4


class Completions:
    """Samples the rollouts of a run without tools and environments: one request per ticket."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request_id: str, ticket: Ticket) -> tuple[Rollout, ...]:
        """Return the ticket's rollouts; raise as Engine.generate."""
        return await self._engine.generate(
            request_id, ticket.prompt_ids, ticket.sampling, ticket.num_generations
        )

    async def abort(self, request_id: str) -> None:
        """End a group early: its `generate` raises Aborted."""
        await self._engine.abort(request_id)

    def room(self) -> int:
        """Return how many more rollouts can start now."""
        return self._engine.room()

    def waits_for_tools(self) -> bool:
        """Return whether the engine has nothing to do because every rollout waits for a tool."""
        return False

    async def close(self) -> None:
        """End what the rollouts need beside the engine: nothing."""


class Conversations(Completions):
    """Samples conversations, each with a live episode of `pool`; at most `places` live at a time.

    `folder` is the model's, with its tokenizer. A conversation whose episode breaks becomes a rollout
    with a failure. Such a rollout has no reward.
    """

    _UNPROVEN = "Conversations end at their first tool call"

    def __init__(
        self, engine: Engine, contract: Contract, folder: Path, pool: EpisodePool, places: int
    ) -> None:
        assert contract.chat is not None, "a contract with episodes has a chat template"
        super().__init__(engine)
        self._template = TurnTemplate(contract.chat, folder, self._UNPROVEN)
        self._max_turns = contract.episodes.max_turns
        self._most_tokens = contract.tokens_per_sequence
        self._pool = pool
        self._places = places
        self._free = asyncio.Semaphore(places)
        # An agent occupies a thread for its whole rollout, and the template needs one meanwhile.
        self._threads = ThreadPoolExecutor(places + _SPARE_THREADS, "episode")
        self._rollouts = 0  # of the running groups
        self._requests: dict[str, set[str]] = {}  # of the engine, by running group
        self._aborted: set[str] = set()

    async def generate(self, request_id: str, ticket: Ticket) -> tuple[Rollout, ...]:
        """Return the ticket's conversations.

        Raise EpisodeFailed if fewer than two of several have no failure, or the only one has one. Raise
        as Engine.generate if the engine fails at one of them; the others are cancelled then.
        """
        size = ticket.num_generations
        self._requests[request_id] = set()
        self._rollouts += size
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._converse(request_id, ticket, index)) for index in range(size)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._rollouts -= size
            del self._requests[request_id]
            self._aborted.discard(request_id)
        rollouts = tuple(task.result() for task in tasks)
        failures = [rollout.failure for rollout in rollouts if rollout.failure]
        if size - len(failures) < min(2, size):
            raise EpisodeFailed(f"{len(failures)} of {size} episodes broke: {failures[0]}")
        return rollouts

    async def abort(self, request_id: str) -> None:
        """End a group early: its `generate` raises Aborted, once running tools have answered."""
        if request_id in self._requests:
            self._aborted.add(request_id)
            for name in tuple(self._requests[request_id]):
                await self._engine.abort(name)

    def room(self) -> int:
        """Return how many more rollouts can start now: engine and episodes have a place for each."""
        return min(self._engine.room(), self._places - self._rollouts)

    def waits_for_tools(self) -> bool:
        """Return whether the engine has nothing to do because every rollout waits for a tool."""
        return bool(self._requests) and not any(self._requests.values())

    async def close(self) -> None:
        """End all episodes and their threads."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _converse(self, request_id: str, ticket: Ticket, index: int) -> Rollout:
        """Return conversation `index` of a ticket. Raise as Engine.generate; Aborted after `abort`."""

        async def sample(name: str, prompt_ids: Int32s, sampling: Sampling) -> Rollout:
            """Return one completion. Raise as Engine.generate; Aborted after `abort`."""
            if request_id in self._aborted:
                raise Aborted(request_id)
            own = f"{request_id}#{name}"
            self._requests[request_id].add(own)
            try:
                (rollout,) = await self._engine.generate(own, prompt_ids, sampling, 1)
            finally:
                self._requests[request_id].discard(own)
            return rollout

        def in_thread(function: Any, *arguments: Any) -> Any:
            """Return an awaitable of the function's result, computed in a thread of the episodes."""
            return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

        async with self._free:
            if request_id in self._aborted:
                raise Aborted(request_id)
            return await self._roll_out(request_id, ticket, index, sample, in_thread)

    async def _roll_out(
        self, request_id: str, ticket: Ticket, index: int, sample: Sample, in_thread: InThread
    ) -> Rollout:
        """Return rollout `index` of a ticket, made with these functions. Raise as `_converse`."""
        limits = (self._most_prompt(ticket), self._max_turns)
        talk = Conversation(ticket, index, self._template, limits)
        return await talk.run(self._pool, sample, in_thread)

    def _most_prompt(self, ticket: Ticket) -> int:
        """Return the most tokens of a rollout's own prompt."""
        return self._most_tokens - ticket.sampling.max_tokens


class Agents(Conversations):
    """Samples the rollouts of agents that own their loop and call the model through `endpoint`."""

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
        """End a group early: its `generate` raises Aborted. The agents are killed at once."""
        await super().abort(request_id)
        for rollout in tuple(self._live.get(request_id, ())):
            rollout.stop(Aborted(request_id))

    async def close(self) -> None:
        """End all agents, their threads and the endpoint."""
        await self._endpoint.close()
        await super().close()

    async def _roll_out(
        self, request_id: str, ticket: Ticket, index: int, sample: Sample, in_thread: InThread
    ) -> Rollout:
        """Return rollout `index` of a ticket, made with these functions. Raise as `_converse`."""
        limits = Limits(self._most_prompt(ticket), ticket.sampling.max_tokens, self._most_sequences)
        rollout = AgentRollout(ticket, index, self._template, limits, sample, in_thread)
        self._live[request_id].add(rollout)
        try:
            return await rollout.run(self._pool, self._endpoint)
        finally:
            self._live[request_id].discard(rollout)
            if not self._live[request_id]:
                del self._live[request_id]
