"""LEARNER_RENDERER to the contract: who adds turns to a conversation, the template or `renderers`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.common.chat.known_format import KnownFormat, format_of_model, read_tokenizer
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.wire.contract import ChatSpec
from penstock.common.wire.episode_spec import EpisodeSpec
from penstock.learner.data.templates import Template

_QUESTION = "What is 1+2?"

log = get_logger(__name__)


def resolve_format(
    settings: LearnerSettings, template: Template, model: Path, episodes: EpisodeSpec
) -> ChatSpec | None:
    """Return the chat template for the contract. Its `renderer` names the format that adds turns.

    `model` is the model's folder, `episodes` the tools, environments or agent; without any, return None.
    With auto, the format follows from the model's hub id in `settings`; without one, or with none, the
    template is returned unchanged. A format is used only if it writes a prompt with the same tokens as
    `template`, which makes the prompts. With auto, one that does not is logged and left out. Raise
    ConfigError for a named format that differs, or that cannot be used.
    """
    if not episodes.active:
        return None
    assert template.chat is not None, "a run with episodes has a chat template"
    named = settings.renderer != "auto"
    name = settings.renderer if named else format_of_model(settings.model)
    if name in ("", "none"):
        return template.chat
    tools: Sequence[Any] = next(iter(episodes.schemas.values()), [])
    try:
        known = KnownFormat(name, read_tokenizer(model), settings.chat_template_kwargs)
        _check_same(name, template, known, tools)
    except ConfigError as error:
        if named:
            raise
        log.warning(f"The chat template adds the turns of conversations. {error}.")
        return template.chat
    return replace(template.chat, renderer=name)


def _check_same(name: str, template: Template, known: KnownFormat, tools: Sequence[Any]) -> None:
    """Raise ConfigError unless `known`, the format `name`, writes a question as `template` does.

    Compared are the token ids of "What is 1+2?" after the system prompt, if there is one, with the JSON
    schemas `tools`. Raise ConfigError also if the format cannot write them.
    """
    system = template.chat.system_prompt if template.chat else ""
    messages = [{"role": "system", "content": system}] if system else []
    try:
        found = known.prompt_ids([*messages, {"role": "user", "content": _QUESTION}], tools)
    except ValueError as error:
        raise ConfigError(f"LEARNER_RENDERER={name}: {error}; set LEARNER_RENDERER=none") from error
    if found != template.render(_QUESTION, tools):
        raise ConfigError(
            f"LEARNER_RENDERER={name}: this format writes prompts with other tokens than the chat "
            "template of the model. Name the model's format, set variables of the template such as "
            "date_string in LEARNER_CHAT_TEMPLATE_KWARGS, or set LEARNER_RENDERER=none"
        )
