"""Adaptive entropy: the coefficient of the entropy bonus follows a target. Pure.

Skywork-OR1 (arXiv:2505.22312): a fixed coefficient is too small for one model and too large for another,
so it grows while the entropy is at or below the target, and shrinks while it is above.
"""

import math
from dataclasses import dataclass
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """The state between two optimizer steps, which a checkpoint stores."""

    coef: float
    entropy: float | None  # mean entropy of the trained tokens in the step before; None before the first


def adapt(control: EntropyControl, entropy: float, settings: LearnerSettings) -> EntropyControl:
    """Return the state after an optimizer step; `entropy` is its trained tokens' mean, in nats.

    The coefficient changes by entropy_coef_delta: upwards if the entropy is at most entropy_target, else
    downwards. It stays within entropy_coef_min and entropy_coef_max. An entropy that is not finite
    changes nothing.
    Example: target 0.2, delta 0.005, coefficient 0.01: entropy 0.15 gives 0.015, 0.3 gives 0.005.
    """
    if not math.isfinite(entropy):
        return control
    delta = settings.entropy_coef_delta
    change = delta if entropy <= settings.entropy_target else -delta
    coef = min(max(control.coef + change, settings.entropy_coef_min), settings.entropy_coef_max)
    return EntropyControl(coef, entropy)


def applied_coef(control: EntropyControl, settings: LearnerSettings) -> float:
    """Return the coefficient of the next optimizer step's entropy bonus.

    This is 0 before the first step, and after a step whose entropy was above entropy_target. It is
    within entropy_coef_min and entropy_coef_max, which may have changed since a checkpoint.
    """
    low = control.entropy is not None and control.entropy <= settings.entropy_target
    bounded = min(max(control.coef, settings.entropy_coef_min), settings.entropy_coef_max)
    return bounded if low else 0.0


def control_of(state: Any) -> EntropyControl:
    """Return the state that a checkpoint stores as {"coef": .., "entropy": ..}.

    Raise KeyError, TypeError or ValueError if it has another form.
    """
    entropy = state["entropy"]
    return EntropyControl(float(state["coef"]), None if entropy is None else float(entropy))
