"""Agents that own their loop: the official client trains, tokens stay the engine's, keys keep apart."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from penstock.actors.agents.endpoint import Endpoint
from penstock.actors.agents.form import CallRefused
from penstock.actors.agents.rollout import AgentRollout
from penstock.actors.agents.sequences import Limits
from penstock.actors.engine import Aborted, PromptRefused
from penstock.actors.engine_watch import EngineWatch
from penstock.actors.rollout_groups import Agents
from penstock.common.config.settings import ActorSettings
from penstock.common.episodes.pool import EpisodeFailed, EpisodePool
from penstock.common.errors import ConfigError, EngineFailed
from penstock.common.own_code import digest_of, find_code
from penstock.common.wire.messages import Rollout, Sampling
from tests.actors.agent_site import AGENT, TOOL, InThread, make_contract, make_ticket, roll_out, user
from tests.actors.talking import CHATML, REWRITING, WITH_TOOLS, TalkingEngine, call_of

Client = openai.AsyncOpenAI


def make_engine(folder: Path, *script: str, moving: bool = False) -> TalkingEngine:
    return TalkingEngine(Tokenizer.from_file(str(folder / "tokenizer.json")), [*script], moving)


async def ask(client: Client, messages: list[Any], **given: Any) -> Any:
    """The choice of an answer; its message is added to the messages."""
    answer = await client.chat.completions.create(model="any", messages=messages, **given)
    messages.append(answer.choices[0].message)
    return answer.choices[0]


async def use_the_tool(client: Client) -> float:
    """A loop with a tool, written as for OpenAI's own server."""
    messages: list[Any] = [{"role": "system", "content": "Use add."}, user("What is 1+2?")]
    while True:
        choice = await ask(client, messages, tools=[TOOL])
        if choice.finish_reason != "tool_calls":
            return float(choice.message.content == "It is 3.")
        for call in choice.message.tool_calls:
            total = str(sum(json.loads(call.function.arguments).values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": total})


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["smollm2", "qwen"])
def test_a_loop_with_the_official_client_makes_one_sequence(folder: Path, template: str) -> None:
    """What is trained is the engine's last prompt and completion; each version has a span."""
    twice = f"Hm {call_of(a=1, b=2)}{call_of(a=3, b=4)}"
    engine = make_engine(folder, call_of(a=1, b=2), twice, "It is 3.", moving=True)
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(use_the_tool), template))
    turns = [engine.asked[f"g#0.{turn}"] for turn in range(3)]
    assert rollout.earlier == ()
    assert rollout.prompt_ids.tolist() == turns[0][0]
    assert turns[-1][0] + turns[-1][1] == turns[0][0] + rollout.token_ids.tolist()
    assert rollout.token_ids[rollout.mask].tolist() == [token for _, said in turns for token in said]
    assert len({span.version for span in rollout.spans}) == 3
    assert len({sampling.seed for sampling in engine.samplings.values()}) == 3
    talk = rollout.transcript
    assert talk is not None
    assert (talk.reward, talk.failure, talk.turns, talk.tool_calls) == (1.0, "", 3, 3)
    assert [one["role"] for one in talk.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert talk.messages[3] == {
        "role": "tool",
        "content": "3",
        "tool_call_id": "call00000",
        "name": "add",
    }
    assert rollout.finish_reason == "stop"


def prompts_of(rollout: Rollout, engine: TalkingEngine) -> list[int]:
    """The first turn of each sequence: its prompt is no other's beginning."""
    first = {tuple(prompt): int(name.rpartition(".")[2]) for name, (prompt, _) in engine.asked.items()}
    return [first[tuple(one.prompt_ids.tolist())] for one in rollout.sequences]


def test_a_rewritten_history_begins_a_new_sequence(folder: Path) -> None:
    async def summarise(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages)
        await ask(client, [*messages, user("b")])  # turn 1 goes on turn 0
        await ask(client, [user("a, in short")])  # turn 2 begins anew
        await ask(client, [*messages, user("other")])  # turn 3: that sequence has gone on with b
        await ask(client, [user("a"), {"role": "assistant", "content": "Mine."}, user("b")])
        return 0.25

    engine = make_engine(folder, "One.", "Two.", "Three.", "Four.", "Five.", moving=True)
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(summarise)))
    assert prompts_of(rollout, engine) == [0, 2, 3, 4]
    for one, turns in zip(rollout.sequences, ([0, 1], [2], [3], [4]), strict=True):
        prompt, said = engine.asked[f"g#0.{turns[-1]}"]
        assert prompt + said == one.prompt_ids.tolist() + one.token_ids.tolist()
        assert one.mask.sum() == sum(len(engine.asked[f"g#0.{turn}"][1]) for turn in turns)
    assert rollout.transcript is not None
    assert rollout.transcript.messages[1]["content"] == "Mine."
    assert rollout.length == sum(len(one.token_ids) for one in rollout.sequences)


