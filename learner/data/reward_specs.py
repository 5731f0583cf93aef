"""From LEARNER_REWARDS to what the contract says of each reward: its code, by hash, and its options."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.wire.reward_spec import BUILT_IN, RewardSpec, split_reward


def resolve_rewards(settings: LearnerSettings) -> tuple[RewardSpec, ...]:
    """The run's rewards in their order; raises ConfigError where code is not to be found.

    Nothing of a user's code is run here, but for the packages around a module.
    """
    weights = settings.reward_weights or [1.0] * len(settings.rewards)
    return tuple(
        _resolve(asked, weight, settings)
        for asked, weight in zip(settings.rewards, weights, strict=True)
    )


def _resolve(asked: str, weight: float, settings: LearnerSettings) -> RewardSpec:
    source, name = split_reward(asked)
    if not source:
        return RewardSpec(name, weight, options=_options(name, settings))
    path = _file_of(source, asked)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return RewardSpec(name, weight, str(path) if source.endswith(".py") else source, digest)


def _file_of(source: str, asked: str) -> Path:
    if source.endswith(".py"):
        path = Path(source).absolute()
        if not path.is_file():
            raise ConfigError(f"LEARNER_REWARDS={asked}: there is no file {path}")
        return path
    try:
        found = importlib.util.find_spec(source)
    except Exception as error:  # the package's own code runs, and may raise anything
        raise ConfigError(
            f"LEARNER_REWARDS={asked}: {source} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise ConfigError(
            f"LEARNER_REWARDS={asked}: there is no module {source} here; name a file "
            "(file.py:function), or put the folder it is in on PYTHONPATH"
        )
    return Path(found.origin)


def _options(name: str, settings: LearnerSettings) -> dict[str, Any]:
    """The reward's own settings; lengths that are left at 0 are the longest completion's."""
    options = {option: getattr(settings, option) for option in BUILT_IN[name]}
    for option in ("cosine_max_len", "soft_max_length"):
        if options.get(option) == 0:
            options[option] = settings.max_completion_length
    return options
