"""A question to a prompt."""

from __future__ import annotations

import pytest

from penstock.common.errors import ConfigError
from penstock.learner.data.templates import R1_PROMPT, Template
from tests.learner.builders import make_settings


class ChatTokenizer:
    """Encodes a text as itself; its own template writes role:content|."""

    def __init__(self, chat_template="own"):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens):
        return type("Encoding", (), {"input_ids": ("<s>" if add_special_tokens else "") + text})()

    def apply_chat_template(self, messages, chat_template, tokenize, add_generation_prompt):
        head = f"[{chat_template}]" if chat_template else ""
        return head + "".join(f"{m['role']}:{m['content']}|" for m in messages) + "assistant:"


def render(prompt, chat_template="own", **settings):
    return Template(make_settings(**settings), ChatTokenizer(chat_template)).render(prompt)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]


@pytest.mark.parametrize(
    ("prompt", "chat_template", "settings", "expected"),
    [
        ("1+1=", "own", {}, "user:1+1=|assistant:"),
        ("1+1=", None, {}, "<s>1+1="),
        ("1+1=", "own", {"prompt_template": "none"}, "<s>1+1="),
        (MESSAGES, None, {}, "<s>Be brief.\n1+1=?"),
        (MESSAGES, "own", {}, "system:Be brief.|user:1+1=?|assistant:"),
        ("1+1=", "own", {"system_prompt": "Think."}, "system:Think.|user:1+1=|assistant:"),
        ("1+1=", None, {"system_prompt": "Think."}, "<s>Think.\n1+1="),
        ("1+1=", "own", {"prompt_template": "r1"}, f"system:{R1_PROMPT}|user:1+1=|assistant:"),
        ("1+1=", None, {"prompt_template": "r1"}, f"<s>{R1_PROMPT}\nUser: 1+1=\nAssistant:"),
        (
            "1+1=", "own", {"prompt_template": "qwen_r1"},
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{R1_PROMPT}Put your final answer within \\boxed{{}}.\n1+1=<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)  # fmt: skip
def test_a_question_becomes_a_prompt(prompt, chat_template, settings, expected):
    assert render(prompt, chat_template, **settings) == expected


def test_template_and_system_prompt_may_be_files(tmp_path):
    (tmp_path / "own.jinja").write_text("mine")
    (tmp_path / "system.txt").write_text("Think.")
    found = render(
        "1+1=",
        None,
        prompt_template=str(tmp_path / "own.jinja"),
        system_prompt=str(tmp_path / "system.txt"),
    )
    assert found == "[mine]system:Think.|user:1+1=|assistant:"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_template": "chat"}, "has no chat template"),
        ({"prompt_template": "llama"}, "expected auto, chat, none, r1, qwen_r1"),
        ({"prompt_template": "gone.jinja"}, "LEARNER_PROMPT_TEMPLATE=gone.jinja: cannot be read"),
        ({"system_prompt": "gone.txt"}, "LEARNER_SYSTEM_PROMPT=gone.txt: cannot be read"),
        ({"prompt_template": "r1", "system_prompt": "Think."}, "has a system prompt of its own"),
    ],
)
def test_what_does_not_fit_is_told(settings, words):
    with pytest.raises(ConfigError, match=words):
        render("1+1=", None, **settings)
