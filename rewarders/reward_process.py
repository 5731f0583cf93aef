"""The part of scoring that runs inside a sandbox process: one reward called on one group."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
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
    *(r"$\frac{1}{2}$", "72", "x^2+1", r"\boxed{(1,2)}", r"$\sqrt{2}$", r"$x \in [0,1]$", r"$\{1,2\}$"),
)


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of one reward on one group: G values (None: does not apply), and what it logged."""

    values: tuple[float | None, ...]
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def import_built_in() -> None:
    """Import the built-in rewards, and call `accuracy` and `language_consistency` on short answers.

    Later calls in this process, or in one forked from it, then import nothing. The results are dropped.
    """
    from penstock.rewarders.rewards import REWARDS

    for answer in _WARM_UP:
        columns = {"completions": [answer], "completion_ids": [[1]], "solution": [answer]}
        REWARDS["accuracy"](prompts=[""], **columns)
    REWARDS["language_consistency"](prompts=[""], completions=["a"])


def check_reward(spec: Mapping[str, Any]) -> str:
    """Return "" if a reward can be loaded in this process.

    `spec` has the fields of a RewardSpec. A user's module is run, and a class is made an instance. Raise
    ConfigError if the reward cannot be used, and what that code raises.
    """
    load_reward(RewardSpec(**spec))
    return ""


def shared_once(arguments: Arguments) -> dict[str, Sequence[Any]]:
    """Return `arguments` with a list of one value where all completions have the same object.

    `call_reward` takes them. Example: a column of 9 MB is sent once for 64 completions, not as 576 MB.
    """
    return {
        name: rows[:1] if all(one is rows[0] for one in rows) else rows
        for name, rows in arguments.items()
    }


def call_reward(spec: Mapping[str, Any], arguments: Arguments, size: int) -> dict[str, Any]:
    """Load a reward, call it on one group, and return the result as a map with three keys.

    `values` has G numbers, None where the reward does not apply; `extra` the columns and `metrics` the
    numbers that the reward logged, by name. `spec` has the fields of a RewardSpec. Each of `arguments`
    has one value per completion, of which there are `size`, or a single value, which each completion
    gets a copy of. Raise ConfigError if the reward cannot be loaded, ValueError for wrong values, or the
    reward's own errors.
    """
    asked = RewardSpec(**spec)
    given = {
        name: [*rows, *(deepcopy(rows[0]) for _ in range(size - len(rows)))]
        for name, rows in arguments.items()
    }
    return asdict(apply_reward(load_reward(asked), given, is_own=bool(asked.source)))


def apply_reward(reward: Reward, arguments: Arguments, is_own: bool) -> Scores:
    """Return what a loaded reward returns and logs for a group, after a check.

    `arguments`, `completions` among them, have one value per completion. If the reward `is_own`, a
    user's, it also gets the functions log_extra and log_metric. Raise ValueError for another number of
    values, for a value that is neither None nor a number within 1e9 of 0, or too much that is logged,
    and what the reward raises.
    """
    log = Log(len(arguments["completions"]))
    own = {"log_extra": log.log_extra, "log_metric": log.log_metric} if is_own else {}
    values = checked_values(reward(**arguments, **own), log.size)
    check_logged(log.extra, log.metrics)
    return Scores(values, log.extra, log.metrics)


class Log:
    """TRL's log_extra and log_metric, for one call of a reward on `size` completions.

    `extra` (columns by name) and `metrics` (numbers by name) hold what was logged; both begin empty.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.extra: dict[str, tuple[Any, ...]] = {}
        self.metrics: dict[str, float] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Store `values`, one per completion, as the `column` of the table of completions.

        They replace what was logged under this name before, and become JSON values: other objects their
        str(), an integer over 64 bits a text, a lone surrogate "?". Raise ValueError unless there is one
        value per completion.
        """
        text = json.dumps(list(values), default=str, ensure_ascii=False)
        # A lone surrogate becomes a question mark, and a number too long for a message becomes a text.
        plain = json.loads(text.encode("utf-8", "replace"), parse_int=_whole_number)
        if (count := len(plain)) != self.size:
            wanted = f"expected {self.size}: pass one value for each completion"
            raise ValueError(f"log_extra({column!r}) has {count} values, {wanted}")
        self.extra[encodable(str(column))] = tuple(plain)

    def log_metric(self, name: str, value: float) -> None:
        """Store a number to average over a step's groups, in place of an older `value` of this name.

        Raise ValueError for NaN or a number farther than 1e30 from 0, TypeError for no number.
        """
        if not abs(value) <= _HIGHEST_METRIC:
            expected = f"expected a finite number within {_HIGHEST_METRIC:g} of 0: log another or none"
            raise ValueError(f"log_metric({name!r}) is {value}; {expected}")
        self.metrics[encodable(str(name))] = float(value)


