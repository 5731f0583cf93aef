"""The reward of a rollout's environment, which the actor asked for when the rollout ended."""

from collections.abc import Sequence
from typing import Any


def environment(environment_reward: Sequence[float | None], **_: Any) -> Sequence[float | None]:
    """Return what `get_reward` returned for each rollout; None where the environment has no reward."""
    return environment_reward
