"""Conversations with live episodes: their tokens are the engine's own, and their ends are named."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from penstock.actors import conversation
from penstock.actors.conversation import shown
from penstock.actors.engine import Aborted, PromptRefused
from penstock.actors.rollout_groups import Conversations
from penstock.actors.tool_calls import read_calls
from penstock.actors.turns import TurnTemplate, answer_message
from penstock.common.config.settings import ActorSettings
from penstock.common.episodes.pool import EpisodeFailed, EpisodePool
from penstock.common.own_code import digest_of, find_code
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import ChatSpec, Contract
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.common.wire.messages import Group, Rollout, Sampling, Ticket, Version
from penstock.common.wire.reward_spec import RewardSpec
from penstock.common.wire.transcript import FAILED_TOOL
from tests.actors.talking import CHATML, HEADERS, REWRITING, WITH_TOOLS, WORDS, TalkingEngine, call_of

SOURCE = str(Path(__file__).with_name("tools_of_tests.py"))
DIGEST = digest_of(find_code(SOURCE, "the tests"))
ADD, WAIT, COUNTER = (OwnCode(name, SOURCE, DIGEST) for name in ("add", "wait", "Counter"))
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"a": "é", "b": "<|im_end|>"}}}
SPEC = EpisodeSpec((ADD, WAIT), (), {"": [SCHEMA]}, 0, 20.0)
WITH_COUNTER = replace(SPEC, environments=(COUNTER,), schemas={"Counter": [SCHEMA]})

Converse = Callable[..., tuple[tuple[Rollout, ...], TalkingEngine]]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, EpisodePool]]:
    settings = ActorSettings(episode_workers=16)
    found = {"": EpisodePool(settings, SPEC), "Counter": EpisodePool(settings, WITH_COUNTER)}
    yield found
    for pool in found.values():
        pool.close()


def make_contract(folder: Path, template: str, spec: EpisodeSpec, longest: int = 2000) -> Contract:
    return Contract(
        str(folder), "", "float32", longest, (RewardSpec("accuracy"),), True, 4, 8,
        episodes=spec, chat=ChatSpec(template, {}, "Be brief."),
    )  # fmt: skip


def make_ticket(folder: Path, template: str, spec: EpisodeSpec, **changes: Any) -> Ticket:
    """A ticket whose prompt the learner rendered by the template."""
    columns = {"prompt": "What is 1+2?"} | changes.pop("columns", {})
    turns = TurnTemplate(ChatSpec(template, {}, "Be brief."), folder)
    ids = turns.prompt_ids(turns.messages_of(columns["prompt"]), spec.tools_of(columns))
    values: dict[str, Any] = {
        "id": "train:0", "purpose": "train", "prompt_ids": ids, "num_generations": 2,
        "sampling": Sampling(1.0, 1.0, 0, 0.0, 1000, 7), "version": Version(1, 0), "min_step": 0,
        "contract": "", "columns": columns,
    }  # fmt: skip
    return Ticket(**(values | changes))


@pytest.fixture
def converse(folder: Path, pools: dict[str, EpisodePool]) -> Converse:
    """Hold the conversations of one ticket with an engine that writes `script`."""

    def run(
        script: list[str], template: str = CHATML, environment: str = "", max_turns: int = 0,
        moving: bool = False, longest: int = 2000, forged: object = None, **changes: Any,
    ) -> tuple[tuple[Rollout, ...], TalkingEngine]:  # fmt: skip
        spec = replace(WITH_COUNTER if environment else SPEC, max_turns=max_turns)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        engine = TalkingEngine(tokenizer, script, moving)
        ticket = make_ticket(folder, template, spec, **changes)
        ticket = replace(ticket, columns={"prompt": forged}) if forged else ticket
        contract = make_contract(folder, template, spec, longest)

        async def talk() -> tuple[Rollout, ...]:
            groups = Conversations(engine, contract, folder, pools[environment], 16)
            return await groups.generate("g", ticket)

        found = asyncio.run(talk())
        assert decode(encode(Group(ticket, found, "actor")), Group).rollouts[0].transcript
        return found, engine

    return run


def requests_of(engine: TalkingEngine, index: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each turn of a conversation, as the engine had them."""
    return [pair for name, pair in engine.asked.items() if re.fullmatch(rf"g#{index}\.\d+", name)]


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, HEADERS], ids=["smollm2", "qwen", "llama"])
def test_the_tokens_are_those_of_the_engine(converse: Converse, folder: Path, template: str) -> None:
    """What is trained is the engine's last prompt and completion, and each prompt goes on the last."""
    random = np.random.default_rng(1)
    for first in range(4):
        script = [
            " ".join(random.choice(WORDS, 6)) + call_of(a=first, b=int(turn))
            for turn in random.integers(0, 99, size=3)
        ]
        rollouts, engine = converse([*script, "It is 3."], template, num_generations=17, moving=True)
        for index, rollout in enumerate(rollouts):
            turns = requests_of(engine, index)
            assert len(turns) == 4
            for (prompt, completion), (longer, _) in pairwise(turns):
                assert longer[: len(prompt) + len(completion)] == prompt + completion
            prompt, completion = turns[-1]
            beginning = turns[0][0]
            assert prompt + completion == beginning + rollout.token_ids.tolist()
            sampled = [token for _, written in turns for token in written]
            assert rollout.token_ids[rollout.mask].tolist() == sampled
            assert [rollout.token_ids[one.start : one.end].tolist() for one in rollout.spans] == [
                written for _, written in turns
            ]
            assert len({one.version for one in rollout.spans}) == 4
            since = [engine.since[f"g#{index}.{turn}"] for turn in range(4)]
            assert since == [None, *[rollout.spans[0].version] * 3]
            between = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
                rollout.token_ids[~rollout.mask].tolist(), skip_special_tokens=False
            )
            assert between.count("assistant") == 3
            assert rollout.finish_reason == "stop"


