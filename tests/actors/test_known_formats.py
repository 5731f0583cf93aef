"""Conversations in the formats of the library `renderers`: the tokens are the engine's own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from penstock.actors.rollout_groups import Conversations
from penstock.actors.tool_calls import ToolCall
from penstock.actors.turns import TurnTemplate
from penstock.common.chat import renderer
from penstock.common.chat.known_format import KnownFormat, format_of_model
from penstock.common.config.settings import ActorSettings
from penstock.common.episodes.pool import EpisodeFailed, EpisodePool
from penstock.common.errors import ConfigError
from penstock.common.wire.contract import ChatSpec
from penstock.common.wire.messages import Rollout
from tests.actors.talking import CHATML, WORDS, TalkingEngine, odd_tokens, save_chat_tokenizer
from tests.actors.test_conversations import SPEC, make_contract, make_ticket

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


@dataclass(frozen=True)
class Form:
    """A format of the library: its symbols, a call of add(a=1, b=N), and what ends a turn."""

    name: str
    end: str
    symbols: tuple[str, ...]
    call: str


_QWEN = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
FORMS = (
    Form("qwen3", "<|im_end|>", _QWEN,
         'Hm.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": %d}} </tool_call>'),
    Form("qwen3.5", "<|im_end|>", _QWEN,
         "thought</think>Hm.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
         "<parameter=b>\n%d\n</parameter>\n</function>\n</tool_call>"),
    Form("llama-3", "<|eot_id|>",
         ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
          "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
         '{"name": "add",  "parameters": {"a": 1, "b": %d}}'),
)  # fmt: skip
SYMBOLS = re.compile("(" + "|".join(re.escape(one) for form in FORMS for one in form.symbols) + ")")


class FormEngine(TalkingEngine):
    """Writes symbols whole, the text between them in odd tokens; ends a turn by the form's symbol."""

    form = FORMS[0]

    def tokens_of(self, text: str, random: np.random.Generator) -> list[int]:
        found: list[int] = []
        for part in SYMBOLS.split(text):
            symbol = self.tokenizer.token_to_id(part) if SYMBOLS.fullmatch(part) else None
            found += [symbol] if symbol is not None else odd_tokens(self.tokenizer, part, random)
        return [*found, self.tokenizer.token_to_id(self.form.end)]


def save_formats_tokenizer(folder: Path) -> None:
    """Write the tests' chat tokenizer with the symbols of all forms to a folder."""
    save_chat_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    symbols = sorted({one for form in FORMS for one in form.symbols})
    tokenizer.add_special_tokens([AddedToken(symbol, special=True) for symbol in symbols])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("formats")
    save_formats_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    made = EpisodePool(ActorSettings(episode_workers=16), replace(SPEC, schemas={"": [TOOL]}))
    yield made
    made.close()


def hold(
    folder: Path, pool: EpisodePool, form: Form, script: list[str], count: int
) -> tuple[tuple[Rollout, ...], FormEngine, list[int]]:
    """Hold conversations of one ticket; return them, their engine, and the ticket's prompt."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = FormEngine(tokenizer, script, versions_move=True)
    engine.form = form
    known = KnownFormat(form.name, tokenizer, {})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+2?"}]
    prompt = np.array(known.prompt_ids(messages, [TOOL]), dtype="<i4")
    spec = pool.spec
    ticket = replace(make_ticket(folder, CHATML, spec, num_generations=count), prompt_ids=prompt)
    contract = make_contract(folder, CHATML, spec)
    contract = replace(contract, chat=replace(contract.chat, renderer=form.name))

    async def talk() -> tuple[Rollout, ...]:
        return await Conversations(engine, contract, folder, pool, 16).generate("g", ticket)

    return asyncio.run(talk()), engine, prompt.tolist()


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_the_tokens_are_those_of_the_engine(folder: Path, pool: EpisodePool, form: Form) -> None:
    """As for chat templates: each prompt goes on the last one, and what is trained is what was asked."""
    random = np.random.default_rng(1)
    for first in range(2):
        script = [form.call % turn for turn in (first, 12, 7)]
        script.append(("" if form.name == "llama-3" else "</think>") + " ".join(random.choice(WORDS, 4)))
        rollouts, engine, begin = hold(folder, pool, form, script, 17)
        for index, rollout in enumerate(rollouts):
            turns = [pair for name, pair in engine.asked.items() if name.startswith(f"g#{index}.")]
            assert len(turns) == 4
            assert turns[0][0] == begin
            for (prompt, completion), (longer, _) in pairwise(turns):
                assert longer[: len(prompt) + len(completion)] == prompt + completion
            prompt, completion = turns[-1]
            assert prompt + completion == begin + rollout.token_ids.tolist()
            sampled = [token for _, written in turns for token in written]
            assert rollout.token_ids[rollout.mask].tolist() == sampled
            assert rollout.transcript is not None
            answers = [one["content"] for one in rollout.transcript.messages if one["role"] == "tool"]
            assert answers == [str(1 + turn) for turn in (first, 12, 7)]
            assert rollout.finish_reason == "stop"


@pytest.mark.parametrize(
    "text", ["[" * 9999, '{"name": "add", "arguments": ' + "[" * 40 + "]" * 40 + "}"]
)
def test_what_a_policy_writes_never_fails_its_ticket(folder: Path, pool: EpisodePool, text: str) -> None:
    script = [f"<tool_call>{text}</tool_call>", "It is 3."]
    (rollout,), _, _ = hold(folder, pool, FORMS[0], script, 1)
    assert rollout.failure == ""
    assert rollout.transcript is not None
    assert rollout.transcript.tool_calls == rollout.transcript.tool_failures


def test_a_completion_that_takes_the_library_minutes_costs_its_rollout_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "_LIMIT_S", 2.0)
    template = TurnTemplate(ChatSpec(CHATML, {}, "", "qwen3.5"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tags = "<parameter=a>" * 20_000
    texts = ("", f"<tool_call><function=f>{tags}</tool_call>", FORMS[1].call % 2)
    none, slow, fine = (np.array(tokenizer.encode(text).ids, dtype="<i4") for text in texts)
    with pytest.raises(EpisodeFailed, match="took over 2 s to read a completion"):
        template.read(none, slow, [TOOL])
    assert template.read(none, fine, [TOOL])[1] == [ToolCall("add", {"a": 1, "b": 2})]


def test_a_known_model_has_its_format_by_its_id() -> None:
    assert format_of_model("Qwen/Qwen3-0.6B") == "qwen3"
    assert format_of_model("/models/Qwen3-0.6B") == ""


@pytest.mark.parametrize(("name", "found"), [("qwen4", "no such format"), ("gpt-oss", "does not fit")])
def test_a_format_that_cannot_be_used_is_named(folder: Path, name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=f"LEARNER_RENDERER={name}.*{found}"):
        TurnTemplate(ChatSpec(CHATML, {}, "", name), folder)
