"""Limits of the values in messages, and the checks that messages make when they are built.

The settings and the data readers refuse beforehand what is over these limits, so that no ticket of a
run fails when it is built. Each check raises MalformedMessage for a value that does not fit.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.common.errors import MalformedMessage
from penstock.common.wire.plain import PlainData, brief, find_fault, is_encodable

if TYPE_CHECKING:
    import numpy as np  # the processes of users' rewards import these limits, and are to stay small

LARGEST_INT32 = 2**31 - 1
MOST_COMPLETIONS = 65_536
"""Most completions of one group."""

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature that is not greedy: vLLM samples a lower one as 0.01."""

HIGHEST_TEMPERATURE = 100.0
HIGHEST_REWARD = 1e9
"""Largest size of a reward, above or below 0."""

LOWEST_LOGPROB = -104.0
"""Lowest log-probability of a sampled token. The smallest positive float32 is exp(-103.3)."""

LONGEST_NAME = 200
"""Most letters of a name: of a column, a reward, a metric, a process, or a hash."""

LONGEST_PATH = 4096
"""Most letters of the path of a file or folder."""

MOST_NAMES = 1024
"""Most columns, rewards or metrics of one message."""

MOST_SEQUENCES = 64
"""Most sequences of one rollout, which only an agent that rewrites its history makes."""

_HIGHEST_METRIC = 1e100  # a mean over a step's groups stays finite


def require(condition: bool, message: str, *found: object) -> None:
    """Raise MalformedMessage with this message, and `found` in brief, unless the condition holds."""
    if not condition:
        raise MalformedMessage(" ".join((message, *map(brief, found))))


def check_range(name: str, value: float, lowest: float, highest: float) -> None:
    """Raise MalformedMessage for a number outside of [lowest, highest], or NaN."""
    if not lowest <= value <= highest:
        raise MalformedMessage(f"{name} is {brief(value)}, expected {lowest} to {highest}")


def check_array(name: str, array: "np.ndarray", dtype: str) -> None:
    """Raise MalformedMessage unless this is an array of one dimension and of this dtype."""
    if array.ndim != 1 or array.dtype != dtype:
        found = f"{array.ndim} dimensions of {array.dtype}"
        raise MalformedMessage(f"{name}: expected 1 dimension of {dtype}, found {found}")


def check_names(kind: str, names: Collection[str]) -> None:
    """Raise MalformedMessage for too many names, a name that is too long, or half a character in one."""
    if len(names) > MOST_NAMES:
        raise MalformedMessage(f"{len(names)} names of a {kind}, expected at most {MOST_NAMES}")
    for name in names:
        if len(name) > LONGEST_NAME or not is_encodable(name):
            expected = f"expected at most {LONGEST_NAME} whole letters: choose a shorter name"
            raise MalformedMessage(f"{kind} {brief(name)} has {len(name)} letters, {expected}")


def check_texts(texts: Sequence[str], longest: int = LARGEST_INT32) -> None:
    """Raise MalformedMessage for a text of more than `longest` letters, or with half a character."""
    for text in texts:
        if len(text) > longest or not is_encodable(text):
            whole = f"expected at most {longest} letters, and no half of a character (lone surrogate)"
            raise MalformedMessage(f"a text has {len(text)} letters, {brief(text)}; {whole}")


def check_plain(kind: str, columns: Mapping[str, PlainData]) -> None:
    """Raise MalformedMessage for a column whose value is no plain data; see `find_fault`."""
    for name, value in columns.items():
        if fault := find_fault(value):
            raise MalformedMessage(f"{kind} {name}: {fault}")


def check_numbers(kind: str, values: Collection[float | None], highest: float) -> None:
    """Raise MalformedMessage for a number that is not in [-highest, highest], or NaN. None may be."""
    for value in values:
        if value is not None and not -highest <= value <= highest:
            expected = f"expected a finite number within {highest:g} of 0"
            raise MalformedMessage(f"{kind} is {brief(value)}; {expected}")


def check_rewards(rewards: Mapping[str, Sequence[float | None]], size: int) -> None:
    """Raise MalformedMessage unless names fit, and each reward has `size` values, None or within 1e9."""
    check_names("reward", rewards)
    for name, values in rewards.items():
        if len(values) != size:
            raise MalformedMessage(
                f"reward {name}: found {len(values)} values, expected one for each of {size} completions"
            )
        check_numbers(f"reward {name}", values, HIGHEST_REWARD)


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise MalformedMessage for a metric that is not finite or over 1e100, or for its name."""
    check_names("metric", metrics)
    for name, value in metrics.items():
        check_numbers(f"metric {name}", [value], _HIGHEST_METRIC)
