"""The part of scoring that runs inside a sandbox process: one reward called on one group."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from penstock.common.text import encodable
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.adapt import Reward
from penstock.rewarders.load import load_reward

Arguments = Mapping[str, Sequence[Any]]
"""A reward's arguments by name, each with one value per completion."""

_EXTRA_BYTES = 2**20
"""The longest column, in bytes of JSON, that a reward may log for one group, for people to read."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of one reward on one group: G values (None: does not apply), and what it logged."""

    values: tuple[float | None, ...]
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def check_reward(spec: RewardSpec) -> str:
    """Return the reason why a reward cannot be loaded here; "" if it can."""
    try:
        load_reward(spec)
    except BaseException as error:  # loading runs a user's module, which may raise anything
        return encodable(f"{type(error).__name__}: {error}")
    return ""


def call_reward(spec: RewardSpec, arguments: Arguments) -> Scores:
    """Load and apply a reward. Raise ConfigError, ValueError for wrong values, or its own errors."""
    return apply_reward(load_reward(spec), arguments, is_own=bool(spec.source))


def apply_reward(reward: Reward, arguments: Arguments, is_own: bool) -> Scores:
    """Call a loaded reward and check what it returns and logs. Only a user's own reward may log.

    Raise ValueError for wrong values, and whatever the reward raises.
    """
    log = Log(len(arguments["completions"]))
    own = {"log_extra": log.log_extra, "log_metric": log.log_metric} if is_own else {}
    values = checked_values(reward(**arguments, **own), log.size)
    return Scores(values, log.extra, log.metrics)


class Log:
    """TRL's log_extra and log_metric, for one call of a reward on `size` completions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.extra: dict[str, tuple[Any, ...]] = {}
        self.metrics: dict[str, float] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Store a column of the completions table. Its values become plain JSON values.

        Raise ValueError unless there is one value per completion, 1 MiB in all.
        """
        text = json.dumps(list(values), default=str, ensure_ascii=False)
        # A lone surrogate becomes a question mark, and a number too long for a message becomes a text.
        plain = json.loads(text.encode("utf-8", "replace"), parse_int=_whole_number)
        if (count := len(plain)) != self.size:
            raise ValueError(f"log_extra({column!r}) has {count} values for {self.size} completions")
        if len(json.dumps(plain)) > _EXTRA_BYTES:
            raise ValueError(f"log_extra({column!r}) is larger than {_EXTRA_BYTES} bytes")
        self.extra[encodable(str(column))] = tuple(plain)

    def log_metric(self, name: str, value: float) -> None:
        """Store a number to average over a step's groups. Raise ValueError or TypeError otherwise."""
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}) is {value}; expected a finite number")
        self.metrics[encodable(str(name))] = float(value)


def checked_values(values: object, count: int) -> tuple[float | None, ...]:
    """Return `count` finite numbers or None as plain floats; raise ValueError for any other values."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise ValueError(f"expected a list of {count} values, found {str(values)[:80]}")
    return tuple(None if value is None else _finite(value) for value in values)


def _finite(value: Any) -> float:
    """Return a number as a float; raise ValueError if it is no number or not finite."""
    number = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    if not (isinstance(number, (Real, Decimal)) and math.isfinite(number)):
        kind = type(value).__name__
        raise ValueError(f"expected finite numbers or None, found {str(value)[:80]} ({kind})")
    return float(number)


def _whole_number(digits: str) -> int | str:
    """Return an integer of JSON; as a text if msgpack cannot hold the number in 64 bits."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits
