"""From a reward's spec in the contract to the function to call. Used inside scoring processes."""

from functools import lru_cache
from types import ModuleType

from penstock.common.errors import ConfigError
from penstock.common.own_code import digest_of, find_code, import_code, path_of, public_names
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.adapt import OwnReward, Reward, adapt
from penstock.rewarders.swift import offer_swift


def load_reward(spec: RewardSpec) -> Reward:
    """Return the reward with its options bound; an option wins over a column of the same name.

    Raise ConfigError if the reward is unknown, not found, of another hash, of no known form, or
    requires a column that is not there.
    Whatever a user's module raises on import is raised too.
    """
    if spec.source:
        reward = _load_own(spec.source, spec.name, spec.digest, spec.options.get("completions", "auto"))
        columns = spec.options.get("columns")  # None outside a run
        if columns is not None and (missing := reward.missing(columns)):
            there = ", ".join(columns)
            raise ConfigError(
                f"reward {spec.name} requires {', '.join(missing)}, which is no column of the "
                f"data; it has {there}. Rename one of the two, or give the argument a default"
            )
        return reward
    from penstock.rewarders.rewards import REWARDS  # math_verify would make each fork dearer

    if spec.name not in REWARDS:
        raise ConfigError(
            f"the contract asks for the reward {spec.name}, which is unknown here; known are "
            f"{', '.join(REWARDS)}: install the learner's release"
        )
    return lambda **arguments: REWARDS[spec.name](**{**arguments, **spec.options})


@lru_cache(maxsize=64)
def _load_own(source: str, name: str, digest: str, completions: str) -> OwnReward:
    """Return the reward of a user's module, adapted.

    `source` is a file or a dotted module name, `digest` the SHA-256 of its code. The reward is that
    entry of the dictionary `orms`, which gets texts as in ms-swift, else the attribute `name`. Raise
    ConfigError if there is none, and as `run_module` and `adapt` do.
    """
    module = run_module(source, digest)
    orms = getattr(module, "orms", None)
    if isinstance(orms, dict) and name in orms:
        return adapt(orms[name], name, "text")
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{source} has no {name}; it has {public_names(module)}: correct the name")
    return adapt(found, name, completions)


@lru_cache(maxsize=64)
def run_module(source: str, digest: str) -> ModuleType:
    """Run a user's module once per digest and return it.

    Raise its errors, ConfigError if the module is missing or of another hash.
    """
    code = find_code(source, f"the contract's reward {source}")
    found = digest_of(code)
    if found != digest:
        raise ConfigError(
            f"the reward's code in {path_of(code)} differs from the learner's: hash {found[:12]} here, "
            f"{digest[:12]} in the contract; copy the learner's, or start the learner again"
        )
    offer_swift()
    return import_code(code)