class Together(TalkingEngine):
    """Samples the turns after the first one only when three of them have come."""

    waiting = 0

    async def generate(self, name: str, *request: Any) -> tuple[Rollout, ...]:
        if not name.endswith(".0"):
            self.waiting += 1
            while self.waiting < 3:
                await asyncio.sleep(0.01)
        return await super().generate(name, *request)


def test_other_tools_begin_a_new_sequence(folder: Path) -> None:
    async def change(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages, tools=[TOOL])
        await ask(client, [*messages, user("b")])
        await ask(client, [*messages, user("b")], tools=[TOOL])
        return 1.0

    engine = make_engine(folder, "One.", "Two.", "Three.")
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(change), WITH_TOOLS))
    assert [len(one.spans) for one in rollout.sequences] == [1, 2]


def test_calls_side_by_side_never_share_a_sequence(folder: Path) -> None:
    async def branch(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages)
        await asyncio.gather(*(ask(client, [*messages, user("b")]) for _ in range(3)))
        return 1.0

    engine = Together(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One.", "Two."])
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(branch)))
    longest = sorted(len(one.spans) for one in rollout.sequences)
    assert longest == [1, 1, 2], "one call goes on the first sequence, the others begin one each"
    for one in rollout.sequences:
        whole = one.prompt_ids.tolist() + one.token_ids.tolist()
        assert whole in [prompt + said for prompt, said in engine.asked.values()]


def test_a_template_that_rewrites_gives_each_call_a_sequence(folder: Path) -> None:
    async def talk(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages)
        messages.append(user("b"))
        await ask(client, messages)
        return 1.0

    engine = make_engine(folder, "One.", "Two.")
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(talk), REWRITING))
    assert prompts_of(rollout, engine) == [0, 1]
    assert all(one.mask.all() for one in rollout.sequences)


async def refusal_of(call: Awaitable[Any]) -> openai.APIStatusError:
    """The error that a call ends with."""
    with pytest.raises(openai.APIStatusError) as found:
        await call
    assert isinstance(found.value.body, dict)
    return found.value


def test_what_does_not_fit_is_refused_and_leaves_the_rollout_as_it_was(folder: Path) -> None:
    async def talk(client: Client) -> float:
        long = await refusal_of(ask(client, [user("state " * 300)]))
        assert (long.status_code, long.code) == (400, "context_length_exceeded")
        assert "LEARNER_MAX_PROMPT_LENGTH" in long.message
        messages = [user("a")]
        cut = await ask(client, messages, max_completion_tokens=3)
        assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
        messages = [user("b")]
        await ask(client, messages)
        full = await refusal_of(ask(client, [*messages, user("z " * 600)]))
        assert "LEARNER_MAX_COMPLETION_LENGTH" in full.message
        other = await refusal_of(ask(client, [user("c")]))
        assert "LEARNER_AGENT_SEQUENCES" in other.message
        return 1.0

    engine = make_engine(folder, "One, two, three.")
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(talk), sequences=2))
    assert [one.finish_reason for one in rollout.sequences] == ["length", "stop"]
    assert len(engine.asked) == 2
    assert engine.samplings["g#0.0"].max_tokens == 3


