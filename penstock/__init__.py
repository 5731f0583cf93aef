"""Penstock: reinforcement-learning post-training as an asynchronous actor-learner pipeline.

The public names are below; docs/python.md has an example of each. A name's module is imported when the
name is first used, so that `import penstock` loads neither torch nor any other library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.common.config.learner_settings import LearnerSettings
    from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings
    from penstock.common.errors import (
        ConfigError,
        ContractMismatch,
        DataError,
        DeadlineExceeded,
        DiskFull,
        EngineFailed,
        MalformedMessage,
        NoSignal,
        NotFinite,
        PenstockError,
        RunNotReady,
        RunTaken,
        ServerUnavailable,
    )
    from penstock.common.monitor.snapshot import Audit, ConsumerStatus, InFlight, RunStatus, StreamStatus
    from penstock.learner.algorithm.advantages import compute_advantages
    from penstock.learner.algorithm.loss import (
        LossOptions,
        LossTerms,
        LossTokens,
        aggregation_weights,
        policy_loss,
    )
    from penstock.learner.replay import Replayed
    from penstock.learner.report.trackers import Tracker
    from penstock.rewarders.adapt import Reward
    from penstock.rewarders.reward_process import Scores
    from penstock.runs import JournalRecord, RunResult, audit, read_journal, replay, run, status
    from penstock.trial import try_reward

_MODULES = {
    "penstock.common.monitor.snapshot": (
        "Audit", "ConsumerStatus", "InFlight", "RunStatus", "StreamStatus",
    ),
    "penstock.common.config.learner_settings": ("LearnerSettings",),
    "penstock.common.config.settings": ("ActorSettings", "RewarderSettings", "RunSettings"),
    "penstock.common.errors": (
        "ConfigError", "ContractMismatch", "DataError", "DeadlineExceeded", "DiskFull", "EngineFailed",
        "MalformedMessage", "NoSignal", "NotFinite", "PenstockError", "RunNotReady", "RunTaken",
        "ServerUnavailable",
    ),
    "penstock.learner.algorithm.advantages": ("compute_advantages",),
    "penstock.learner.algorithm.loss": (
        "LossOptions", "LossTerms", "LossTokens", "aggregation_weights", "policy_loss",
    ),
    "penstock.learner.replay": ("Replayed",),
    "penstock.learner.report.trackers": ("Tracker",),
    "penstock.rewarders.adapt": ("Reward",),
    "penstock.rewarders.reward_process": ("Scores",),
    "penstock.runs": (
        "JournalRecord", "RunResult", "audit", "read_journal", "replay", "run", "status",
    ),
    "penstock.trial": ("try_reward",),
}  # fmt: skip
"""The public names by the module that defines them."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ActorSettings", "Audit", "ConfigError", "ConsumerStatus", "ContractMismatch", "DataError",
    "DeadlineExceeded", "DiskFull", "EngineFailed", "InFlight", "JournalRecord", "LearnerSettings",
    "LossOptions", "LossTerms", "LossTokens", "MalformedMessage", "NoSignal", "NotFinite",
    "PenstockError", "Replayed", "Reward", "RewarderSettings", "RunNotReady", "RunResult",
    "RunSettings", "RunStatus", "RunTaken", "Scores", "ServerUnavailable", "StreamStatus", "Tracker",
    "aggregation_weights", "audit", "compute_advantages", "policy_loss", "read_journal", "replay", "run",
    "status", "try_reward",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the module of the public name `name`, store the name's value in this module, and return it.

    Raise AttributeError for a name that is not public, or as the import does.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; see penstock.__all__")
    found = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the names that completion in an editor or a notebook offers, sorted, public
    ones included.
    """
    return sorted({*globals(), *__all__})
