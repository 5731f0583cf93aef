"""LEARNER_RENDERER: a format of `renderers` is used where it writes what the chat template writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.common.chat.known_format import KnownFormat
from penstock.common.chat.renderer import ChatRenderer
from penstock.common.errors import ConfigError
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.learner.data.chat_formats import resolve_format
from penstock.learner.data.templates import Template
from tests.actors.test_known_formats import TOOL, save_formats_tokenizer
from tests.helpers import NIGHTLY
from tests.learner.builders import make_settings

LIKE_QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen 3's template as far as a prompt without tools needs it."""

MESSAGES = [{"role": "user", "content": "What is 1+2?"}]
EPISODES = EpisodeSpec((), (OwnCode("Game", "game.py", "ff"),), {"Game": []}, 0, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_formats_tokenizer(folder)
    return folder


def resolve(folder: Path, template: str = LIKE_QWEN3, **settings: str) -> str | None:
    """The format's name in the contract; None without episodes."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")), chat_template=template
    )
    made = make_settings(**settings)
    found = resolve_format(made, Template(made, tokenizer), folder, EPISODES)
    return found.renderer if found else None


def test_a_named_format_is_used(model: Path) -> None:
    assert resolve(model, renderer="qwen3", system_prompt="Be brief.") == "qwen3"


def test_the_model_s_id_gives_the_format(model: Path) -> None:
    assert resolve(model, model="Qwen/Qwen3-0.6B") == "qwen3"
    assert resolve(model, model=str(model)) == ""
    assert resolve(model, model="Qwen/Qwen3-0.6B", renderer="none") == ""


def test_a_format_that_writes_other_tokens_is_refused_or_left_out(model: Path) -> None:
    other = LIKE_QWEN3.replace("assistant", "model")
    with pytest.raises(
        ConfigError, match="LEARNER_RENDERER=qwen3: this format writes prompts with other"
    ):
        resolve(model, other, renderer="qwen3")
    assert resolve(model, other, model="Qwen/Qwen3-0.6B") == ""


def test_without_the_library_the_template_is_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[renderers\]'"):
        resolve(model, renderer="qwen3")
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    assert resolve(model, model="Qwen/Qwen3-0.6B") == ""


def test_a_run_without_episodes_has_no_chat_in_its_contract(model: Path) -> None:
    made = make_settings(renderer="no such")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(model / "tokenizer.json")), chat_template=LIKE_QWEN3
    )
    assert resolve_format(made, Template(made, tokenizer), model, EpisodeSpec()) is None


@pytest.mark.skipif(
    not NIGHTLY or "PENSTOCK_REWARD_PACKAGES" not in os.environ,
    reason="needs TRL, which has models' templates, in PENSTOCK_REWARD_PACKAGES, and NIGHTLY=1",
)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "a tool"])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        *(("qwen3", own) for own in ("qwen3", "qwen3_instruct_2507")),
        *(("qwen3.5", "qwen3_5_think"), ("qwen3.6", "qwen3_6"), ("qwen3.8", "qwen3_8")),
        *(("llama-3", own) for own in ("llama3_1", "llama3_2")),
    ],
)
def test_the_formats_write_what_the_models_own_templates_write(
    model: Path, name: str, own: str, tools: list[Any]
) -> None:
    folder = Path(os.environ["PENSTOCK_REWARD_PACKAGES"]).absolute() / "trl/chat_templates"
    variables = {"bos_token": "<|begin_of_text|>", "date_string": "26 Jul 2024"}
    text = ChatRenderer((folder / f"{own}.jinja").read_text(), variables).render(MESSAGES, tools)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = KnownFormat(name, tokenizer, variables).prompt_ids(MESSAGES, tools)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