def check_logged(extra: Mapping[str, Sequence[Any]], metrics: Mapping[str, float]) -> None:
    """Raise ValueError if what the rewards of one group logged exceeds a limit, or is no JSON.

    `extra` has columns by name, `metrics` numbers by name. Each may have 1024 names of up to 200
    letters. A value may be nested 32 levels deep. All together may have 1 MiB as JSON, without NaN or
    infinity.
    """
    for kind, names in (("log_extra", extra), ("log_metric", metrics)):
        if len(names) > MOST_NAMES:
            many = f"{kind} got {len(names)} names for a group"
            raise ValueError(f"{many}; expected at most {MOST_NAMES}: log fewer")
        for name in names:
            if len(name) > LONGEST_NAME:
                long = f"{kind} got a name of {len(name)} characters, {name[:40]!r}..."
                raise ValueError(f"{long}; expected at most {LONGEST_NAME}: log a shorter name")
    for name, values in extra.items():
        if fault := find_fault(values):
            raise ValueError(f"log_extra({name!r}) got a wrong value: {fault}; log a simpler one")
    try:
        size = len(json.dumps([extra, metrics], allow_nan=False))
    except ValueError:
        finite = "expected finite numbers: log None instead"
        raise ValueError(f"log_extra has NaN or infinity, {finite}") from None
    if size > LOGGED_BYTES:
        large = f"log_extra and log_metric got {size} bytes for one group"
        raise ValueError(f"{large}, larger than {LOGGED_BYTES} bytes: log fewer or shorter values")


_REPLACED = (
    "the reward's code answers in place of Penstock; remove from the code what replaces Penstock's "
    "functions or writes to its connection"
)


def scores_of(answer: Any, size: int) -> Scores:
    """Return the scores in `answer`, which a sandbox process that is not trusted sent for a group.

    `answer` is to be the map that `call_reward` returns. `size` is the group's number of completions.
    Raise ValueError for an answer of another form, another number of values, or anything over the
    limits, OverflowError for an integer over 1e308.
    """
    if not isinstance(answer, dict) or answer.keys() != {"values", "extra", "metrics"}:
        raise ValueError(f"the sandbox process sent no scores: {_REPLACED}")
    extra, metrics = answer["extra"], answer["metrics"]
    if not isinstance(extra, dict) or not isinstance(metrics, dict):
        raise ValueError(f"the sandbox process sent no maps of what was logged: {_REPLACED}")
    _check_forms(extra, metrics, size)
    if any(type(value) not in (int, float, type(None)) for value in _listed(answer["values"])):
        raise ValueError(f"the sandbox process sent values that are no numbers: {_REPLACED}")
    check_logged(extra, metrics)
    columns = {encodable(name): tuple(values) for name, values in extra.items()}
    numbers = {encodable(name): float(value) for name, value in metrics.items()}
    return Scores(checked_values(answer["values"], size), columns, numbers)


def _check_forms(extra: Mapping[str, Any], metrics: Mapping[str, Any], size: int) -> None:
    """Raise ValueError for a column of `extra` that is no list of `size` values, or a metric that is no
    number within 1e30 of 0.
    """
    for name, values in extra.items():
        if not isinstance(values, list) or len(values) != size:
            raise ValueError(f"log_extra({name[:80]!r}) has no list of {size} values: {_REPLACED}")
    for name, value in metrics.items():
        if type(value) not in (int, float) or not abs(value) <= _HIGHEST_METRIC:
            raise ValueError(f"log_metric({name[:80]!r}) has no number within 1e30 of 0: {_REPLACED}")


def _listed(values: object) -> list[Any]:
    """Return `values` itself if it is a list, else a new empty list."""
    return values if isinstance(values, list) else []


def checked_values(values: object, count: int) -> tuple[float | None, ...]:
    """Return the values of a reward as floats and None, which stays None; True is 1.0.

    `values` is a list or tuple of `count` numbers within 1e9 of 0, or None. Numbers are also scalars of
    numpy and torch, Fraction and Decimal. Raise ValueError for anything else, OverflowError for an
    integer over 1e308.
    """
    if not isinstance(values, (list, tuple)) or len(values) != count:
        found = f"found {str(values)[:80]}: let the reward return one value for each completion"
        raise ValueError(f"expected a list of {count} values, {found}")
    return tuple(None if value is None else _finite(value) for value in values)


def _finite(value: Any) -> float:
    """Return a number, also a scalar of numpy or torch, as a float; True is 1.0.

    Raise ValueError for what is no number, NaN, infinity, or a number farther than 1e9 from 0,
    OverflowError for an integer over 1e308.
    """
    number = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    if not (isinstance(number, (Real, Decimal)) and math.isfinite(number)):
        kind = type(value).__name__
        found = f"found {str(value)[:80]} ({kind}): correct what the reward returns"
        raise ValueError(f"expected finite numbers or None, {found}")
    if abs(float(number)) > HIGHEST_REWARD:
        large = f"found {float(number):g}: let the reward return smaller numbers"
        raise ValueError(f"expected numbers within {HIGHEST_REWARD:g} of 0, {large}")
    return float(number)


def _whole_number(digits: str) -> int | str:
    """Return the integer that is written as `digits`, such as "-12"; `digits` itself if it is too large.

    Too large is an integer below -2**63 or from 2**64 on, for which msgpack has no form.
    """
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits
