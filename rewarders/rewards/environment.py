"""The reward of a rollout's environment, which the actor asked for when the rollout ended."""

from collections.abc import Sequence
from typing import Any


def environment(environment_reward: Sequence[float | None], **_: Any) -> Sequence[float | None]:
    """Return `environment_reward` itself: for each rollout what its environment's get_reward returned.

    The value is None where the environment has no reward.
    """
    return environment_reward
