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
"""Most characters of a name: of a column, a reward, a metric, a process, or a hash."""

LONGEST_PATH = 4096
"""Most characters of the path of a file or folder."""

MOST_NAMES = 1024
"""Most columns, rewards or metrics of one message."""

MOST_ADAPTER_RANK = 512
"""Highest rank of LoRA adapters that vLLM has."""

MOST_SEQUENCES = 64
"""Most sequences of one rollout, which only an agent that rewrites its history makes."""

_CORRECT = "correct the setting, file, code or message that has this"
_HIGHEST_METRIC = 1e100  # a mean over a step's groups stays finite


def require(condition: bool, message: str, *found: object) -> None:
    """Raise MalformedMessage unless `condition` holds.

    The error's text is `message` and then each value in `found`, cut to 60 characters, joined by spaces.
    """
    if not condition:
        raise MalformedMessage(" ".join((message, *map(brief, found))))


def check_range(name: str, value: float, lowest: float, highest: float) -> None:
    """Raise MalformedMessage if `value` is below `lowest`, above `highest` or NaN.

    The error calls the number `name`.
    """
    if not lowest <= value <= highest:
        found = f"{name} is {brief(value)}, expected {lowest} to {highest}"
        raise MalformedMessage(f"{found}: {_CORRECT} number")


def check_array(name: str, array: "np.ndarray", dtype: str) -> None:
    """Raise MalformedMessage unless `array` has one dimension and the numpy `dtype`, such as "<i4".

    The error calls the array `name`.
    """
    if array.ndim != 1 or array.dtype != dtype:
        found = f"{name}: found an array with {array.ndim} dimensions of {array.dtype}"
        raise MalformedMessage(f"{found}, expected 1 dimension of {dtype}: convert it before it is sent")


def check_names(kind: str, names: Collection[str]) -> None:
    """Raise MalformedMessage for over 1024 names, one over 200 characters, or one with a lone surrogate.

    `kind` is what the error calls a thing with such a name, for example "column". Empty `names` pass.
    """
    if len(names) > MOST_NAMES:
        found = f"{len(names)} names of a {kind}, expected at most {MOST_NAMES}"
        raise MalformedMessage(f"{found}: use fewer in the data set, reward or setting they come from")
    for name in names:
        if len(name) > LONGEST_NAME or not is_encodable(name):
            expected = f"expected at most {LONGEST_NAME}, no lone surrogate: {_CORRECT} name"
            raise MalformedMessage(f"{kind} {brief(name)} has {len(name)} characters, {expected}")


def check_texts(texts: Sequence[str], longest: int = LARGEST_INT32) -> None:
    """Raise MalformedMessage for a text of more than `longest` characters, or one with a lone surrogate.

    A lone surrogate is half of a character, such as "\\ud800". UTF-8 cannot encode it.
    """
    for text in texts:
        if len(text) > longest or not is_encodable(text):
            whole = f"expected at most {longest}, no lone surrogate: {_CORRECT} text"
            raise MalformedMessage(f"a text has {len(text)} characters, {brief(text)}; {whole}")


def check_paths(paths: Sequence[str]) -> None:
    """Raise MalformedMessage for a path that no file can have: one with NUL, or over 4096 characters."""
    check_texts(paths, LONGEST_PATH)
    require(not any("\0" in path for path in paths), "a path has the letter NUL:", list(paths))


def check_plain(kind: str, columns: Mapping[str, PlainData]) -> None:
    """Raise MalformedMessage, which names the column, for the first value that is no plain data.

    Plain data are None, truth values, numbers of at most 64 bits, texts without lone surrogates, bytes,
    and lists and maps of these, at most 32 levels deep, with texts as keys. `columns` has values by
    name. The error begins with `kind` and the name, for example "column answer".
    """
    for name, value in columns.items():
        if fault := find_fault(value):
            raise MalformedMessage(f"{kind} {name}: {fault}; {_CORRECT} value")


def check_numbers(kind: str, values: Collection[float | None], highest: float) -> None:
    """Raise MalformedMessage for NaN and for a number below -`highest` or above `highest`.

    None in `values` is skipped. The error calls the number `kind`.
    """
    for value in values:
        if value is not None and not -highest <= value <= highest:
            expected = f"expected a finite number within {highest:g} of 0"
            raise MalformedMessage(f"{kind} is {brief(value)}; {expected}: {_CORRECT} number")


def check_rewards(rewards: Mapping[str, Sequence[float | None]], size: int) -> None:
    """Raise MalformedMessage unless each reward has `size` values, each None or within 1e9 of 0.

    `rewards` has by name a value per completion. Over 1024 names, or one of over 200 characters or with
    a lone surrogate, are refused too.
    """
    check_names("reward", rewards)
    for name, values in rewards.items():
        found = f"reward {name} has {len(values)} values for {size} completions"
        require(len(values) == size, f"{found}, expected one each: let its code return as many")
        check_numbers(f"reward {name}", values, HIGHEST_REWARD)


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise MalformedMessage for a metric that is NaN or not within 1e100 of 0.

    `metrics` has values by name. Over 1024 names, or one of over 200 characters or with a lone
    surrogate, are refused too.
    """
    check_names("metric", metrics)
    for name, value in metrics.items():
        check_numbers(f"metric {name}", [value], _HIGHEST_METRIC)