def test_a_call_in_a_completion_that_was_cut_is_not_served(folder: Path) -> None:
    """An agent would run it and go on in a new sequence, with a new limit of tokens."""

    async def talk(client: Client) -> float:
        cut = await ask(client, [user("a")], tools=[TOOL], max_completion_tokens=100)
        assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
        assert "<tool_call>" in cut.message.content
        return 1.0

    engine = make_engine(folder, call_of(a=1, b=2) + " z" * 200)
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(talk), WITH_TOOLS))
    assert rollout.finish_reason == "length"


def test_two_rollouts_neither_see_nor_write_each_others_data(folder: Path) -> None:
    """Each one's secret is in its own sequences alone, also where one goes on with the other's words."""
    both = threading.Barrier(2)
    histories: dict[str, list[Any]] = {}
    clients: dict[str, Client] = {}

    async def talk(client: Client) -> float:
        secret = f"{client.api_key[-9:]}"
        messages = [user(secret)]
        await ask(client, messages)
        histories[client.api_key] = messages
        clients[client.api_key] = client
        await asyncio.to_thread(both.wait, 60)
        (other,) = [key for key in histories if key != client.api_key]
        await ask(client, [*histories[other], user("and me")])
        return 1.0

    pool = InThread(talk)
    engine = make_engine(folder, "One.", "Two.")
    rollouts = asyncio.run(roll_out(folder, engine, pool, num_generations=2))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(set(pool.keys)) == 2
    owners = set()
    for rollout in rollouts:
        first, second = rollout.sequences
        assert len(first.spans) == len(second.spans) == 1, "the other's words are a prompt of one's own"
        text = tokenizer.decode(first.prompt_ids.tolist())
        owners.add(next(key for key in pool.keys if key[-9:] in text))
    assert owners == set(pool.keys)


def test_wrong_keys_are_refused_also_that_of_an_ended_rollout(folder: Path) -> None:
    async def look() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        assert endpoint.url.startswith("http://127.0.0.1:")
        with endpoint.key_for(Answers()) as key, endpoint.key_for(Answers()) as other:
            assert key != other
            assert len(key) > 40
            assert await status_of(endpoint, key) == 200
            for wrong in (None, "", "x", key[:-1], f"{key}x", "é", key.upper()):
                assert await status_of(endpoint, wrong) == 401
        assert await status_of(endpoint, key) == 401
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="no live rollout"):
                await ask(client, [user("a")])
        await endpoint.close()

    async def status_of(endpoint: Endpoint, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{endpoint.url}/chat/completions", data=b"{}", headers=headers) as answer,
        ):
            found = await answer.json()
            assert (answer.status == 200) or found["error"]["code"] == "invalid_api_key"
            return answer.status

    asyncio.run(look())


@pytest.mark.parametrize(
    ("method", "path", "size", "status"),
    [("POST", "/chat/completions", 5 * 2**20, 413), ("GET", "/chat/completions", 2, 405),
     ("POST", "/completions", 2, 404), ("GET", "/models", 2, 404)],
)  # fmt: skip
def test_other_requests_get_an_error_of_the_same_form(
    method: str, path: str, size: int, status: int
) -> None:
    async def look() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        with endpoint.key_for(Answers()) as key:
            headers = {"Authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    method, endpoint.url + path, data=b"0" * size, headers=headers
                ) as answer,
            ):
                assert answer.status == status
                assert "/v1/chat/completions" in (await answer.json())["error"]["message"]
        await endpoint.close()

    asyncio.run(look())


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.url.removesuffix("/v1").rpartition(":")[2])


