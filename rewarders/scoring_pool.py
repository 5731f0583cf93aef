"""The sandbox processes that compute rewards."""

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import PenstockError
from penstock.common.sandbox.pool import SandboxPool, SandboxSettings
from penstock.common.sandbox.process import Mistake
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.reward_process import Arguments, Scores, call_reward, check_reward


class ScoringFailed(PenstockError):
    """A reward could not be computed: it hung, crashed, ran out of memory or returned nonsense.

    Such a call is retried, and its ticket is dead after the last attempt; it never becomes a reward.
    """


class ScoringPool(SandboxPool):
    """A SandboxPool of REWARDER_WORKERS processes. Raise ConfigError or SandboxFailed if one fails."""

    def __init__(self, settings: RewarderSettings) -> None:
        super().__init__(
            SandboxSettings(
                settings.workers, settings.timeout_s, settings.memory_gib, settings.user,
                environment=tuple(settings.environment),
                preload=("penstock.rewarders.reward_process",),
                section="REWARDER",
            )
        )  # fmt: skip

    def check(self, spec: RewardSpec) -> str:
        """Return the reason why a sandbox process cannot load a reward; "" if it can."""
        outcome = self.run(check_reward, spec)
        return outcome.reason if isinstance(outcome, Mistake) else outcome

    def score(self, spec: RewardSpec, arguments: Arguments) -> Scores:
        """Call one reward on one group; raise ScoringFailed if the call fails."""
        outcome = self.run(call_reward, spec, arguments)
        if isinstance(outcome, Mistake):
            raise ScoringFailed(f"reward {spec.name}: {outcome.reason}")
        return outcome
