"""The count of tokens by version, with outputs made by hand. test_vllm_engine.py has real ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.actors.token_versions import TokenVersions
from penstock.common.wire.messages import Span, Version

OLD, NEW = Version(2, 7), Version(2, 8)


class FakeLlm:
    """What TokenVersions uses of AsyncLLM: two requests, of which the second has two completions."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        parent = SimpleNamespace(external_req_id="b")
        one = SimpleNamespace(parent_req=None, external_req_id="a", request_index=0)
        several = [SimpleNamespace(parent_req=parent, request_index=index) for index in (0, 1)]
        states = {"a-x": one, "0_b-x": several[0], "1_b-x": several[1]}
        self.output_processor = SimpleNamespace(request_states=states)
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue(), get_output_async=self._get)

    async def _get(self) -> Any:
        return await self.engine_core.outputs_queue.get()

    def put(self, **tokens: int) -> None:
        """A step of the engine; the names are those of requests, with underlines."""
        names = {"a": "a-x", "b0": "0_b-x", "b1": "1_b-x", "gone": "gone"}
        outputs = [
            SimpleNamespace(request_id=names[name], new_token_ids=[5] * count)
            for name, count in tokens.items()
        ]
        self.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=outputs))


def spans(found: tuple[Span, ...]) -> list[tuple[Version, int, int]]:
    return [(span.version, span.start, span.end) for span in found]


async def played(*steps: dict[str, int] | Version) -> TokenVersions:
    """The counts after these steps of the engine and changes of the weights, in order."""
    llm = FakeLlm()
    versions = TokenVersions(llm)
    for name in "ab":
        versions.open(name)

    async def handle() -> None:
        while True:
            await llm.engine_core.get_output_async()

    handler = asyncio.create_task(handle())
    for step in steps:
        if isinstance(step, Version):
            await versions.change((step, f"hash of {step}"))
        else:
            llm.put(**step)
    await versions.change((Version(9, 9), ""))
    handler.cancel()
    return versions


def test_tokens_that_came_before_a_change_count_for_the_version_before() -> None:
    found = asyncio.run(played(OLD, {"a": 3, "b1": 1}, {"a": 1}, NEW, {"a": 2, "b0": 1, "b1": 1}))
    assert spans(found.spans("a", 0, 6)) == [(OLD, 0, 4), (NEW, 4, 6)]
    assert spans(found.spans("b", 0, 1)) == [(NEW, 0, 1)]
    assert spans(found.spans("b", 1, 2)) == [(OLD, 0, 1), (NEW, 1, 2)]
    assert found.spans("a", 0, 6)[0].hash == f"hash of {OLD}"


def test_a_version_that_returns_has_a_span_of_its_own() -> None:
    """A queue server that lost its newest data may announce an older version for a while."""
    found = asyncio.run(played(NEW, {"a": 3}, OLD, {"a": 4}, NEW, {"a": 5}))
    assert spans(found.spans("a", 0, 12)) == [(NEW, 0, 3), (OLD, 3, 7), (NEW, 7, 12)]


def test_a_version_without_tokens_has_no_span() -> None:
    found = asyncio.run(played(OLD, {"a": 2}, NEW, Version(2, 9), {"a": 1}, {"a": 0}))
    assert spans(found.spans("a", 0, 3)) == [(OLD, 0, 2), (Version(2, 9), 2, 3)]


def test_tokens_after_a_stop_string_are_left_out() -> None:
    found = asyncio.run(played(OLD, {"a": 4}, NEW, {"a": 4}))
    assert spans(found.spans("a", 0, 3)) == [(OLD, 0, 3)]
    assert spans(found.spans("a", 0, 5)) == [(OLD, 0, 4), (NEW, 4, 5)]


def test_requests_that_nobody_waits_for_are_not_counted() -> None:
    found = asyncio.run(played(OLD, {"gone": 3, "a": 1}))
    assert set(found._counts) == {"a", "b"}
    found.close("a")
    assert set(found._counts) == {"b"}
