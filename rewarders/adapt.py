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
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from penstock.common.errors import ConfigError

_COMPLETION = ("completion", "response", "output", "text", "prediction", "generated")
"""Names of the first parameter of a plain function."""
_GOLD = (
    "solution", "gold", "gold_answer", "golden_answer", "correct_answer", "expected",
    "expected_answer", "ground_truth", "reference", "reference_answer", "target", "label", "truth",
)  # fmt: skip
"""Names of a plain function's second parameter for the gold answer."""
_VERL = ("solution_str", "model_output", "predict_str")
"""Names that verl's own functions have for the completion."""
_GROUP = ("prompts", "completions", "completion_ids", "completions_ids", "response_token_ids")
"""Arguments of TRL and ms-swift with a value per completion. A function of one of them gets a group."""
_LOGS = ("log_extra", "log_metric")
_OTHER_NAMES = {"prompt": ("prompts",), "completions_ids": ("completion_ids",)}
"""Names of parameters and the arguments that they get. TRL's guide had completions_ids by mistake."""
OWN_ARGUMENTS = frozenset({
    *_GROUP, *_LOGS, "prompt", "transcripts", "environment_reward", "environments", "trainer_state",
})  # fmt: skip
"""Columns of the data set that a reward does not get by these names: its own arguments replace them."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_runner = asyncio.Runner()
"""The one event loop of this process: a semaphore of a user's module fails in any loop but its first."""


