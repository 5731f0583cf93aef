"""The part of scoring that runs inside a sandbox process: one reward called on one group."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from penstock.common.text import encodable
from penstock.common.wire.limits import HIGHEST_REWARD, LONGEST_NAME, MOST_NAMES
from penstock.common.wire.plain import find_fault
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.adapt import Reward
from penstock.rewarders.load import load_reward

Arguments = Mapping[str, Sequence[Any]]
"""A reward's arguments by name, each with one value per completion."""

LOGGED_BYTES = 2**20
"""Most bytes of JSON that one group may log for people to read: columns, metrics and their names."""
_HIGHEST_METRIC = 1e30
_WARM_UP = (
    r"$\frac{1}{2}$",
    "72",
    "x^2+1",
    r"\boxed{(1,2)}",
    r"$\sqrt{2}$",
    r"$x \in [0,1]$",
    r"$\{1,2\}$",
)


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of one reward on one group: G values (None: does not apply), and what it logged."""

    values: tuple[float | None, ...]
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def import_built_in() -> None:
    """Import the built-in rewards with what they load when they are first used."""
    from penstock.rewarders.rewards import REWARDS

    for answer in _WARM_UP:
        columns = {"completions": [answer], "completion_ids": [[1]], "solution": [answer]}
        REWARDS["accuracy"](prompts=[""], **columns)
    REWARDS["language_consistency"](prompts=[""], completions=["a"])


def check_reward(spec: Mapping[str, Any]) -> str:
    """Return the reason why a reward cannot be loaded here; "" if it can."""
    try:
        load_reward(RewardSpec(**spec))
    except BaseException as error:  # loading runs a user's module, which may raise anything
        return encodable(f"{type(error).__name__}: {error}")
    return ""


def call_reward(spec: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """Load and apply a reward. Raise ConfigError, ValueError for wrong values, or its own errors."""
    asked = RewardSpec(**spec)
    return asdict(apply_reward(load_reward(asked), arguments, is_own=bool(asked.source)))


def apply_reward(reward: Reward, arguments: Arguments, is_own: bool) -> Scores:
    """Call a loaded reward and check what it returns and logs. Only a user's own reward may log.

    Raise ValueError for wrong values or too much that is logged, and whatever the reward raises.
    """
    log = Log(len(arguments["completions"]))
    own = {"log_extra": log.log_extra, "log_metric": log.log_metric} if is_own else {}
    values = checked_values(reward(**arguments, **own), log.size)
    check_logged(log.extra, log.metrics)
    return Scores(values, log.extra, log.metrics)


class Log:
    """TRL's log_extra and log_metric, for one call of a reward on `size` completions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.extra: dict[str, tuple[Any, ...]] = {}
        self.metrics: dict[str, float] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Store a column of the completions table. Its values become plain JSON values.

        Raise ValueError unless there is one value per completion.
        """
        text = json.dumps(list(values), default=str, ensure_ascii=False)
        # A lone surrogate becomes a question mark, and a number too long for a message becomes a text.
        plain = json.loads(text.encode("utf-8", "replace"), parse_int=_whole_number)
        if (count := len(plain)) != self.size:
            raise ValueError(f"log_extra({column!r}) has {count} values for {self.size} completions")
        self.extra[encodable(str(column))] = tuple(plain)

    def log_metric(self, name: str, value: float) -> None:
        """Store a number to average over a step's groups. Raise ValueError beyond 1e30, or TypeError."""
        if not abs(value) <= _HIGHEST_METRIC:
            expected = f"expected a finite number within {_HIGHEST_METRIC:g} of 0"
            raise ValueError(f"log_metric({name!r}) is {value}; {expected}")
        self.metrics[encodable(str(name))] = float(value)


def check_logged(extra: Mapping[str, Sequence[Any]], metrics: Mapping[str, float]) -> None:
    """Raise ValueError if what a group logs exceeds a limit of names, depth or bytes, or is no JSON."""
    for kind, names in (("log_extra", extra), ("log_metric", metrics)):
        if len(names) > MOST_NAMES:
            raise ValueError(f"{kind} has {len(names)} names; expected at most {MOST_NAMES}")
        for name in names:
            if len(name) > LONGEST_NAME:
                found = f"a name of {len(name)} letters"
                raise ValueError(f"{kind}: {found}; expected at most {LONGEST_NAME}")
    for name, values in extra.items():
        if fault := find_fault(values):
            raise ValueError(f"log_extra({name!r}): {fault}")
    try:
        size = len(json.dumps([extra, metrics], allow_nan=False))
    except ValueError:
        raise ValueError("log_extra has NaN or infinity, expected finite numbers") from None
    if size > LOGGED_BYTES:
        raise ValueError(
            f"log_extra and log_metric: {size} bytes for one group, larger than {LOGGED_BYTES} bytes"
        )


_REPLACED = (
    "the reward's code answers in place of Penstock; remove what replaces Penstock's functions or "
    "writes to its connection"
)


def scores_of(answer: Any, size: int) -> Scores:
    """Return the scores in an answer of a process that is not trusted. Raise ValueError if wrong."""
    if not isinstance(answer, dict) or answer.keys() != {"values", "extra", "metrics"}:
        raise ValueError(f"the process sent no scores: {_REPLACED}")
    extra, metrics = answer["extra"], answer["metrics"]
    if not isinstance(extra, dict) or not isinstance(metrics, dict):
        raise ValueError(f"the process sent no columns or metrics: {_REPLACED}")
    for name, values in extra.items():
        if not isinstance(values, list) or len(values) != size:
            raise ValueError(f"log_extra({name[:80]!r}): expected a list of {size} values")
    for name, value in metrics.items():
        if type(value) not in (int, float) or not abs(value) <= _HIGHEST_METRIC:
            raise ValueError(f"log_metric({name[:80]!r}): expected a finite number")
    if any(type(value) not in (int, float, type(None)) for value in _listed(answer["values"])):
        raise ValueError(f"the process sent values that are no numbers: {_REPLACED}")
    check_logged(extra, metrics)
    columns = {encodable(name): tuple(values) for name, values in extra.items()}
    numbers = {encodable(name): float(value) for name, value in metrics.items()}
    return Scores(checked_values(answer["values"], size), columns, numbers)


def _listed(values: object) -> list[Any]:
    """Return a list unchanged; an empty one for anything else, which `checked_values` refuses."""
    return values if isinstance(values, list) else []


def checked_values(values: object, count: int) -> tuple[float | None, ...]:
    """Return `count` numbers within 1e9 of 0, or None, as plain floats; raise ValueError otherwise."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise ValueError(f"expected a list of {count} values, found {str(values)[:80]}")
    return tuple(None if value is None else _finite(value) for value in values)


def _finite(value: Any) -> float:
    """Return a number as a float; raise ValueError if it is no number or not finite."""
    number = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    if not (isinstance(number, (Real, Decimal)) and math.isfinite(number)):
        kind = type(value).__name__
        raise ValueError(f"expected finite numbers or None, found {str(value)[:80]} ({kind})")
    if abs(float(number)) > HIGHEST_REWARD:
        raise ValueError(f"expected numbers within {HIGHEST_REWARD:g} of 0, found {float(number):g}")
    return float(number)


def _whole_number(digits: str) -> int | str:
    """Return an integer of JSON; as a text if msgpack cannot hold the number in 64 bits."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits
