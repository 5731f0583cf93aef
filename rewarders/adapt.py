"""Rewards as other projects write them, made into rewards of TRL's signature.

    TRL            f(prompts, completions, completion_ids, **columns) -> G values, also `async def`
    ms-swift       a class, called as instance(completions, **columns)
    verl           compute_score(data_source, solution_str, ground_truth, extra_info) -> number or map
    plain          f(completion, answer) -> number

The names of a function's parameters decide which of these forms the function has.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.common.errors import ConfigError

_COMPLETION = ("completion", "response", "output", "text", "prediction", "generated")
"""Names of the first parameter of a plain function. The second one gets the gold answer."""
_runner = asyncio.Runner()
"""The one event loop of this process: a semaphore of a user's module fails in any loop but its first."""


class Reward(Protocol):
    """A reward of TRL's signature: `reward(prompts, completions, completion_ids, **columns)`.

    The arguments are lists of G values, one per completion of a group, given by name; a reward takes
    those that it needs. The result is G numbers, or None for a completion to which the reward does not
    apply. An exception is a failed scoring and never becomes a low reward.

    Example:
        >>> def short(completions, **columns):
        ...     return [1.0 if len(completion) <= 40 else 0.0 for completion in completions]
    """

    def __call__(self, *args: Any, **arguments: Any) -> Sequence[float | None]:
        """Return one value per completion."""


def adapt(found: object, name: str) -> Reward:
    """Return a reward of TRL's signature for a user's function or class, called `name` in errors.

    Raise ConfigError if `found` has none of the known forms, and what a class raises when made.
    """
    function = _callable_of(found) if inspect.isclass(found) else found
    if not callable(function):
        raise ConfigError(f"reward {name} is a {type(found).__name__}; expected a function or a class")
    parameters = inspect.signature(function).parameters
    if "completions" in parameters:
        return _from_groups(function, with_messages=not inspect.isclass(found))
    if "solution_str" in parameters:
        return _from_verl(function)
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 2 and required[0] in _COMPLETION:
        return _from_pairs(function)
    raise ConfigError(
        f"reward {name}{inspect.signature(function)} is of no known form; expected f(completions, "
        "**columns) as TRL's, a class called so as ms-swift's, compute_score(data_source, solution_str, "
        "ground_truth, extra_info) as verl's, or f(completion, answer); the names of the parameters "
        "decide which form it is"
    )


def _callable_of(kind: type) -> Callable[..., Any]:
    """Return a new instance, or `__call__` if its first parameter is `completions`. Raise its errors."""
    call = kind.__call__
    if next(iter(inspect.signature(call).parameters), "") == "completions":  # as in ms-swift's guide
        return call
    instance: Callable[..., Any] = kind()
    return instance


def _from_groups(function: Callable[..., Any], with_messages: bool) -> Reward:
    """Return a reward that calls the function once per group, with the arguments it has parameters for.

    `with_messages`: a conversation's completions become messages, as in TRL; ms-swift gets texts.
    """

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
        """Return the function's values for a group; raise what it raises."""
        if with_messages and isinstance(prompts[0], list):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        everything = {"prompts": prompts, "completions": completions, **columns}
        values = _finished(function(**_accepted(function, everything)))
        return values.tolist() if hasattr(values, "tolist") else values

    return reward


def _from_verl(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls verl's compute_score once per completion."""

    def reward(completions: list[str], solution: list[Any], **columns: Any) -> list[Any]:
        """Return each completion's score; raise what compute_score raises."""
        scores = []
        for index, text in enumerate(completions):
            row = {name: values[index] for name, values in columns.items() if isinstance(values, list)}
            extra = row.get("extra_info")
            arguments = {
                "data_source": row.get("data_source", ""),
                "solution_str": text,
                "ground_truth": solution[index],
                "extra_info": {} if extra is None else extra,
            }
            score = _finished(function(**_accepted(function, arguments)))
            scores.append(score["score"] if isinstance(score, dict) else score)
        return scores

    return reward


def _from_pairs(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls the function with each completion and its gold answer."""

    def reward(completions: list[str], solution: list[Any], **columns: Any) -> list[Any]:
        """Return the function's value per completion; raise what it raises."""
        pairs = zip(completions, solution, strict=True)
        return [_finished(function(text, gold)) for text, gold in pairs]

    return reward


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those arguments that the function has parameters for; all if it takes **kwargs."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _finished(value: Any) -> Any:
    """Return a value, or an awaitable's result; raise its errors. Tasks left behind are cancelled."""
    if not inspect.isawaitable(value):
        return value
    try:
        return _runner.run(asyncio.wait_for(value, timeout=None))  # wait_for makes it a coroutine
    finally:
        for task in asyncio.all_tasks(_runner.get_loop()):  # else they would go on in the next call
            task.cancel()
