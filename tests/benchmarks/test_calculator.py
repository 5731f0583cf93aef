"""The calculator's benchmark: its conversations fit its chat template, and turns can be added."""

from __future__ import annotations

import random

import numpy as np

from benchmarks.calculator import VALID_SHARE, make_talk
from benchmarks.talk_model import CHAT_TEMPLATE, make_tokenizer
from penstock.actors.tool_calls import read_calls
from penstock.actors.turns import TurnTemplate
from penstock.common.wire.contract import ChatSpec
from tests.benchmarks.talks import texts_of


def test_one_of_ten_conversations_has_the_right_call() -> None:
    draw = random.Random(1)
    talks = [make_talk(draw) for _ in range(2000)]
    right = 0
    for talk in talks:
        first, *later = texts_of(talk)
        _, calls = read_calls(first)
        right += bool(
            calls
            and not calls[0].error
            and calls[0].name == "calculate"
            and talk[0][0] == f"<user>{calls[0].arguments['expression']}=<eos><assistant>"
            and later == [str(eval(calls[0].arguments["expression"]))]
        )
    assert abs(right / len(talks) - VALID_SHARE) < 0.03


def test_the_conversations_are_those_of_the_template_and_turns_can_be_added(tmp_path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    template = TurnTemplate(ChatSpec(CHAT_TEMPLATE), tmp_path)
    draw = random.Random(2)
    for talk in (make_talk(draw) for _ in range(100)):
        whole = "".join(text for text, _ in talk)
        question = whole.removeprefix("<user>").partition("<eos>")[0]
        messages = template.messages_of(question)
        prompt = template.prompt_ids(messages, ())
        assert tokenizer.decode(prompt.tolist()) == talk[0][0]
        if len(talk) == 2:
            continue
        text, calls = read_calls(texts_of(talk)[0])
        said = {"role": "assistant", "content": text}
        said["tool_calls"] = [call.as_message for call in calls if call.name]
        answer = talk[2][0].removeprefix("<tool>").partition("<eos>")[0]
        completion = np.array([tokenizer.eos_token_id], dtype="<i4")
        suffix = template.extend(
            messages, said, [{"role": "tool", "content": answer}], (), prompt, completion
        )
        assert suffix is not None
        assert tokenizer.decode(suffix.tolist()) == talk[2][0]