def columns_of(prompt: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rewards get of a question, by name: `prompt` as "prompts", and the data's columns.

    Columns whose name is in OWN_ARGUMENTS, such as "completions", are left out.
    """
    return {"prompts": prompt} | {
        name: value for name, value in columns.items() if name not in OWN_ARGUMENTS
    }


class Reward(Protocol):
    """A reward of TRL's signature: `reward(prompts, completions, completion_ids, **columns)`.

    The arguments are given by name. Prompts, completions and columns are lists of G values, one per
    completion of a group; a reward takes those that it needs. The result is G numbers, or None for a
    completion to which the reward does not apply. An exception is a failed scoring and never becomes a
    low reward.

    Example:
        >>> def short(completion_ids, **columns):
        ...     return [1.0 if len(ids) <= 40 else 0.0 for ids in completion_ids]
    """

    def __call__(self, *args: Any, **arguments: Any) -> Sequence[float | None]:
        """Return G numbers, one per completion of a group, or None where the reward does not apply.

        `arguments` are by name lists of G values, such as `completions`. A built-in reward also gets its
        options, single values; a user's also the functions `log_extra` and `log_metric`. Penstock passes
        nothing by position, in `args`. An error that is raised makes the scoring of the group fail.
        """


@dataclass(frozen=True)
class OwnReward:
    """A user's function as a reward of TRL's signature.

    `sources` has, for a parameter of another name than TRL's, the arguments to choose from, the best
    first. `form` is the form of the completions (auto, text or messages); "" for functions like verl's,
    whose scores may be maps and tuples. `each` says whether the function is called per completion.
    """

    function: Callable[..., Any]
    sources: Mapping[str, tuple[str, ...]]
    form: str
    each: bool = False

    def __call__(self, **arguments: Any) -> Any:
        """Return what the function gives for a group, usually a list of one value per completion.

        `arguments` are by name lists with one value per completion, and the functions log_extra and
        log_metric; the function gets those that it takes. The function is called once, or per completion
        if `each`. Awaitables are awaited. Scores of functions like verl's, maps and tuples, become
        numbers. The values are not checked. Raise what the function raises.
        """
        if self.each:
            values = self._call_each(arguments)
        else:
            values = _listed(_finished(self.function(**self._given(self._all(arguments)))))
        return values if self.form else [_number_of(score) for score in values]

    def _call_each(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Call the function for each completion, with its values in `arguments`; return the results.

        Awaitables are awaited side by side. What the calls log is then logged for the group, if
        `arguments` has log_extra and log_metric. Raise what the function raises.
        """
        size = len(arguments["completions"])
        log = _EachLog(size)
        given = self._given(self._all({**arguments, **log.functions()}))
        rows = [{name: values[index] for name, values in given.items()} for index in range(size)]
        values = [self.function(**row) for row in rows]
        if any(map(inspect.isawaitable, values)):
            values = _finished(_all_of(values))
        if "log_extra" in arguments:
            log.pass_on(arguments["log_extra"], arguments["log_metric"])
        return values

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the names of what the function requires and does not get; [] if nothing is missing.

        `columns` are the names of the data's columns. A parameter with a default is not required. Of a
        parameter that takes the gold answer, the name is `solution`.
        """
        there = {*OWN_ARGUMENTS, *columns} | ({"data_source", "extra_info"} if not self.form else set())
        found = inspect.signature(self.function).parameters.values()
        required = [one.name for one in found if one.default is one.empty and one.kind in _BY_NAME]
        sources = [self._sources(name) for name in required]
        return [names[-1] for names in sources if there.isdisjoint(names)]

    def _all(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new map of the arguments that the function may get, in the form that it expects.

        `arguments` are lists with one value per completion, and the functions log_extra and log_metric.
        Functions like verl's and f(completion, answer) also get `data_source` and `extra_info`, by
        default "" and {} for each completion. Others get `environments` (None), `response_token_ids`
        (the `completion_ids`), and `trainer_state` as one object with attributes. With the form
        "messages", texts of prompts become lists of one message. Then, and with "auto" if the prompts
        are lists of messages, completions are lists of messages too: `transcripts` if there are any.
        """
        size = len(arguments["completions"])
        if not self.form:
            extra = [one or {} for one in arguments.get("extra_info", [None] * size)]
            return {"data_source": [""] * size, **arguments, "extra_info": extra}
        everything = {"environments": None, **arguments}
        if self.form == "messages":
            prompts = [
                one if isinstance(one, list) else _message("user", one) for one in arguments["prompts"]
            ]
            everything["prompts"] = prompts
        if self.form != "text" and isinstance(everything["prompts"][0], list):
            texts = everything["completions"]
            messages = [_message("assistant", text) for text in texts]
            everything["completions"] = arguments.get("transcripts", messages)
        if "completion_ids" in arguments:
            everything["response_token_ids"] = arguments["completion_ids"]  # ms-swift's name
        if "trainer_state" in arguments:
            everything["trainer_state"] = SimpleNamespace(**arguments["trainer_state"][0])
        return everything

    def _given(self, everything: Mapping[str, Any]) -> dict[str, Any]:
        """Return by parameter those of the arguments `everything` that the function has parameters for.

        A parameter gets the first of its `_sources` that is there; without any it is left out. A
        function with **kwargs gets all arguments; one like verl's only those that `sources` names.
        """
        parameters = inspect.signature(self.function).parameters
        names = [name for name, one in parameters.items() if one.kind in _BY_NAME]
        if _takes_any(parameters):
            names += everything if self.form else self.sources
        found = {name: [*filter(everything.__contains__, self._sources(name))] for name in names}
        return {name: everything[sources[0]] for name, sources in found.items() if sources}

    def _sources(self, parameter: str) -> tuple[str, ...]:
        """Return the names of the arguments that the function's `parameter` may get, the best first.

        `sources` has them; without an entry the only one is `prompts` for the parameter prompt,
        `completion_ids` for completions_ids, else the parameter's own name.
        """
        return self.sources.get(parameter) or _OTHER_NAMES.get(parameter, (parameter,))


class _EachLog:
    """log_extra and log_metric for a function that is called for each of `size` completions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, dict[int, float]] = {}

    def functions(self) -> dict[str, list[Callable[[str, Any], None]]]:
        """Return by name the two functions of each completion, which take a name and a value."""
        each = range(self._size)
        return {
            "log_extra": [partial(self._log_extra, index) for index in each],
            "log_metric": [partial(self._log_metric, index) for index in each],
        }

    def _log_extra(self, index: int, column: str, value: Any) -> None:
        """Store the `value` of the completion `index` in a `column`, in place of an older one."""
        self._extra.setdefault(column, [None] * self._size)[index] = value

    def _log_metric(self, index: int, name: str, value: float) -> None:
        """Store the `value` of the completion `index` for a metric, in place of an older one."""
        self._metrics.setdefault(name, {})[index] = value

    def pass_on(self, log_extra: Callable[..., None], log_metric: Callable[..., None]) -> None:
        """Log the group's columns, None where nothing was logged, and the mean of each metric.

        Raise TypeError for a metric that is no number, and what the two functions raise.
        """
        for column, values in self._extra.items():
            log_extra(column, values)
        for name, numbers in self._metrics.items():
            log_metric(name, sum(numbers.values()) / len(numbers))


def adapt(found: object, name: str, completions: str = "auto") -> OwnReward:
    """Return a reward of TRL's signature for `found`, a user's function or class; errors call it `name`.

    The names of its parameters decide whether it is like TRL's, ms-swift's or verl's, f(completion) or
    f(completion, answer). `completions` is the form in which a function like TRL's gets completions:
    "messages", "text", or "auto", messages if the prompts are messages. Others get texts. Of a class an
    instance is created. The function is not called. Raise ConfigError for no known form or an object
    that cannot be called, and what a class raises when made.
    """
    is_class = inspect.isclass(found)
    function = _callable_of(found) if inspect.isclass(found) else found
    if not callable(function):
        kind = "class without __call__" if is_class else type(found).__name__
        wanted = "expected a function or a class with __call__: correct LEARNER_REWARDS"
        raise ConfigError(f"reward {name} is a {kind}; {wanted}")
    parameters = inspect.signature(function).parameters
    form = "text" if is_class else completions
    if "completions" in parameters:
        return OwnReward(function, {}, form)
    if "solution_strs" in parameters:
        return OwnReward(function, _verl_sources("solution_strs", "s"), "")
    if text := next(filter(parameters.__contains__, _VERL), ""):
        return OwnReward(function, _verl_sources(text), "", each=True)
    positional = [one for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [one.name for one in positional if one.default is one.empty and one.name not in _LOGS]
    if required and required[0] in _COMPLETION:
        if len(required) == 1 and not _takes_any(parameters):
            return OwnReward(function, {required[0]: ("completions",)}, "", each=True)
        if len(required) == 2:
            first, second = required
            names = {"answer": ("solution",), **_OTHER_NAMES}
            gold = (second, "solution") if second in _GOLD else names.get(second, (second,))
            return OwnReward(function, {first: ("completions",), second: gold}, "", each=True)
    elif parameters.keys() & set(_GROUP):
        return OwnReward(function, {}, form)
    elif is_class and positional:  # ms-swift passes the completions by their position
        return OwnReward(function, {positional[0].name: ("completions",)}, form)
    elif _takes_any(parameters):
        return OwnReward(function, {}, form)
    raise ConfigError(
        f"reward {name}{inspect.signature(function)} is of no known form; expected f(completions, "
        "**columns) as TRL's, a class called so as ms-swift's, compute_score(data_source, solution_str, "
        "ground_truth, extra_info) as verl's, or f(completion, answer); the names of the parameters "
        "decide which form it is. If the function makes a reward, call it in a file of yours"
    )


def _verl_sources(text: str, plural: str = "") -> dict[str, tuple[str, ...]]:
    """Return, by parameter of verl's compute_score, the name of the argument that the parameter gets.

    `text` is the parameter of the completion. `plural` ends the other parameters' names: "s" for a
    function of a whole group. Example: ground_truths gets ("solution",).
    """
    same = {f"{name}{plural}": (name,) for name in ("data_source", "extra_info")}
    return {**same, text: ("completions",), f"ground_truth{plural}": ("solution",)}


def _callable_of(kind: type) -> object:
    """Return a new instance of the user's class `kind`, to be called as a reward.

    As in ms-swift, an `__init__` that requires `args` gets it, here None. If the first parameter of
    `__call__` is `completions` and not self, return that function without an instance. Raise what
    `__init__` raises.
    """
    call = kind.__call__
    if next(iter(inspect.signature(call).parameters), "") == "completions":  # as in ms-swift's guide
        return call
    args = inspect.signature(kind).parameters.get("args")
    needed = args is not None and args.default is args.empty and args.kind in _BY_NAME
    return kind(args=None) if needed else kind()


def _message(role: str, text: str) -> list[dict[str, str]]:
    """Return a conversation of one message: [{"role": role, "content": text}]."""
    return [{"role": role, "content": text}]


def _number_of(score: Any) -> Any:
    """Return the number of a score of verl: of a map its `score`, of a tuple or list the first item.

    Any other score is returned unchanged. Raise ValueError for a map without `score`, IndexError for an
    empty tuple or list.
    """
    if isinstance(score, dict):
        if "score" not in score:
            there = ", ".join(map(str, score)) or "no key"
            found = f"expected a map with `score`, found one with {there}"
            raise ValueError(f"{found}: let the reward return its number as `score`")
        return score["score"]
    return score[0] if isinstance(score, (tuple, list)) else score


def _listed(values: Any) -> Any:
    """Return an array, tensor, iterator or other ordered values as a list.

    Texts, bytes, maps, sets and values that are no collection are returned unchanged. An array or tensor
    without a dimension becomes a number.
    """
    if hasattr(values, "tolist"):
        return values.tolist()
    ordered = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set))
    return [*values] if ordered else values


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether one of the parameters is **kwargs, which takes arguments of any name."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


async def _all_of(values: Sequence[Any]) -> list[Any]:
    """Return the values in order, awaitables replaced by their results; these run side by side.

    Raise the error of the first awaitable in order that fails.
    """
    waiting = [asyncio.ensure_future(one) if inspect.isawaitable(one) else one for one in values]
    return [await one if inspect.isawaitable(one) else one for one in waiting]


def _finished(value: Any) -> Any:
    """Return `value` itself, or an awaitable's result, after running it in this process's event loop.

    Tasks that it leaves in the loop are cancelled. Raise what the awaitable raises.
    """
    if not inspect.isawaitable(value):
        return value
    try:
        return _runner.run(asyncio.wait_for(value, timeout=None))  # wait_for makes it a coroutine
    finally:
        for task in asyncio.all_tasks(_runner.get_loop()):  # else they would go on in the next call
            task.cancel()
