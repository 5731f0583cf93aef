"""A question to a prompt."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.common.chat import process as chat_process
from penstock.common.chat import renderer as chat_renderer
from penstock.common.chat.renderer import ChatRenderer, RendererFailed
from penstock.common.errors import ConfigError
from penstock.learner.data.plan import completions_form
from penstock.learner.data.templates import R1_PROMPT, Template
from tests.learner.builders import make_settings

OWN = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}assistant:"


class ChatTokenizer:
    """Encodes a text as itself; its own template writes role:content|."""

    def __init__(self, chat_template=OWN):
        self.chat_template = chat_template
        self.special_tokens_map = {"bos_token": "^"}

    def __call__(self, text, add_special_tokens):
        return type("Encoding", (), {"input_ids": ("<s>" if add_special_tokens else "") + text})()

    def get_chat_template(self, chat_template):
        return chat_template or self.chat_template


def render(prompt, chat_template=OWN, **settings):
    return Template(make_settings(**settings), ChatTokenizer(chat_template)).render(prompt)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]
ASKED = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("prompt", "chat_template", "settings", "expected"),
    [
        ("1+1=", OWN, {}, "^user:1+1=|assistant:"),
        ("1+1=", None, {}, "<s>1+1="),
        ("1+1=", OWN, {"prompt_template": "none"}, "<s>1+1="),
        ("def f(x):\n    ", None, {}, "<s>def f(x):\n    "),
        (MESSAGES, None, {}, "<s>Be brief.\n1+1=?"),
        (MESSAGES, OWN, {}, "^system:Be brief.|user:1+1=?|assistant:"),
        ("1+1=", OWN, {"system_prompt": "Think."}, "^system:Think.|user:1+1=|assistant:"),
        ("1+1=", None, {"system_prompt": "Think."}, "<s>Think.\n1+1="),
        ("1+1=", OWN, {"prompt_template": "r1"}, f"^system:{R1_PROMPT}|user:1+1=|assistant:"),
        ("1+1=", None, {"prompt_template": "r1"}, f"<s>{R1_PROMPT}\nUser: 1+1=\nAssistant:"),
        (
            "1+1=", OWN, {"prompt_template": "qwen_r1"},
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{R1_PROMPT}Put your final answer within \\boxed{{}}.\n1+1=<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)  # fmt: skip
def test_a_question_becomes_a_prompt(prompt, chat_template, settings, expected):
    assert render(prompt, chat_template, **settings) == expected


@pytest.mark.parametrize(
    ("chat_template", "settings", "form"),
    [
        (OWN, {}, "messages"),
        (OWN, {"prompt_template": "r1"}, "messages"),
        (None, {"prompt_template": "own.jinja"}, "messages"),
        (OWN, {"prompt_template": "none"}, "auto"),
        (OWN, {"prompt_template": "qwen_r1"}, "auto"),
        (None, {}, "auto"),
        (OWN, {"reward_completions": "text"}, "text"),
        (None, {"reward_completions": "messages"}, "messages"),
    ],
)
def test_own_rewards_get_messages_where_a_chat_template_makes_the_prompts(chat_template, settings, form):
    assert completions_form(make_settings(**settings), ChatTokenizer(chat_template)) == form


def test_template_and_system_prompt_may_be_files(tmp_path):
    (tmp_path / "own.jinja").write_text("[mine]" + OWN)
    (tmp_path / "system.txt").write_text("Think.")
    found = render(
        "1+1=",
        None,
        prompt_template=str(tmp_path / "own.jinja"),
        system_prompt=str(tmp_path / "system.txt"),
    )
    assert found == "[mine]^system:Think.|user:1+1=|assistant:"


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


THINKING = OWN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_the_chat_template_gets_its_variables():
    found = [
        render("1+1=", THINKING, chat_template_kwargs=variables)
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert found == ["^user:1+1=|assistant:"] * 2 + ["^user:1+1=|assistant:<think></think>"]
    assert render("1", THINKING, chat_template_kwargs={"bos_token": "$"}) == "$user:1|assistant:"


@pytest.mark.parametrize(
    ("chat_template", "variables", "settings", "words"),
    [
        (THINKING, {"enable_thinkng": False}, {}, "did you mean enable_thinking"),
        (THINKING, {"zzz": 1}, {}, "has no variable zzz.*leave it out"),
        (THINKING, {"tools": []}, {}, "tools cannot be set"),
        (THINKING, {"messages": [], "enable_thinking": True}, {}, "messages cannot be set"),
        (THINKING, {"enable_thinking": True}, {"prompt_template": "none"}, "has no effect"),
        (THINKING, {"enable_thinking": True}, {"prompt_template": "qwen_r1"}, "has no effect"),
        (None, {"enable_thinking": True}, {}, "LEARNER_CHAT_TEMPLATE_KWARGS has no effect"),
    ],
)
def test_a_variable_without_effect_is_refused(chat_template, variables, settings, words):
    with pytest.raises(ConfigError, match=words):
        render("1+1=", chat_template, chat_template_kwargs=variables, **settings)


EACH = "{% for m in messages %}"
TEMPLATES = {
    "white space": "  {% if true %}\n  a\n  {% endif %}\n" + EACH + " {{- m.content }} {% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=True) }}",
    "tojson of a text": "{{ '<ä>' | tojson }}{{ '<ä>' | tojson(ensure_ascii=True) }}",
    "loop controls": EACH + "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": EACH + "{% generation %}\n{{ m.role }}\n{% endgeneration %}{% endfor %}",
    "a set within": EACH + "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}",
    "namespaces": "{% set n = namespace(n=0) %}" + EACH + "{% set n.n = n.n + 1 %}{% endfor %}{{ n.n }}",
    "variables": "{{ bos_token }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ eos_token }}",
    "dates": "{{ strftime_now('%Y') }}",
    "macros": "{% macro f(x) %}[{{ x.strip() }}]{% endmacro %}" + EACH + "{{ f(m.role) }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_environment_of_a_template_is_that_of_transformers(template):
    variables = {"bos_token": "^"}
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, **variables
    )
    assert chat_process.render(chat_process.compile_template(template), variables, ASKED) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2, "took over 2 s"),
        ("{{ 'a' * 20000000000 }}", "MemoryError"),
        ("{{ 'a' * (messages | length * 10000000) }}", "over 16777216 bytes"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no system') }}", r"own\) fails .* of the roles system, user: .*no system"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ '\\ud800' }}", "half a character"),
    ],
    ids=["time", "memory", "output", "escape", "refusal", "syntax", "division", "surrogate"],
)  # fmt: skip
def test_a_hostile_template_ends_with_an_error_that_names_it(template, words, monkeypatch):
    if "took over" in words:
        monkeypatch.setattr(chat_renderer, "_LIMIT_S", 2.0)
    with pytest.raises(ConfigError, match=words) as caught:
        render(MESSAGES, template, prompt_template="chat")
    assert "the chat template (the tokenizer's own) fails" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_after_a_template_failed_the_next_prompt_is_rendered():
    renderer = ChatRenderer("{{ messages[0].content }}{{ 'a' * messages[0].n }}", {})
    with pytest.raises(ValueError, match="bytes"):
        renderer.render([{"content": "x", "n": 17_000_000}])
    assert renderer.render([{"content": "x", "n": 2}]) == "xaa"


def test_many_slow_prompts_end_as_one_slow_prompt_does(monkeypatch):
    """Each is within the limit; without a limit of their sum they would go on."""
    monkeypatch.setattr(chat_renderer, "_LIMIT_S", 1.0)
    monkeypatch.setattr(chat_renderer, "_PER_PROMPT_S", 0.0001)
    renderer = ChatRenderer("{% for a in range(20000) %}{{ a }}{% endfor %}", {})
    prompts = [[{"role": "user", "content": str(number)}] for number in range(10_000)]
    with pytest.raises(ValueError, match="took over 1 s"):
        list(map(renderer.render, prompts))


def test_a_process_that_does_not_start_is_told_with_the_limit_of_the_start(monkeypatch):
    monkeypatch.setattr(chat_renderer, "_START_S", 0.001)
    with pytest.raises(ValueError, match=r"a process that did not start in 0\.001 s: try again"):
        ChatRenderer("a", {}).render([])


def test_a_system_without_room_for_the_process_fails_one_prompt(monkeypatch):
    renderer = ChatRenderer("a", {})
    with monkeypatch.context() as patch:
        patch.setattr(chat_renderer.sys, "executable", "/no/such/program")
        for _ in range(2):
            with pytest.raises(RendererFailed, match="could not be started"):
                renderer.render([])
    assert renderer.render([]) == "a"


def test_the_process_of_a_template_ends_with_its_renderer_and_sees_no_password(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://:secret@host")
    renderer = ChatRenderer("a", {})
    renderer.render([])
    pid = renderer.pid
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    del renderer
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