async def exchange(endpoint: Endpoint, sent: bytes) -> tuple[int, Any]:
    """The status and the body's JSON of what comes back for these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(endpoint))
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"Content-Length: (\d+)", head)
    body = json.loads(await reader.readexactly(int(length)))
    writer.close()
    return int(head.split()[1]), body


def head_of(key: str, *lines: str) -> bytes:
    """The head of a call with this key and these lines."""
    first = ("POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}")
    return "\r\n".join([*first, *lines, "", ""]).encode()


class Answers:
    """A rollout that sends back what it got. It raises `error`, if there is one."""

    error: Exception | None = None
    most_calls = 4

    async def call(self, body: bytes) -> Any:
        if self.error is not None:
            raise self.error
        return {"body": body.decode()}


@pytest.mark.parametrize(
    ("line", "body", "status"),
    [
        ("Content-Encoding: gzip", b"no gzip", 400),
        ("Content-Encoding: gzip", gzip.compress(b"{}", mtime=0), 400),
        ("Content-Encoding: br", b"{}", 400),
        ("Content-Encoding: identity", b"{}", 200),
        ("Transfer-Encoding: chunked", b"zz\r\n{}\r\n", 400),
        ("X-Long: " + "x" * 10**4, b"{}", 400),
        ("no header", b"{}", 400),
    ],
    ids=lambda one: str(one)[:30],
)
def test_bytes_that_are_no_plain_call_get_an_error_of_the_same_form(
    line: str, body: bytes, status: int
) -> None:
    async def look() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        with endpoint.key_for(Answers()) as key:
            size = () if "chunked" in line else (f"Content-Length: {len(body)}",)
            found, answer = await exchange(endpoint, head_of(key, *size, line) + body)
            assert found == status
            assert status == 200 or answer["error"]["type"] == "invalid_request_error"
            assert (await exchange(endpoint, head_of(key, "Content-Length: 2") + b"{}"))[0] == 200
        await endpoint.close()

    asyncio.run(asyncio.wait_for(look(), 300))


def test_a_fault_of_the_endpoint_is_an_error_of_the_same_form() -> None:
    async def look() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        rollout = Answers()
        rollout.error = ZeroDivisionError("a fault of Penstock")
        with endpoint.key_for(rollout) as key:
            status, answer = await exchange(endpoint, head_of(key, "Content-Length: 2") + b"{}")
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "a fault of Penstock" in answer["error"]["message"]
        await endpoint.close()

    asyncio.run(asyncio.wait_for(look(), 300))


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after the time limit nor after the rollout's end."""

    async def look() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        with monkeypatch.context() as patch, endpoint.key_for(Answers()) as key:
            patch.setattr("penstock.actors.agents.endpoint._BODY_S", 0.2)
            status, answer = await exchange(endpoint, head_of(key, "Content-Length: 2") + b"{")
            assert (status, answer["error"]["code"]) == (408, "timeout")
        rollout = Answers()
        with endpoint.key_for(rollout) as key:
            half = head_of(key, "Content-Length: 2", "Expect: 100-continue")
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(endpoint))
            writer.write(half)
            assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        assert b" 503 " in await reader.readuntil(b"\r\n")
        writer.close()
        await endpoint.close()

    asyncio.run(asyncio.wait_for(look(), 300))


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat"], ids=["nothing", "half a head"])
def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> None:
        monkeypatch.setattr("penstock.common.transfer.connections._IDLE_S", 0.2)
        endpoint = Endpoint()
        await endpoint.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(endpoint))
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        await endpoint.close()

    asyncio.run(asyncio.wait_for(look(), 300))


def test_idle_connections_beyond_the_limit_are_closed_for_others() -> None:
    """The oldest idle one is closed, never one with an open call; without idle ones, the new one."""
    free = asyncio.Event()

    class Slow(Answers):
        async def call(self, body: bytes) -> Any:
            await free.wait()
            return await super().call(body)

    async def look() -> None:
        endpoint = Endpoint(most_connections=2)
        await endpoint.start()

        async def post(key: str, retries: int) -> object:
            client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=retries)
            async with client:
                return await client.post("/chat/completions", body={}, cast_to=object)

        opened = [await asyncio.open_connection("127.0.0.1", port_of(endpoint)) for _ in range(5)]
        reads = [asyncio.create_task(reader.read()) for reader, _ in opened]
        while sum(one.done() for one in reads) < 3:
            await asyncio.sleep(0.01)
        assert [one.done() for one in reads] == [True] * 3 + [False] * 2
        with endpoint.key_for(Slow()) as key, endpoint.key_for(Answers()) as other:
            calls = [asyncio.create_task(post(key, 0)) for _ in range(2)]
            while [one.calls for one in endpoint._live.values()] != [2, 0]:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.APIConnectionError):
                await post(other, 0)
            free.set()
            assert [await call for call in calls] == [{"body": "{}"}] * 2
            assert await post(other, 5) == {"body": "{}"}
        for _, writer in opened:
            writer.close()
        await endpoint.close()

    asyncio.run(asyncio.wait_for(look(), 300))


class Failing(TalkingEngine):
    """Raises `error` in the second turn."""

    error: Exception = EngineFailed("the engine crashed")

    async def generate(self, name: str, *request: Any) -> tuple[Rollout, ...]:
        if name.endswith(".1"):
            raise self.error
        return await super().generate(name, *request)


def failing(folder: Path, error: Exception) -> Failing:
    engine = Failing(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One."])
    engine.error = error
    return engine


async def forgive(client: Client) -> float:
    """An agent that makes a reward of 0 of every error."""
    messages = [user("a")]
    try:
        await ask(client, messages)
        await ask(client, [*messages, user("b")])
    except openai.APIError:
        return 0.0
    return 1.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineFailed("the engine crashed"), EngineFailed),
        (Aborted("g"), Aborted),
        (EpisodeFailed("the chat template failed: its process ended"), EpisodeFailed),
        (PromptRefused("the prompt is too long for ACTOR_MAX_MODEL_LEN"), EpisodeFailed),
        (ZeroDivisionError("a fault of Penstock"), EpisodeFailed),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
def test_no_agent_makes_a_reward_of_a_failure_that_is_not_its_own(
    folder: Path, error: Exception, expected: type[Exception]
) -> None:
    with pytest.raises(expected):
        asyncio.run(roll_out(folder, failing(folder, error), InThread(forgive)))


def test_a_call_more_than_may_be_open_is_refused_before_its_body_comes(folder: Path) -> None:
    async def flood(client: Client) -> float:
        port = client.base_url.port
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _, writer in opened:
            writer.write(head_of(client.api_key, "Content-Length: 4000000"))
        reads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in opened]
        answered, waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result().split()[1] for one in answered] == [b"429"]
        assert len(waiting) == 4
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*waiting, return_exceptions=True)
        retrying = client.with_options(max_retries=5)
        return float((await ask(retrying, [user("a")])).message.content == "One.")

    (rollout,) = asyncio.run(roll_out(folder, make_engine(folder, "One."), InThread(flood), sequences=1))
    assert rollout.transcript is not None
    assert rollout.transcript.reward == 1.0


def test_calls_are_read_while_asyncios_own_threads_are_busy(folder: Path) -> None:
    """The worker's calls to the queue server run in those, and calls of agents must not fill them."""

    async def talk(client: Client) -> float:
        await ask(client, [user("a")])
        return 1.0

    async def run() -> tuple[Rollout, ...]:
        free = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        blocked = asyncio.create_task(asyncio.to_thread(free.wait, 60))
        try:
            return await asyncio.wait_for(
                roll_out(folder, make_engine(folder, "One."), InThread(talk)), 30
            )
        finally:
            free.set()
            await blocked

    (rollout,) = asyncio.run(run())
    assert rollout.failure == ""


class Waiting(TalkingEngine):
    """Never ends the second turn. It is `waiting` meanwhile, and `left` is True once it was given up."""

    waiting = left = False

    async def generate(self, name: str, *request: Any) -> tuple[Rollout, ...]:
        if name.endswith(".1"):
            self.waiting = True
            try:
                await asyncio.sleep(3600)
            finally:
                self.left = True
        return await super().generate(name, *request)


def test_a_call_that_its_client_gives_up_leaves_the_sequence_as_it_was(folder: Path) -> None:
    async def impatient(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages)
        messages.append(user("b"))
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=1.5), messages)
        await ask(client, messages)
        return 1.0

    engine = Waiting(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One.", "", "Three."])
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(impatient)))
    assert rollout.earlier == ()
    assert [engine.asked[f"g#0.{turn}"][1] for turn in (0, 2)] == [
        rollout.token_ids[one.start : one.end].tolist() for one in rollout.spans
    ]


@pytest.mark.parametrize("open_at_the_end", [False, True], ids=["given up", "open at the end"])
def test_a_call_without_an_answer_sets_the_rollout_aside(folder: Path, open_at_the_end: bool) -> None:
    """An engine that hangs would make the agent's reward of 0 of it."""
    engine = Waiting(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One."])

    async def impatient(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages)
        call = asyncio.create_task(ask(client.with_options(timeout=1.5), [*messages, user("b")]))
        while not engine.waiting:
            await asyncio.sleep(0.01)
        if not open_at_the_end:
            with pytest.raises(openai.APITimeoutError):
                await call
        return 0.0

    with pytest.raises(EpisodeFailed, match="the agent gave up 1 of its calls"):
        asyncio.run(roll_out(folder, engine, InThread(impatient)))


def test_a_call_given_up_before_it_is_parsed_sets_the_rollout_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint's two threads may be busy with the calls of other rollouts."""
    parse, bodies = Endpoint.parse, list[Any]()

    def parse_the_first(self: Endpoint, *given: Any) -> Awaitable[Any]:
        bodies.append(given)
        return parse(self, *given) if len(bodies) == 1 else asyncio.sleep(3600)

    monkeypatch.setattr(Endpoint, "parse", parse_the_first)

    async def impatient(client: Client) -> float:
        await ask(client, [user("a")])
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=1.5), [user("b")])
        return 0.0

    engine = TalkingEngine(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One."])
    with pytest.raises(EpisodeFailed, match="the agent gave up 1 of its calls"):
        asyncio.run(roll_out(folder, engine, InThread(impatient)))
    assert len(bodies) == 2


def test_a_refused_call_hides_no_later_one_that_is_given_up(folder: Path) -> None:
    """One of two equal calls is answered while the other waits; the other is refused afterwards."""
    limits = Limits(500, 100, 4)

    async def look() -> None:
        rollout = AgentRollout(make_ticket(folder), 0, None, limits, None, None)  # type: ignore[arg-type]
        rollout._answers = 1

        def refused() -> None:
            with rollout._asking(b"b"):
                with rollout._asking(b"b"):
                    pass
                raise CallRefused("no place")

        with pytest.raises(CallRefused):
            refused()
        rollout._check_answers()
        with pytest.raises(asyncio.CancelledError), rollout._asking(b"b"):
            raise asyncio.CancelledError
        with pytest.raises(EpisodeFailed, match="gave up 1 of its calls"):
            rollout._check_answers()

    asyncio.run(look())


def test_a_refused_call_is_no_answer_to_another_with_the_same_messages(folder: Path) -> None:
    class OneTooMany(Waiting):
        async def generate(self, name: str, *request: Any) -> tuple[Rollout, ...]:
            if name.endswith(".2"):
                raise CallRefused("no place")
            return await super().generate(name, *request)

    engine = OneTooMany(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One."])

    async def twice(client: Client) -> float:
        await ask(client, [user("a")])
        twin = asyncio.create_task(ask(client.with_options(timeout=1.5), [user("b")]))
        while not engine.waiting:
            await asyncio.sleep(0.01)
        await refusal_of(ask(client, [user("b")]))
        with pytest.raises(openai.APITimeoutError):
            await twin
        return 0.0

    with pytest.raises(EpisodeFailed, match="the agent gave up 1 of its calls"):
        asyncio.run(roll_out(folder, engine, InThread(twice)))


def test_an_abort_ends_agents_and_open_calls_at_once(folder: Path) -> None:
    errors: list[openai.APIStatusError] = []

    async def talk(client: Client) -> float:
        messages = [user("a")]
        await ask(client, messages)
        errors.append(await refusal_of(ask(client, [*messages, user("b")])))
        return 0.0

    async def abort() -> None:
        engine = Waiting(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One."])
        endpoint = Endpoint()
        await endpoint.start()
        contract = make_contract(folder, CHATML)
        groups = Agents(engine, contract, folder, InThread(talk), 8, endpoint)  # type: ignore[arg-type]
        task = asyncio.create_task(groups.generate("g", make_ticket(folder)))
        while "g#0.0" not in engine.asked or groups.waits_for_tools():
            await asyncio.sleep(0.01)
        await groups.abort("g")
        with pytest.raises(Aborted):
            await task
        while not errors:
            await asyncio.sleep(0.01)
        await groups.close()

    asyncio.run(asyncio.wait_for(abort(), 300))
    assert errors[0].status_code == 503


def run_watched(
    folder: Path, engine: TalkingEngine, agent: Callable[[Client, Callable[[], bool]], Awaitable[float]]
) -> None:
    """Run an agent that also gets a function: whether the watch over the engine sees progress."""

    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.start()

        async def drive(client: Client) -> float:
            return await agent(client, lambda: watch.progress() != watch.progress())

        contract = make_contract(folder, CHATML)
        groups = Agents(engine, contract, folder, InThread(drive), 8, endpoint)  # type: ignore[arg-type]
        held: Any = SimpleNamespace(sampling=True)
        follower: Any = SimpleNamespace(taking=False)
        watch = EngineWatch(engine, groups, held, follower, 60.0)  # type: ignore[arg-type]
        await groups.generate("g", make_ticket(folder))
        await groups.close()

    asyncio.run(run())


def test_the_engine_is_not_taken_to_hang_while_agents_are_busy(folder: Path) -> None:
    seen: list[bool] = []

    async def think(client: Client, progresses: Callable[[], bool]) -> float:
        await ask(client, [user("a")])
        await asyncio.sleep(0.05)
        seen.append(progresses())
        return 1.0

    run_watched(folder, make_engine(folder, "One."), think)
    assert seen == [True]


@pytest.mark.parametrize(("silent_s", "expected"), [(0.1, [False, True]), (60.0, [True, True])])
def test_a_call_given_up_in_silence_is_no_progress_until_the_engine_samples_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, expected: list[bool]
) -> None:
    """Clients that give up before the actor does would hide an engine that hangs.

    One that gives up soon shows nothing: the engine may be busy with the prompt.
    """
    monkeypatch.setattr("penstock.actors.rollout_groups._SILENT_S", silent_s)
    seen: list[bool] = []
    engine = Waiting(Tokenizer.from_file(str(folder / "tokenizer.json")), ["One.", "", "Three."])

    async def impatient(client: Client, progresses: Callable[[], bool]) -> float:
        messages = [user("a")]
        await ask(client, messages)
        messages.append(user("b"))
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=1.5), messages)
        while not engine.left:
            await asyncio.sleep(0.01)
        seen.append(progresses())
        await ask(client, messages)
        seen.append(progresses())
        return 1.0

    run_watched(folder, engine, impatient)
    assert seen == expected


