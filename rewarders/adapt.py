"""Rewards as other projects write them, made into rewards of TRL's signature.

    TRL            f(prompts, completions, completion_ids, **columns) -> G values, also `async def`
    ms-swift       a class, called as instance(completions, **columns)
    verl           compute_score(data_source, solution_str, ground_truth, extra_info) -> number, map, or
                   a tuple that begins with the number; the first text may be called model_output
    verl, batched  compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> G of them
    plain          f(completion, answer) -> number

The names of a function's parameters decide which of these forms the function has.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from penstock.common.errors import ConfigError

_COMPLETION = ("completion", "response", "output", "text", "prediction", "generated")
"""Names of the first parameter of a plain function. The second one gets the gold answer."""
_VERL = ("solution_str", "model_output", "predict_str")
"""Names that verl's own functions have for the completion."""
_GROUP = ("prompts", "completions", "completion_ids", "response_token_ids")
"""Arguments of TRL and ms-swift with a value per completion. A function of one of them gets a group."""
OWN_ARGUMENTS = frozenset(
    {*_GROUP, "prompt", "log_extra", "log_metric", "environments", "trainer_state"}
)
"""Columns of the data set that a reward does not get by these names: its own arguments replace them."""
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


def adapt(found: object, name: str, completions: str = "auto") -> Reward:
    """Return a reward of TRL's signature for a user's function or class, called `name` in errors.

    `completions` is the form in which a function gets them: as messages, as text, or (auto) as the
    prompts are. Classes get texts, as in ms-swift.

    Raise ConfigError if `found` has none of the known forms, and what a class raises when made.
    """
    function = _callable_of(found) if inspect.isclass(found) else found
    if not callable(function):
        raise ConfigError(f"reward {name} is a {type(found).__name__}; expected a function or a class")
    parameters = inspect.signature(function).parameters
    form = "text" if inspect.isclass(found) else completions
    if "completions" in parameters:
        return _from_groups(function, form)
    if "solution_strs" in parameters:
        return _from_verl_batch(function)
    if text := next(filter(parameters.__contains__, _VERL), ""):
        return _from_verl(function, text)
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    of_one = bool(required) and required[0] in _COMPLETION
    if of_one and len(required) == 2:
        return _from_pairs(function)
    if not of_one and (parameters.keys() & set(_GROUP) or _takes_any(function)):
        return _from_groups(function, form)
    raise ConfigError(
        f"reward {name}{inspect.signature(function)} is of no known form; expected f(completions, "
        "**columns) as TRL's, a class called so as ms-swift's, compute_score(data_source, solution_str, "
        "ground_truth, extra_info) as verl's, or f(completion, answer); the names of the parameters "
        "decide which form it is. If the function makes a reward, call it in a file of yours"
    )


def _callable_of(kind: type) -> Callable[..., Any]:
    """Return a new instance, or `__call__` if its first parameter is `completions`. Raise its errors.

    As in ms-swift, `args` is passed to an `__init__` that requires it. Here `args` is None.
    """
    call = kind.__call__
    if next(iter(inspect.signature(call).parameters), "") == "completions":  # as in ms-swift's guide
        return call
    args = inspect.signature(kind).parameters.get("args")
    needed = args is not None and args.default is args.empty and args.kind is args.POSITIONAL_OR_KEYWORD
    instance: Callable[..., Any] = kind(args=None) if needed else kind()
    return instance


def _from_groups(function: Callable[..., Any], form: str) -> Reward:
    """Return a reward that calls the function once per group, with the arguments it has parameters for.

    The form "messages" makes prompts and completions messages, "auto" completions if the prompts are.
    """

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
        """Return the function's values for a group; raise what it raises."""
        if form == "messages":
            prompts = [one if isinstance(one, list) else _message("user", one) for one in prompts]
        if form != "text" and isinstance(prompts[0], list):
            completions = [_message("assistant", text) for text in completions]
        everything = {"prompts": prompts, "completions": completions, "environments": None, **columns}
        if "completion_ids" in columns:
            everything["response_token_ids"] = columns["completion_ids"]  # ms-swift's name
        if "trainer_state" in columns:
            everything["trainer_state"] = SimpleNamespace(**columns["trainer_state"][0])
        values = _finished(function(**_accepted(function, everything)))
        return values.tolist() if hasattr(values, "tolist") else values

    vars(reward)["__wrapped__"] = function  # its signature has the columns that it requires
    return reward


def _message(role: str, text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": role, "content": text}]


def missing_columns(reward: Reward, options: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a user's reward requires and gets neither from us nor as a column.

    `options` are the options of the reward's spec. Return no name if they have no `columns`.
    """
    given = {*OWN_ARGUMENTS, *options.get("columns", ())}
    found = inspect.signature(reward).parameters.values() if "columns" in options else ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [one.name for one in found if one.default is one.empty and one.kind in kinds]
    return [name for name in required if name not in given]


def _from_verl(function: Callable[..., Any], text: str) -> Reward:
    """Return a reward that calls verl's compute_score once per completion, its parameter `text`."""

    def reward(completions: list[str], solution: list[Any], **columns: Any) -> list[Any]:
        """Return each completion's score; raise what compute_score raises."""
        rows = zip(*_verl_arguments(completions, solution, columns), strict=True)
        names = ("data_source", text, "ground_truth", "extra_info")
        given = [_accepted(function, dict(zip(names, row, strict=True))) for row in rows]
        return [_number_of(_finished(function(**arguments))) for arguments in given]

    return reward


def _from_verl_batch(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls verl's batched compute_score once per group."""

    def reward(completions: list[str], solution: list[Any], **columns: Any) -> list[Any]:
        """Return each completion's score; raise what compute_score raises."""
        names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
        values = _verl_arguments(completions, solution, columns)
        arguments = _accepted(function, dict(zip(names, values, strict=True)))
        return [_number_of(score) for score in _finished(function(**arguments))]

    return reward


def _verl_arguments(texts: list[str], gold: list[Any], columns: Mapping[str, Any]) -> list[list[Any]]:
    """Return data sources, texts, gold answers and maps of further columns, one per completion each."""
    size = len(texts)
    sources = columns.get("data_source", [""] * size)
    extra = [{} if one is None else one for one in columns.get("extra_info", [None] * size)]
    return [list(sources), texts, gold, extra]


def _number_of(score: Any) -> Any:
    """Return the number of a score of verl: of a map its `score`, of a tuple or list the first item."""
    if isinstance(score, dict):
        return score["score"]
    return score[0] if isinstance(score, (tuple, list)) else score


def _from_pairs(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls the function with each completion and its gold answer."""

    def reward(completions: list[str], solution: list[Any], **columns: Any) -> list[Any]:
        """Return the function's value per completion; raise what it raises."""
        pairs = zip(completions, solution, strict=True)
        return [_number_of(_finished(function(text, gold))) for text, gold in pairs]

    return reward


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those arguments that the function has parameters for; all if it takes **kwargs."""
    parameters = inspect.signature(function).parameters
    if _takes_any(function):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _takes_any(function: Callable[..., Any]) -> bool:
    """Return whether the function takes arguments of any name (**kwargs)."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _finished(value: Any) -> Any:
    """Return a value, or an awaitable's result; raise its errors. Tasks left behind are cancelled."""
    if not inspect.isawaitable(value):
        return value
    try:
        return _runner.run(asyncio.wait_for(value, timeout=None))  # wait_for makes it a coroutine
    finally:
        for task in asyncio.all_tasks(_runner.get_loop()):  # else they would go on in the next call
            task.cancel()
