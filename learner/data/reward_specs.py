"""From LEARNER_REWARDS to the contract's reward specs: code by its hash, and options."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.common.config.judge_file import read_judge
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.reading import hash_model
from penstock.common.own_code import digest_of, find_code, path_of, split_source
from penstock.common.wire.reward_spec import BUILT_IN, JUDGE, MODEL, RewardSpec, split_kind


def resolve_rewards(
    settings: LearnerSettings, own_options: Mapping[str, Any] | None = None
) -> tuple[RewardSpec, ...]:
    """Return the rewards in the order of LEARNER_REWARDS. Raise ConfigError if code is not found.

    `own_options` are the options of the user's rewards. Without them the form of the completions is set.
    No code of a user is run here, not even that of the packages around a module.
    """
    weights = settings.reward_weights or [1.0] * len(settings.rewards)
    return tuple(
        resolve_reward(asked, weight, settings, own_options)
        for asked, weight in zip(settings.rewards, weights, strict=True)
    )


def resolve_reward(
    asked: str, weight: float, settings: LearnerSettings, own_options: Mapping[str, Any] | None = None
) -> RewardSpec:
    """Return the spec of a reward of LEARNER_REWARDS.

    Raise ConfigError if its code or model is not found, or its judge's file is wrong.
    """
    if found := split_kind(asked):
        kind, name, place = found
        if kind == MODEL:
            return resolve_reward_model(name, place, weight)
        judge = read_judge(Path(place), f"LEARNER_REWARDS={asked}")
        return RewardSpec(name, weight, options=judge.model_dump(), kind=JUDGE)
    source, name = split_source(asked)
    if not source:
        return RewardSpec(name, weight, options=_options(name, settings))
    code = find_code(source, f"LEARNER_REWARDS={asked}")
    options = dict(own_options or {"completions": settings.reward_completions})
    place = str(path_of(code)) if source.endswith(".py") else source
    return RewardSpec(name, weight, place, digest_of(code), options)


def resolve_reward_model(name: str, place: str, weight: float) -> RewardSpec:
    """Return the spec of a reward model in a folder, by the hash of its files, or of a hub id's commit.

    The learner does not load the model. Raise ConfigError if the folder cannot be read, or if there is
    neither a folder nor a model of that id.
    """
    folder, asked = Path(place), f"LEARNER_REWARDS=model:{name}={place}"
    if os.path.isdir(folder):
        try:
            digest = hash_model(folder)
        except OSError as error:
            raise ConfigError(f"{asked}: cannot be read: {error}") from error
        return RewardSpec(name, weight, "", digest, {"model": str(folder.absolute())}, MODEL)
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        revision = model_info(place).sha
    except (HFValidationError, HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"{asked}: neither a folder here nor a model of the hub: {error}") from error
    options = {"model": place, "revision": revision or "main"}
    return RewardSpec(name, weight, "", "", options, MODEL)


def _options(name: str, settings: LearnerSettings) -> dict[str, str | int | float]:
    """Return a built-in reward's keyword arguments, from the settings of the same names.

    Lengths that are 0 become max_completion_length. Raise KeyError if no built-in has the name.
    """
    options = {option: getattr(settings, option) for option in BUILT_IN[name]}
    for option in ("cosine_max_len", "soft_max_length"):
        if options.get(option) == 0:
            options[option] = settings.max_completion_length
    return options
