"""LEARNER_TOOLS, _ENVIRONMENT and _AGENT to the contract: code by its hash, and the tools' schemas."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import ActorSettings
from penstock.common.episodes.pool import EpisodePool
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.own_code import digest_of, find_code, path_of, split_source
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.learner.data.columns import gold_columns
from penstock.learner.data.templates import Template

_SCHEMAS = "penstock.learner.data.tool_schemas"

log = get_logger(__name__)


def resolve_episodes(settings: LearnerSettings, template: Template) -> EpisodeSpec:
    """Return the tools and environments, or the agent, that the settings name, with the tools' schemas.

    The result also has the columns of the gold answer and all limits of episodes. It is an empty
    EpisodeSpec if the settings name no tool, environment or agent. The user's code is imported in a
    sandbox process, which reads the schemas off its type hints and docstrings. Log a warning if the chat
    template in `template` does not show tools to the model. Raise ConfigError if code is not found or
    cannot be used, or if `template` makes the prompts without a chat template.
    """
    if not settings.has_episodes:
        return EpisodeSpec()
    if template.chat is None:
        raise ConfigError(
            "LEARNER_TOOLS, LEARNER_ENVIRONMENT or LEARNER_AGENT is set, but no chat template makes the "
            "prompts. Expected one, which adds turns to a conversation: set LEARNER_PROMPT_TEMPLATE to "
            "chat or to a file *.jinja"
        )
    spec = EpisodeSpec(
        tools=_codes("LEARNER_TOOLS", settings.tools),
        environments=_codes("LEARNER_ENVIRONMENT", settings.environment),
        max_turns=settings.max_tool_calling_iterations,
        step_timeout_s=settings.tool_timeout_s,
        agent=next(iter(_codes("LEARNER_AGENT", [settings.agent] if settings.agent else [])), None),
        agent_timeout_s=settings.agent_timeout_s,
        agent_sequences=settings.agent_sequences,
        gold=gold_columns(settings.solution_column),
    )
    schemas = _schemas(spec)
    if any(schemas.values()) and "tools" not in template.chat.template:
        log.warning(
            "The chat template does not show the tools to the model. Describe them in the prompts, or "
            "name a template that knows `tools` by LEARNER_PROMPT_TEMPLATE."
        )
    return replace(spec, schemas=schemas)


def _schemas(spec: EpisodeSpec) -> dict[str, list[Any]]:
    """Return lists of the tools' JSON schemas by the environment's name, "" without an environment.

    A sandbox process imports the user's code, reads the schemas, and is ended before the return. Raise
    ConfigError if it fails, or takes over 60 s, SandboxFailed if its processes are killed.
    """
    with closing(EpisodePool(ActorSettings(), spec, modules=(_SCHEMAS,))) as pool:
        return pool.describe(f"{_SCHEMAS}:schema_of")


def _codes(variable: str, asked: Sequence[str]) -> tuple[OwnCode, ...]:
    """Return the code that each text in `asked` names: file.py:function or package.module.function.

    The results are in the same order, each with name, place (the file's absolute path, or the module)
    and hash of the source. `variable` is the setting that has the texts. No code is run. Raise
    ConfigError, which begins with `variable` and the text, if the code is not found.
    """
    codes = []
    for text in asked:
        source, name = split_source(text)
        code = find_code(source, f"{variable}={text}")
        place = str(path_of(code)) if source.endswith(".py") else source
        codes.append(OwnCode(name, place, digest_of(code)))
    return tuple(codes)
