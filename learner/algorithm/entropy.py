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
    """Return the new state after an optimizer step; `control` is the state before the step.

    `entropy` is the mean entropy of the step's trained tokens, in nats; the new state holds this value.
    The coefficient changes by entropy_coef_delta: upwards if the entropy is at most entropy_target, else
    downwards. The new coefficient is then brought within entropy_coef_min and entropy_coef_max. For an
    entropy that is not finite `control` itself is returned.
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

    This is 0 before the first step, and after a step whose entropy was above entropy_target. Otherwise
    it is the coefficient of `control`, brought within entropy_coef_min and entropy_coef_max: these may
    have changed since a checkpoint stored `control`.
    """
    low = control.entropy is not None and control.entropy <= settings.entropy_target
    bounded = min(max(control.coef, settings.entropy_coef_min), settings.entropy_coef_max)
    return bounded if low else 0.0


def control_of(state: Any) -> EntropyControl:
    """Return the state that a checkpoint stores as the map {"coef": number, "entropy": number or None}.

    Numbers may be texts, such as "0.5". Raise KeyError if a key is missing, TypeError or ValueError if
    `state` is no map or float() refuses a value in it.
    """
    entropy = state["entropy"]
    return EntropyControl(float(state["coef"]), None if entropy is None else float(entropy))
