"""Options of generation beyond the sampling settings: their names, limits and checks.

Each ticket carries them to an engine. The limits protect the engine: whoever can write to the queue
server can forge a ticket, and an engine compares stop strings after each token, and compiles a regex.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.common.wire.limits import check_range, check_texts, require
from penstock.common.wire.plain import PlainData, brief

MOST_STOPS = 16
"""Most stop strings of a ticket."""

LONGEST_STOP = 200
"""Most characters of a stop string, or of a choice."""

LOWEST_PENALTY, HIGHEST_PENALTY = 0.1, 10.0
"""Bounds of repetition_penalty. 1 is no penalty."""

MOST_CHOICES = 256
LONGEST_REGEX = 1000
_LARGEST_REGEX = 100_000  # letters times all counts: a compiled regex has a state for each

STRUCTURES = ("regex", "choice")
"""The kinds of structured outputs. The engine's others compile in unbounded time or memory."""

_ELSEWHERE = {
    "temperature": "TEMPERATURE", "top_p": "TOP_P", "top_k": "TOP_K", "min_p": "MIN_P", "seed": "SEED",
    "n": "NUM_GENERATIONS", "num_return_sequences": "NUM_GENERATIONS",
    "max_tokens": "MAX_COMPLETION_LENGTH", "max_new_tokens": "MAX_COMPLETION_LENGTH",
}  # fmt: skip
"""Names of vLLM and transformers for what has a setting of its own."""


def check_generation(
    stop: Sequence[str] = (),
    repetition_penalty: float = 1.0,
    regex: str = "",
    choice: Sequence[str] = (),
) -> None:
    """Raise MalformedMessage for options of generation over the limits that protect an engine.

    `stop` has at most 16 texts, `choice` 256, none empty or over 200 characters. `repetition_penalty` is
    0.1 to 10. `regex` has at most 1000 characters, no NUL, and no `choice` beside it. The letters of the
    regex times all counts in its braces are at most 100,000 ("a{9}": 36).
    """
    check_range("repetition_penalty", repetition_penalty, LOWEST_PENALTY, HIGHEST_PENALTY)
    for name, texts, most in (("stop", stop, MOST_STOPS), ("choice", choice, MOST_CHOICES)):
        require(len(texts) <= most, f"{name} has {len(texts)} texts, expected at most {most}: use fewer")
        require(all(texts), f"{name} has an empty text, expected letters: leave it out")
        check_texts(texts, LONGEST_STOP)
    require(not (regex and choice), "structured_outputs has a regex and a choice: leave one of them out")
    check_texts([regex], LONGEST_REGEX)
    require("\0" not in regex, "the regex of structured_outputs has a NUL, expected none: leave it out")
    states = len(regex)
    for low, high in re.findall(r"\{(\d*),?(\d*)\}", regex):
        states *= max(1, int(high or low or 1))
    most_states = f"expected at most {_LARGEST_REGEX} states; lower its counts"
    require(states <= _LARGEST_REGEX, f"the regex has about {brief(states)}, {most_states}")


def sampling_options(asked: Mapping[str, PlainData]) -> dict[str, Any]:
    """Return, by name, the fields of Sampling that the options in `asked` set; {} for no option.

    `asked` maps `stop`, `repetition_penalty` and `structured_outputs` to values as vLLM takes them.
    Raise ValueError, with what is accepted, for another name or a value of another type.
    `check_generation` checks their limits, not this function.
    Example:
        >>> sampling_options({"stop": "</answer>", "structured_outputs": {"choice": ["yes", "no"]}})
        {'stop': ('</answer>',), 'choice': ('yes', 'no')}
    """
    found: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in _READERS:
            setting = _ELSEWHERE.get(name)
            hint = f"set LEARNER_{setting}" if setting else f"expected {', '.join(_READERS)}"
            raise ValueError(f"{brief(name)} is not taken: {hint}")
        found |= _READERS[name](value)
    return found


def _read_stop(value: PlainData) -> dict[str, Any]:
    """Return {"stop": texts as a tuple} for a text or a list of texts.

    Raise ValueError for another value or an empty list.
    """
    return {"stop": _texts("stop", [value] if isinstance(value, str) else value)}


def _read_penalty(value: PlainData) -> dict[str, Any]:
    """Return {"repetition_penalty": `value` as float}. Raise ValueError for no number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"repetition_penalty: expected a number such as 1.1, found {brief(value)}")
    return {"repetition_penalty": float(value)}


def _read_structure(value: PlainData) -> dict[str, Any]:
    """Return {"regex": text} or {"choice": tuple of texts} for structured outputs with that one key.

    Raise ValueError for other keys, an empty or no text as a regex, and no or an empty list as a choice.
    """
    if not isinstance(value, dict) or len(value) != 1 or not set(value) <= set(STRUCTURES):
        kinds = " or ".join(f'{{"{kind}": ...}}' for kind in STRUCTURES)
        raise ValueError(f"structured_outputs: expected {kinds}, found {brief(value)}")
    ((kind, content),) = value.items()
    if kind == "choice":
        return {"choice": _texts("structured_outputs.choice", content)}
    if not isinstance(content, str) or not content:
        raise ValueError(f"structured_outputs.regex: expected letters, found {brief(content)}")
    return {"regex": content}


def _texts(name: str, value: PlainData) -> tuple[str, ...]:
    """Return a list of texts as a tuple. Raise ValueError, naming the option `name`, for another value.

    An empty list is refused too.
    """
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f'{name}: expected texts, such as ["a"], found {brief(value)}')
    return tuple(value)


_READERS: dict[str, Callable[[PlainData], dict[str, Any]]] = {
    "stop": _read_stop, "repetition_penalty": _read_penalty, "structured_outputs": _read_structure
}  # fmt: skip