# With processes


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    digest = digest_of(find_code(AGENT.source, "the tests"))
    contract = make_contract(Path(), CHATML)
    spec = replace(contract.episodes, agent=replace(AGENT, digest=digest))
    with closing(EpisodePool(ActorSettings(episode_workers=8), spec)) as made:
        made.close = lambda: None  # type: ignore[method-assign]  # each test's group would close it
        yield made
        del made.close


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("raises", "agent: LookupError: no such level"),
        ("exits", r"agent killed its process \(exit code 3\)"),
        ("leaves", "agent: SystemExit: the service is lost"),
        ("hangs", "agent took more than 1 s"),
        ("never asks", "without an answer of the model"),
        ("nan", "the agent returned nan, expected a finite number"),
        ("none", "the agent returned NoneType, expected"),
        ("text", "the agent returned str, expected"),
        ("no reward", 'expected texts, at most 64, and "reward" among them'),
    ],
)
def test_a_broken_agent_fails_its_rollout_and_is_never_a_reward(
    folder: Path, pool: EpisodePool, case: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "hangs":
        monkeypatch.setattr(pool, "spec", replace(pool.spec, agent_timeout_s=1.0))
    columns = {"prompt": "What is 1+2?", "case": case}
    with pytest.raises(EpisodeFailed, match=f"1 of 1 episodes broke: .*({reason})"):
        asyncio.run(roll_out(folder, make_engine(folder, "One."), pool, columns=columns))


@pytest.mark.parametrize(
    ("case", "reward", "metrics"),
    [("", 4.0, {}), ("metrics", 0.5, {"steps": 2.0}), ("unscored", None, {})],
)
def test_an_agent_in_its_process_returns_a_reward_and_numbers(
    folder: Path, pool: EpisodePool, case: str, reward: float | None, metrics: dict[str, float]
) -> None:
    columns = {"prompt": "What is 1+2?", "case": case}
    engine = make_engine(folder, "One.")
    found = asyncio.run(roll_out(folder, engine, pool, num_generations=2, columns=columns))
    for rollout in found:
        assert rollout.transcript is not None
        assert (rollout.transcript.reward, rollout.transcript.metrics) == (reward, metrics)


def test_a_lack_of_descriptors_sets_the_rollout_aside(pool: EpisodePool) -> None:
    pool.begin({"prompt": "?"}).close()  # leaves an idle process
    idle = len(pool._idle)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(3):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(EpisodeFailed, match=r"starting the agent: .*Too many open files"):
                pool.begin({"prompt": "?"})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(pool._idle) == idle, "a process that could not be used is kept"
    pool.begin({"prompt": "?"}).close()


def test_an_agent_that_is_not_there_is_named_at_the_start() -> None:
    digest = digest_of(find_code(AGENT.source, "the tests"))
    spec = replace(
        make_contract(Path(), CHATML).episodes, agent=replace(AGENT, name="not_callable", digest=digest)
    )
    with (
        closing(EpisodePool(ActorSettings(), spec)) as made,
        pytest.raises(ConfigError, match=r"LEARNER_AGENT: .*no function or class not_callable"),
    ):
        made.describe("tests.common.test_episodes:schema_of")


def test_greedy_evaluation_goes_through_the_endpoint_too(folder: Path) -> None:
    async def talk(client: Client) -> float:
        wrong = await refusal_of(ask(client, [user("a")], temperature=1.0))
        assert "this rollout samples with 0" in wrong.message
        await ask(client, [user("a")])
        return 1.0

    engine = make_engine(folder, "One.")
    sampling = Sampling(0.0, 1.0, 0, 0.0, 1000, 7)
    (rollout,) = asyncio.run(roll_out(folder, engine, InThread(talk), sampling=sampling))
    assert np.array_equal(rollout.mask, np.ones(len(rollout.token_ids), bool))
    assert engine.samplings["g#0.0"].temperature == 0.0
