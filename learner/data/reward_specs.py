"""From LEARNER_REWARDS to the contract's reward specs: code by its hash, and options."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.common.config.judge_file import read_judge
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.disk import failure_of
from penstock.common.files.reading import hash_model
from penstock.common.own_code import digest_of, find_code, path_of, split_source
from penstock.common.transfer.hub import outage_of
from penstock.common.wire.reward_spec import BUILT_IN, JUDGE, MODEL, RewardSpec, split_kind


def resolve_rewards(
    settings: LearnerSettings, own_options: Mapping[str, Any] | None = None
) -> tuple[RewardSpec, ...]:
    """Return the specs of the rewards, for the contract, in the order of LEARNER_REWARDS.

    The weights are settings.reward_weights; if this list is empty each weight is 1. `own_options` become
    the options of each of the user's own functions; None: only "completions", from reward_completions.
    No code of a user is run here, not even that of the packages around a module. The hub is asked for
    the commit of a reward model that is no folder. Raise ConfigError if a reward's code or model is not
    found, or a judge's file is wrong.
    """
    weights = settings.reward_weights or [1.0] * len(settings.rewards)
    return tuple(
        resolve_reward(asked, weight, settings, own_options)
        for asked, weight in zip(settings.rewards, weights, strict=True)
    )


def resolve_reward(
    asked: str, weight: float, settings: LearnerSettings, own_options: Mapping[str, Any] | None = None
) -> RewardSpec:
    """Return the spec of the reward that LEARNER_REWARDS names by the text `asked`.

    The text is a built-in's name, file.py:function, module.function, model:NAME=FOLDER-OR-ID or
    judge:NAME=FILE. `weight` is its factor in the total. `own_options` are the options of a user's
    function; None or {}: only "completions". `settings` give a built-in's options. Raise ConfigError if
    the code or model is not found, or the judge's file is wrong, KeyError for an unknown built-in.
    """
    if found := split_kind(asked):
        return _resolve_kind(asked, weight, *found)
    source, name = split_source(asked)
    if not source:
        return RewardSpec(name, weight, options=_options(name, settings))
    code = find_code(source, f"LEARNER_REWARDS={asked}")
    options = dict(own_options or {"completions": settings.reward_completions})
    place = str(path_of(code)) if source.endswith(".py") else source
    return RewardSpec(name, weight, place, digest_of(code), options)


def _resolve_kind(asked: str, weight: float, kind: str, name: str, place: str) -> RewardSpec:
    """Return the spec of the reward model or judge `name`, which LEARNER_REWARDS names by `asked`.

    `place` is the folder or hub id of a model (`kind` "model"), or a judge's file ("judge"). `weight` is
    the reward's factor in the total. Raise ConfigError if the model is not found or the file is wrong.
    """
    if kind == MODEL:
        return resolve_reward_model(name, place, weight)
    options = read_judge(Path(place), f"LEARNER_REWARDS={asked}").model_dump()
    return RewardSpec(name, weight, "", "", options, JUDGE)


def resolve_reward_model(name: str, place: str, weight: float) -> RewardSpec:
    """Return the spec of the reward model `name`; `place` is a folder here or else a hub id.

    A folder's spec has the hash of the model's files and the absolute path. An id's spec has the id and
    its present commit, for which the hub is asked ("main" if the hub names none). The model is neither
    loaded nor downloaded. Raise ConfigError if the folder cannot be read, if there is neither a folder
    nor a model of that id, ServerUnavailable if the hub is away, DiskFailed for a broken disk.
    """
    folder, asked = Path(place), f"LEARNER_REWARDS=model:{name}={place}"
    from huggingface_hub import model_info
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        if os.path.isdir(folder):
            options = {"model": str(folder.absolute())}
            return RewardSpec(name, weight, "", hash_model(folder), options, MODEL)
        options = {"model": place, "revision": model_info(place).sha or "main"}
        return RewardSpec(name, weight, "", "", options, MODEL)
    except (HFValidationError, HTTPError, OSError) as error:
        if failed := failure_of(error) or outage_of(error, asked):
            raise failed from error
        remedy = "correct the folder or id, or who may read the folder or the hub's model"
        problem = "neither a folder here nor a model of the hub that can be read"
        raise ConfigError(f"{asked}: {problem}: {error}. Expected one of them: {remedy}") from error


def _options(name: str, settings: LearnerSettings) -> dict[str, str | int | float]:
    """Return the keyword arguments of the built-in reward `name`, from the settings of the same names.

    The result is {} for a reward without arguments. cosine_max_len and soft_max_length become
    max_completion_length (tokens) if they are 0. Raise KeyError if there is no such built-in reward.
    """
    options = {option: getattr(settings, option) for option in BUILT_IN[name]}
    for option in ("cosine_max_len", "soft_max_length"):
        if options.get(option) == 0:
            options[option] = settings.max_completion_length
    return options
