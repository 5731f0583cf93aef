"""From a reward's spec in the contract to the function to call. Used inside scoring processes."""

from functools import lru_cache
from types import ModuleType

from penstock.common.errors import ConfigError
from penstock.common.own_code import digest_of, find_code, import_code, path_of, public_names
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.adapt import OwnReward, Reward, adapt
from penstock.rewarders.swift import offer_swift


def load_reward(spec: RewardSpec) -> Reward:
    """Return the function of a reward, to be called with lists of one value per completion, by name.

    A built-in reward gets its options too; an option wins over a column of the same name. A user's
    module is run, once per process. Raise ConfigError for an unknown built-in reward, or if the user's
    code is not found or has another hash than in `spec`, or the function is missing or of no known form.
    Raise it too if the function requires an argument that is no column of the data. The option `columns`
    names these; without that option nothing is checked. Raise what the module raises.
    """
    if spec.source:
        reward = _load_own(spec.source, spec.name, spec.digest, spec.options.get("completions", "auto"))
        columns = spec.options.get("columns")  # None outside a run
        if columns is not None and (missing := reward.missing(columns)):
            gold = "Name the gold answer's column by LEARNER_SOLUTION_COLUMN. "
            named = gold if "solution" in missing else ""
            raise ConfigError(
                f"reward {spec.name} requires {', '.join(missing)}, which is no column of the data; the "
                f"data has {', '.join(columns)}. {named}Rename the reward's parameter, or give it a "
                "default"
            )
        return reward
    from penstock.rewarders.rewards import REWARDS  # math_verify would make each fork dearer

    if spec.name not in REWARDS:
        raise ConfigError(
            f"the contract asks for the reward {spec.name}, which is unknown here; known are "
            f"{', '.join(REWARDS)}: install the learner's release of penstock for this rewarder"
        )
    return lambda **arguments: REWARDS[spec.name](**{**arguments, **spec.options})


@lru_cache(maxsize=64)
def _load_own(source: str, name: str, digest: str, completions: str) -> OwnReward:
    """Return the reward `name` of a user's module, made into a reward of TRL's signature. Cached.

    `source` is a file or a dotted module name, `digest` the SHA-256 of its code. The reward is the entry
    `name` of the module's dictionary `orms`, which gets texts as in ms-swift, else the attribute `name`,
    which gets the form `completions`: auto, text or messages; a class gets texts in any case. Raise
    ConfigError if there is neither, if the reward is of no known form, or the module is missing or of
    another hash; and the module's errors.
    """
    module = run_module(source, digest)
    orms = getattr(module, "orms", None)
    if isinstance(orms, dict) and name in orms:
        return adapt(orms[name], name, "text")
    found = getattr(module, name, None)
    if found is None:
        there = f"the module has {public_names(module) or 'no public names'}"
        raise ConfigError(f"{source} has no {name}; {there}: correct the name in LEARNER_REWARDS")
    return adapt(found, name, completions)


@lru_cache(maxsize=64)
def run_module(source: str, digest: str) -> ModuleType:
    """Run a user's module, once per `source` and `digest` in this process, and return the module.

    `source` is a file or a dotted module name, `digest` the SHA-256 that the code must have. The folder
    of a file is put first in sys.path. Where ms-swift is not installed, a stand-in is put in its place
    before. Raise ConfigError if the module is missing or of another hash, and what the module raises;
    the next call then tries again.
    """
    code = find_code(source, f"the contract's reward {source}")
    found = digest_of(code)
    if found != digest:
        raise ConfigError(
            f"the reward's code in {path_of(code)} differs from the learner's: hash {found[:12]} here, "
            f"{digest[:12]} in the contract; copy the learner's file to this path, or start the learner "
            "again with this file"
        )
    offer_swift()
    return import_code(code)