def test_a_sampled_text_that_is_tokenized_again_would_be_another_one(
    converse: Converse, folder: Path
) -> None:
    """The engine's tokens are odd ones, so the test above would notice a second tokenization."""
    (rollout, *_), _ = converse([call_of(a=1, b=2), "It is 3."])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False).ids != rollout.token_ids.tolist()


def test_a_template_that_rewrites_what_was_said_ends_the_conversation(converse: Converse) -> None:
    rollouts, engine = converse([call_of(a=1, b=2), "It is 3."], REWRITING)
    assert {rollout.finish_reason for rollout in rollouts} == {"template"}
    assert all(rollout.mask.all() for rollout in rollouts)
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("<|im_end|>\n", "\n", 1),
        CHATML + "{% if messages[-1].role == 'tool' %}{{ messages[-2].content | length }}{% endif %}",
        CHATML.replace("{% if add", "{{ 'rewritten' if messages | length > 2 }}{% if add"),
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML,
    ],
    ids=["no end token", "depends on the text", "prompt rewritten", "raises"],
)
def test_where_exactness_is_not_proven_nothing_is_added(converse: Converse, template: str) -> None:
    (rollout, *_), _ = converse([call_of(a=1, b=2), "It is 3."], template)
    assert rollout.finish_reason == "template"
    assert rollout.mask.all()


def test_truncation_in_tokenizer_json_cuts_no_turn(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = np.array([tokenizer.token_to_id("<|im_end|>")], dtype="<i4")
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said, answer = {"role": "assistant", "content": "a"}, answer_message("add", "1 and 2 are 3")
    plain, left = (
        TurnTemplate(ChatSpec(CHATML), place).extend([], said, [answer], [], end, end)
        for place in (folder, tmp_path)
    )
    assert plain.tolist() == left.tolist()


def test_of_a_completion_only_an_end_token_is_left_out(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("</answer>", special=False), AddedToken("</s>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = TurnTemplate(ChatSpec(CHATML, {"eos_token": "</s>"}), tmp_path)
    for end, expected in (("<|im_end|>", "3"), ("</s>", "3"), ("</answer>", "3</answer>")):
        assert template.text_of(tokenizer.encode(f"3{end}").ids) == expected


def test_the_answers_of_tools_are_in_the_transcript(converse: Converse) -> None:
    text = f"First {call_of(a=1, b=2)}{call_of('no_such')}{call_of(c=3)}<tool_call>[</tool_call>"
    (rollout, *_), _ = converse([text, "It is 3."])
    talk = rollout.transcript
    assert talk is not None
    roles = [message["role"] for message in talk.messages]
    assert roles == ["assistant", "tool", "tool", "tool", "tool", "assistant"]
    assert talk.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert "no tool 'no_such'" in talk.messages[2]["content"]
    assert "unexpected keyword argument 'c'" in talk.messages[3]["content"]
    assert "no JSON" in talk.messages[4]["content"]
    assert [message.get(FAILED_TOOL, False) for message in talk.messages[1:5]] == [False, *[True] * 3]
    assert (talk.turns, talk.tool_calls, talk.tool_failures) == (2, 4, 3)
    assert (talk.reward, talk.failure) == (None, "")


def test_after_long_answers_other_calls_of_a_turn_are_not_run(converse: Converse, monkeypatch) -> None:
    monkeypatch.setattr(conversation, "LONGEST_ANSWER", 1)
    (rollout, *_), _ = converse([call_of(a=9, b=2) + call_of(a=1, b=2), "It is 3."])
    assert rollout.transcript is not None
    answers = [message["content"] for message in rollout.transcript.messages[1:3]]
    assert answers == ["11", conversation._FULL]


def test_a_refused_later_turn_costs_its_rollout_and_a_refused_first_one_the_ticket(
    converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [call_of(a=1, b=2), "It is 3."]

    def refuse(refused: str) -> None:
        text_for = TalkingEngine.text_for

        def text_or_refusal(engine: TalkingEngine, name: str) -> str:
            if name == refused:
                raise PromptRefused("the prompt is too long")
            return text_for(engine, name)

        monkeypatch.setattr(TalkingEngine, "text_for", text_or_refusal)

    refuse("g#1.1")
    rollouts, _ = converse(script, num_generations=3)
    assert [rollout.finish_reason for rollout in rollouts] == ["stop", "environment", "stop"]
    assert "the prompt is too long" in rollouts[1].failure
    refuse("g#0.0")
    with pytest.raises(PromptRefused):
        converse(script, num_generations=3)


def test_what_the_policy_wrote_is_whole_in_the_transcript() -> None:
    long = "a" * 25_000 + r"\boxed{42}"
    assert shown({"role": "assistant", "content": long})["content"] == long
    assert len(shown({"role": "tool", "name": "look", "content": long})["content"]) == 20_000


def test_the_ends_of_a_conversation_are_told_apart(converse: Converse) -> None:
    always = [call_of(a=1, b=2)]
    (rollout, *_), engine = converse(always, max_turns=2)
    assert rollout.finish_reason == "turns"
    assert len(requests_of(engine, 0)) == 3
    assert rollout.mask[-1]
    sampling = Sampling(1.0, 1.0, 0, 0.0, 150, 7)
    (rollout, *_), engine = converse(always, sampling=sampling)
    assert rollout.finish_reason == "length"
    assert len(rollout.token_ids) <= 150
    assert rollout.mask[-1], "an answer that leaves no room for a token is not added"
    first = len(engine.asked["g#0.0"][0])
    for turn in range(len(requests_of(engine, 0))):
        name = f"g#0.{turn}"
        assert len(engine.asked[name][0]) - first + engine.samplings[name].max_tokens == 150


def test_turns_and_rollouts_have_seeds_of_their_own(converse: Converse) -> None:
    _, engine = converse([call_of(a=1, b=2), call_of(a=1, b=2), "It is 3."])
    assert len({sampling.seed for sampling in engine.samplings.values()}) == 6
    _, again = converse([call_of(a=1, b=2), call_of(a=1, b=2), "It is 3."])
    seeds = [{name: one.seed for name, one in each.samplings.items()} for each in (engine, again)]
    assert seeds[0] == seeds[1]


def test_an_environment_extends_the_prompt_and_gives_the_reward(
    converse: Converse, folder: Path
) -> None:
    script = [call_of("up", by=2), call_of("up", by=3), "Done."]
    rollouts, engine = converse(script, environment="Counter", columns={"start": 5})
    for index, rollout in enumerate(rollouts):
        assert rollout.transcript is not None
        assert rollout.transcript.reward == 10.0, "each rollout has an environment of its own"
        assert requests_of(engine, index)[0][0] == rollout.prompt_ids.tolist()
        text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(rollout.prompt_ids.tolist())
        assert "What is 1+2? It stands at 5." in text
        assert rollout.transcript.messages[0]["content"] == " It stands at 5."
    (rollout, *_), _ = converse(script, environment="Counter")
    assert len(rollout.prompt_ids) == 0


@pytest.mark.parametrize(
    ("fails", "step"), [("reset", "reset"), ("tool", "tool up"), ("reward", "get_reward")]
)
def test_a_broken_environment_fails_the_attempt_and_names_the_step(
    converse: Converse, fails: str, step: str
) -> None:
    with pytest.raises(EpisodeFailed, match=f"2 of 2 episodes broke: {step}"):
        converse([call_of("up", by=1), "."], environment="Counter", columns={"fails": fails})


@pytest.mark.parametrize("prompt", [[5], ["ab"]])
def test_a_forged_prompt_fails_its_ticket_alone(converse: Converse, prompt: object) -> None:
    with pytest.raises(EpisodeFailed, match="another thing than messages"):
        converse(["."], forged=prompt)


def test_a_prompt_that_reset_makes_too_long_is_a_failure(converse: Converse) -> None:
    with pytest.raises(EpisodeFailed, match="tokens with what reset returned, expected at most 10"):
        converse(["."], environment="Counter", columns={"start": 5}, longest=1010)


class OneHangs(TalkingEngine):
    """Rollout 0 calls a tool that takes too long; the others end."""

    def text_for(self, name: str) -> str:
        hangs = name.startswith("g#0.")
        return call_of("wait", seconds=60) if hangs else "It is 3."


def test_one_broken_episode_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, step_timeout_s=3.0)
    engine = OneHangs(Tokenizer.from_file(str(folder / "tokenizer.json")), [])
    pool = EpisodePool(ActorSettings(episode_workers=4), spec)
    ticket = make_ticket(folder, CHATML, spec, num_generations=4)

    async def talk() -> tuple[Rollout, ...]:
        groups = Conversations(engine, make_contract(folder, CHATML, spec), folder, pool, 4)
        return await groups.generate("g", ticket)

    try:
        first, *others = asyncio.run(talk())
    finally:
        pool.close()
    assert first.finish_reason == "environment"
    assert first.failure == "tool wait took more than 3 s"
    assert {rollout.failure for rollout in others} == {""}


def test_an_aborted_group_samples_no_further_turn(folder: Path, pools: dict[str, EpisodePool]) -> None:
    engine = TalkingEngine(
        Tokenizer.from_file(str(folder / "tokenizer.json")), [call_of("wait", seconds=0.5), "."]
    )
    ticket = make_ticket(folder, CHATML, SPEC)

    async def talk() -> None:
        groups = Conversations(engine, make_contract(folder, CHATML, SPEC), folder, pools[""], 16)
        task = asyncio.create_task(groups.generate("g", ticket))
        while len(engine.asked) < 2 or not groups.waits_for_tools():
            await asyncio.sleep(0.01)
        assert groups.room() == 14
        await groups.abort("g")
        with pytest.raises(Aborted):
            await task
        assert groups.room() == 16

    asyncio.run(asyncio.wait_for(talk(), 300))
    assert len(engine.asked) == 2


class HalfTalkingEngine(TalkingEngine):
    """Conversation 1 ends with its first turn; the others call a tool."""

    def text_for(self, name: str) -> str:
        return "." if "#1." in name else super().text_for(name)


def test_an_aborted_group_keeps_the_conversations_that_ended(
    folder: Path, pools: dict[str, EpisodePool]
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = HalfTalkingEngine(tokenizer, [call_of("wait", seconds=1000), "."])
    ticket = make_ticket(folder, CHATML, SPEC)

    async def talk() -> tuple[Aborted, tuple[Rollout, ...]]:
        groups = Conversations(engine, make_contract(folder, CHATML, SPEC), folder, pools[""], 16)
        task = asyncio.create_task(groups.generate("g", ticket))
        while "g#0.0" not in engine.asked or not groups._tasks["g"][1].done():
            await asyncio.sleep(0.01)
        await groups.abort("g")
        with pytest.raises(Aborted) as aborted:
            await task  # long before the tool would end
        engine.script[0] = call_of("wait", seconds=0)
        return aborted.value, await groups.generate("h", ticket, aborted.value.partial)

    aborted, rollouts = asyncio.run(asyncio.wait_for(talk(), 300))
    begun, ended = aborted.partial
    assert begun is None
    assert ended is not None
    assert aborted.lost == len(engine.asked["g#0.0"][1])
    assert rollouts[1] is ended
    assert rollouts[0].transcript.turns == 2
    assert [name for name in engine.asked if name.startswith("h")] == ["h#0.0", "h#0.1"]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1}, "")]),
        ('<|python_tag|>{"name": "add", "arguments": {}}', "", [("add", {}, "")]),
        ('{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', []),
        ("12 {", "12 {", []),
        ("<think><tool_call>{}</tool_call></think>no", "<think><tool_call>{}</tool_call></think>no", []),
        (
            '<think>a</think>\n<tool_call>{"name": "add"}</tool_call>',
            "<think>a</think>",
            [("add", {}, "")],
        ),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1}, "")]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", {}, "")]),
        ('<tool_call>{"name": "add", "arguments": ""}</tool_call>', "", [("add", {}, "")]),
        ('<tool_call>{"name": 7}</tool_call>x', "x", [("", {}, "no name")]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", [("add", {}, "JSON map")]),
    ],
)
def test_the_calls_in_a_text(text: str, said: str, calls: list[tuple[str, dict, str]]) -> None:
    found, made = read_calls(text)
    assert found == said
    assert [(one.name, dict(one.arguments)) for one in made] == [(name, a) for name, a, _ in calls]
    for one, (_, _, error) in zip(made, calls, strict=True):
        assert error in one.error if error else not one.error


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1' + "0" * 40 + "}", '{"a": ' + "[" * 20 + "]" * 20 + "}", '{"a": "\\ud800"}', "[" * 9999],
    ids=["a long number", "nested", "half a character", "brackets"],
)
def test_what_a_policy_writes_never_fails_its_ticket(converse: Converse, arguments: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    (rollout, *_), _ = converse([text, "It is 3."], sampling=Sampling(1.0, 1.0, 0, 0.0, 30_000, 7))
    assert rollout.transcript is not None
    assert (rollout.transcript.tool_calls, rollout.transcript.tool_failures) == (1, 1)
    assert rollout.finish_reason == "stop"


def test_an_episode_that_begins_after_a_cancellation_is_ended(
    folder: Path, pools: dict[str, EpisodePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when another rollout of the group was aborted while this one's process started."""
    began, ended, go_on = threading.Event(), threading.Event(), threading.Event()

    class Late:
        def abandon(self) -> None:
            ended.set()

    def begin(row: object) -> Any:
        began.set()
        go_on.wait(60)
        return Late()

    monkeypatch.setattr(pools[""], "begin", begin)
    engine = TalkingEngine(Tokenizer.from_file(str(folder / "tokenizer.json")), ["."])
    ticket = make_ticket(folder, CHATML, SPEC, num_generations=1)

    async def talk() -> None:
        groups = Conversations(engine, make_contract(folder, CHATML, SPEC), folder, pools[""], 16)
        task = asyncio.create_task(groups.generate("g", ticket))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.to_thread(ended.wait, 60)

    asyncio.run(talk())
    assert ended.is_set()


def test_a_template_whose_process_is_killed_is_a_failure_and_no_reward(
    folder: Path, pools: dict[str, EpisodePool]
) -> None:
    """The environment would give 0 for the number that it has not reached yet."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ticket = make_ticket(folder, CHATML, WITH_COUNTER)
    contract = make_contract(folder, CHATML, WITH_COUNTER)

    class Kills(TalkingEngine):
        """Kills the template's process while the engine samples the second turn."""

        async def generate(self, name: str, *request: Any) -> tuple[Rollout, ...]:
            if name.endswith(".1"):
                with suppress(ProcessLookupError):
                    os.kill(groups._template._renderer.pid, signal.SIGKILL)
            return await super().generate(name, *request)

    engine = Kills(tokenizer, [call_of("up", by=1)])
    groups: Any = None

    async def talk() -> tuple[Rollout, ...]:
        nonlocal groups
        groups = Conversations(engine, contract, folder, pools["Counter"], 16)
        return await groups.generate("g", ticket)

    with pytest.raises(EpisodeFailed, match="the chat template gave no text"):
        asyncio.run(talk())
