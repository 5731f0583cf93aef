"""Rewards as other projects write them, made into rewards of TRL's signature.

    TRL            f(prompts, completions, completion_ids, **columns) -> G values, also `async def`
    ms-swift       a class, called as instance(completions, **columns)
    verl           compute_score(data_source, solution_str, ground_truth, extra_info) -> number or map
    plain          f(completion, answer) -> number

Which one it is follows from the names of the parameters.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from penstock.common.errors import ConfigError
from penstock.rewarders.rewards import Reward

_COMPLETION = ("completion", "response", "output", "text", "prediction", "generated")
"""First parameters of a function that gets one completion and its gold answer, in this order."""

_runner = asyncio.Runner()
"""One event loop per process: a semaphore of a module belongs to the loop that first waited for it."""


def adapt(found: Any, name: str) -> Reward:
    """A reward of TRL's signature from what a user's code has under `name`; raises ConfigError."""
    is_class = inspect.isclass(found)
    function = _instance_of(found) if is_class else found
    if not callable(function):
        raise ConfigError(f"reward {name} is a {type(found).__name__}; expected a function or a class")
    parameters = inspect.signature(function).parameters
    if "completions" in parameters:
        return _of_groups(function, with_messages=not is_class)
    if "solution_str" in parameters:
        return _of_verl(function)
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 2 and required[0] in _COMPLETION:
        return _of_pairs(function)
    raise ConfigError(
        f"reward {name}{inspect.signature(function)} is of no known form; expected f(completions, "
        "**columns) as TRL's, a class called so as ms-swift's, compute_score(data_source, solution_str, "
        "ground_truth, extra_info) as verl's, or f(completion, answer); the names of the parameters "
        "tell which"
    )


def _instance_of(kind: type) -> Callable[..., Any]:
    """What to call of a class. ms-swift's guide has a __call__ without `self`: it is called as it is."""
    call = kind.__call__
    if next(iter(inspect.signature(call).parameters), "") == "completions":
        return call
    instance: Callable[..., Any] = kind()
    return instance


def _of_groups(function: Callable[..., Any], with_messages: bool) -> Reward:
    """TRL gives a conversation's completions as messages, ms-swift as texts."""

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
        if with_messages and isinstance(prompts[0], list):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        everything = {"prompts": prompts, "completions": completions, **columns}
        values = _waited_for(function(**_accepted(function, everything)))
        return values.tolist() if hasattr(values, "tolist") else values

    return reward


def _of_verl(function: Callable[..., Any]) -> Reward:
    def reward(
        prompts: list[Any], completions: list[str], solution: list[Any], **columns: Any
    ) -> list[Any]:
        scores = []
        for index, text in enumerate(completions):
            one = {name: values[index] for name, values in columns.items() if isinstance(values, list)}
            extra = one.get("extra_info")
            arguments = {
                "data_source": one.get("data_source", ""),
                "solution_str": text,
                "ground_truth": solution[index],
                "extra_info": extra if extra is not None else {},
            }
            score = _waited_for(function(**_accepted(function, arguments)))
            scores.append(score["score"] if isinstance(score, dict) else score)
        return scores

    return reward


def _of_pairs(function: Callable[..., Any]) -> Reward:
    def reward(
        prompts: list[Any], completions: list[str], solution: list[Any], **columns: Any
    ) -> list[Any]:
        return [
            _waited_for(function(text, gold)) for text, gold in zip(completions, solution, strict=True)
        ]

    return reward


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Of some arguments those that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _waited_for(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value
    try:
        return _runner.run(_result(value))
    finally:
        for task in asyncio.all_tasks(_runner.get_loop()):  # none may go on in the next call
            task.cancel()


async def _result(value: Any) -> Any:
    return await value
