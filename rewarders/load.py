"""A reward's code, by what the contract says of it. Runs inside a scoring process only."""

import hashlib
import importlib.util
import sys
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.adapt import adapt
from penstock.rewarders.rewards import REWARDS, Reward


def load_reward(spec: RewardSpec) -> Reward:
    """The reward with its options bound; raises ConfigError, and whatever a user's module raises."""
    if spec.source:
        return _own(spec.source, spec.name, spec.digest)
    return partial(_with_options, _built_in(spec.name), spec.options)


def _with_options(reward: Reward, options: dict[str, Any], **arguments: Any) -> Any:
    """Call a reward; a column of the data set that is called as an option is does not replace it."""
    return reward(**(arguments | options))


def _built_in(name: str) -> Reward:
    if name not in REWARDS:
        raise ConfigError(
            f"the contract asks for the reward {name}, which is unknown here; known are "
            f"{', '.join(REWARDS)}: install the learner's release"
        )
    return REWARDS[name]


@lru_cache(maxsize=64)
def _own(source: str, name: str, digest: str) -> Reward:
    module = _module(source, digest)
    found = getattr(module, name, None)
    if found is None:
        found = getattr(module, "orms", {}).get(name)
    if found is None:
        names = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise ConfigError(f"{source} has no {name}; it has {names}")
    return adapt(found, name)


def _module(source: str, digest: str) -> ModuleType:
    try:
        if source.endswith(".py"):
            loader = importlib.util.spec_from_file_location(_module_name(source), source)
        else:
            loader = importlib.util.find_spec(source)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source} cannot be imported here: {error}") from error
    if loader is None or loader.loader is None or not Path(str(loader.origin)).is_file():
        raise ConfigError(f"the reward's code {source} is not here: share it or copy it")
    found = hashlib.sha256(Path(str(loader.origin)).read_bytes()).hexdigest()
    if found != digest:
        raise ConfigError(
            f"the reward's code in {loader.origin} differs from the learner's: hash {found[:12]} here, "
            f"{digest[:12]} in the contract; copy the learner's, or start the learner again"
        )
    _offer_swift()
    folder = str(Path(str(loader.origin)).parent)
    if source.endswith(".py") and folder not in sys.path:
        sys.path.append(folder)  # for what lies beside it
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module
    loader.loader.exec_module(module)
    return module


def _module_name(path: str) -> str:
    return f"penstock_reward_{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def _offer_swift() -> None:
    """Stand in for `from swift.plugin import ORM, orms` where ms-swift is not installed."""
    if "swift" in sys.modules or importlib.util.find_spec("swift") is not None:
        return
    package, plugin = ModuleType("swift"), ModuleType("swift.plugin")
    orms: dict[str, Any] = {}
    plugin.ORM, plugin.orms = object, orms  # type: ignore[attr-defined]
    package.plugin = plugin  # type: ignore[attr-defined]
    sys.modules |= {"swift": package, "swift.plugin": plugin}
