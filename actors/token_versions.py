"""Which version of the weights sampled each token: vLLM 0.32 reports it, the versions before do not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Span

Label = tuple[Version, str]
"""A version of the weights and their hash."""


class TokenVersions:
    """Counts the tokens of each completion by the label that was in use when they were sampled.

    `llm` is an AsyncLLM that has not run yet. Its outputs are counted as they come from the engine's
    process, before anybody else sees them. All versions of vLLM are counted alike.
    """

    def __init__(self, llm: Any) -> None:
        self._label: Label | None = None
        self._requests = llm.output_processor.request_states
        self._waiting = llm.engine_core.outputs_queue
        # By request and index of completion: each label with its number of tokens, in their order.
        self._counts: dict[str, dict[int, list[tuple[Label, int]]]] = {}
        llm.engine_core.get_output_async = self._counting(llm.engine_core.get_output_async)

    def _counting(self, get: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """Return `get`, vLLM's source of outputs, with a count of their tokens."""

        async def get_output_async() -> Any:
            outputs = await get()
            for output in outputs.outputs:
                self._count(output)
            return outputs

        return get_output_async

    def _count(self, output: Any) -> None:
        """Add the new tokens of one output to the counts of its completion, if its request is open.

        An aborted request is unknown to vLLM already: its last tokens reach nobody.
        """
        request = self._requests.get(output.request_id)
        if request is None or self._label is None:
            return
        completions = self._counts.get((request.parent_req or request).external_req_id)
        if completions is not None and output.new_token_ids:
            counts = completions.setdefault(request.request_index, [])
            count = len(output.new_token_ids)
            if counts and counts[-1][0] == self._label:
                count += counts.pop()[1]
            counts.append((self._label, count))

    async def change(self, label: Label) -> None:
        """Count all tokens that come later under `label`. Call this while vLLM is paused.

        First wait for the outputs that have come from the engine's process and are not counted yet:
        they are in the queue before vLLM's answer that it is paused. The caller sets the deadline.
        """
        while not self._waiting.empty():
            await asyncio.sleep(0)
        self._label = label

    def open(self, request_id: str) -> None:
        """Begin to count the tokens of a request, before vLLM gets it."""
        self._counts[request_id] = {}

    def close(self, request_id: str) -> None:
        """Forget the counts of a request."""
        del self._counts[request_id]

    def spans(self, request_id: str, index: int, length: int) -> tuple[Span, ...]:
        """Return the spans of the first `length` tokens of an open request's completion `index`.

        Tokens that follow a stop string are no part of the completion.
        """
        spans = []
        start = 0
        for (version, weights_hash), count in self._counts[request_id].get(index, []):
            end = min(start + count, length)
            if end > start:
                spans.append(Span(version, start, end, weights_hash))
            start = end
        return tuple(spans)
