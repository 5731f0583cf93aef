"""The part of an episode that runs inside its sandbox process: the user's tools and one environment.

A process is forked for each episode after the user's code was imported, so the state in this module is
that of one episode.
"""

import asyncio
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import ModuleType
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.own_code import digest_of, find_code, import_code, public_names
from penstock.common.sandbox.frames import LONGEST_ANSWER
from penstock.common.text import encodable
from penstock.common.wire.episode_spec import MOST_METRICS, EpisodeSpec, OwnCode
from penstock.common.wire.limits import HIGHEST_REWARD

_NO_TOOLS = frozenset({"reset", "get_reward"})
"""Public methods of an environment that the policy cannot call."""

_modules: dict[str, ModuleType] = {}
_live: list["_Live"] = []
"""The episode of this process, from `begin` on."""


def load(source: str, digest: str) -> None:
    """Import the user's code of `source`, a file's path or a module's name, for later calls of `find`.

    `digest` is the SHA-256 that the learner found. Raise ConfigError, before the import, if the code is
    not there or has another digest. Raise what the code raises.
    """
    code = find_code(source, "LEARNER_TOOLS, LEARNER_ENVIRONMENT and LEARNER_AGENT")
    if (found := digest_of(code)) != digest:
        raise ConfigError(
            f"{source}: its hash is {found[:12]} here, and {digest[:12]} at the learner: copy the "
            "learner's file, or start the learner again"
        )
    _modules[source] = import_code(code)


def find(code: OwnCode) -> Any:
    """Return the function or class `code.name` of a code that `load` has imported.

    Raise ConfigError if the code has no function or class of this name, KeyError if it is not loaded.
    """
    module = _modules[code.source]
    if not callable(found := getattr(module, code.name, None)):
        raise ConfigError(
            f"{code.source} has no function or class {code.name}, it has {public_names(module)}: "
            "correct LEARNER_TOOLS, LEARNER_ENVIRONMENT or LEARNER_AGENT"
        )
    return found


def tools_of(spec: EpisodeSpec, environment: object | None) -> dict[str, Callable[..., Any]]:
    """Return what the policy may call, by name: functions of `spec`, public methods of `environment`.

    `environment` is an object or its class; None has no methods. Its `reset` and `get_reward` are left
    out. Raise ConfigError for two of one name, an environment without `reset`, or a name that its code
    lacks.
    """
    found = _functions(spec)
    if environment is None:
        return found
    kind = environment if inspect.isclass(environment) else type(environment)
    if not callable(getattr(kind, "reset", None)):
        raise ConfigError(f"the environment {kind.__name__} has no reset, expected reset(self, **row)")
    for name, _ in inspect.getmembers(kind, inspect.isfunction):  # of an object it would run properties
        if name.startswith("_") or name in _NO_TOOLS:
            continue
        if name in found:
            raise ConfigError(f"{kind.__name__}.{name} has the name of a tool: rename one of the two")
        found[name] = getattr(environment, name)
    return found


def _functions(spec: EpisodeSpec) -> dict[str, Callable[..., Any]]:
    """Return the tools of `spec` that are functions, by name. Raise ConfigError for two of one name."""
    found = {code.name: find(code) for code in spec.tools}
    if len(found) < len(spec.tools):
        raise ConfigError(f"two tools of LEARNER_TOOLS have one name, of {list(found)}: rename one")
    return found


def describe(spec: Mapping[str, Any], schema_of: str) -> dict[str, list[Any]]:
    """Return the schemas of the tools by the environment's name, "" without environments.

    `spec` is an EpisodeSpec as dataclasses.asdict gives it. `schema_of` names the function,
    "package.module:function", that returns a tool's schema. Raise ConfigError for code that is no tool,
    environment or agent, and whatever `schema_of` raises.
    """
    asked = EpisodeSpec.from_plain(spec)
    if asked.agent:
        find(asked.agent)
    module, _, name = schema_of.partition(":")
    make = getattr(importlib.import_module(module), name)
    kinds = {code.name: find(code) for code in asked.environments} or {"": None}
    for name, kind in kinds.items():
        if kind is not None and not inspect.isclass(kind):
            raise ConfigError(f"the environment {name} is no class, expected a class with reset")
    return {
        name: [_named(key, make(tool)) for key, tool in tools_of(asked, kind).items()]
        for name, kind in kinds.items()
    }


def _named(name: str, schema: Any) -> Any:
    """Give a tool's schema the name by which the tool is called, and return it.

    A function may have another one in `__name__`: an alias, a closure, a wrapper.
    """
    schema["function"]["name"] = name
    return schema


class _Live:
    """The state of an episode: an environment of the class `name`, the tools, and an event loop.

    `spec` has the run's code; without environment the name is "". The loop runs async tools. The row is
    not here, where code of the model can read it. Raise ConfigError for wrong tools, and what the
    environment's class raises.
    """

    def __init__(self, spec: EpisodeSpec, name: str) -> None:
        self.spec = spec
        self.runner = asyncio.Runner()
        codes = [code for code in spec.environments if code.name == name]
        self.environment = find(codes[0])() if codes else None
        self.tools = tools_of(spec, self.environment)

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return those of a row's columns `names` that this episode gets: an agent all, tools none.

        An environment gets those that its reset has parameters for; with ** the others too, but the gold
        answer only if there is get_reward. One of several environments does not get `environment`.
        """
        if self.environment is None:
            return list(names) if self.spec.agent else []
        parameters = inspect.signature(self.environment.reset).parameters.values()
        asked = {one.name for one in parameters if not str(one).startswith("*")}  # *args, **kwargs
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            gold = () if getattr(self.environment, "get_reward", None) else self.spec.gold
            asked |= {name for name in names if name.lower() not in gold}
        several = len(self.spec.environments) > 1
        return [name for name in names if name in asked and (name != "environment" or not several)]

    def finished(self, value: Any) -> Any:
        """Return the `value`; of an awaitable, run in the episode's event loop, return its result."""
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            """Return the result of the awaitable `value`."""
            return await value

        return self.runner.run(wait())


def begin(spec: Mapping[str, Any], environment: str, names: Sequence[str]) -> list[str]:
    """Make the environment, store it as the episode of this process, and return the columns it gets.

    `spec` is an EpisodeSpec as dataclasses.asdict gives it, `environment` a class's name or "", `names`
    are the row's columns. Raise ConfigError for wrong tools, and what the environment's class raises.
    Seed the shared generators of numpy and torch too: every forked process has a copy of the same ones.
    """
    for name, seed in (("numpy.random", "seed"), ("torch", "seed")):
        if module := sys.modules.get(name):
            getattr(module, seed)()
    _live[:] = [_Live(EpisodeSpec.from_plain(spec), environment)]
    return _live[0].wanted(names)


def reset(columns: Mapping[str, Any]) -> str | None:
    """Call the environment's reset with `columns` as keyword arguments; return its text or None.

    `columns` are those that `begin` has asked for. The result is None without an environment too. Lone
    surrogates are escaped. Raise TypeError if it returns no text, and what reset raises.
    """
    live = _live[0]
    if live.environment is None:
        return None
    found = live.finished(live.environment.reset(**columns))
    if found is not None and not isinstance(found, str):
        raise TypeError(f"reset returned {type(found).__name__}, expected None or a text")
    return None if found is None else encodable(found)


def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a tool with keyword arguments; return its answer as {"text": ..., "failed": ...}.

    Like TRL, answer an exception of the tool by its text; so too a tool that does not exist. Both have
    failed True. Raise ValueError for a text over 4,194,304 characters, and MemoryError, SystemExit or
    another exception that is no Exception if the tool does.
    """
    live = _live[0]
    if name not in live.tools:
        known = ", ".join(live.tools) or "none"
        return _failed(f"there is no tool {name!r}; the tools are: {known}")
    try:
        text = str(live.finished(live.tools[name](**arguments)))
    except MemoryError:
        raise
    except Exception as error:  # the policy reads what went wrong
        return _failed(_text_of(error))
    if len(text) > LONGEST_ANSWER:  # as JSON it would need a multiple of this memory
        raise ValueError(f"a tool returned {len(text)} characters, expected at most {LONGEST_ANSWER}")
    return {"text": encodable(text), "failed": False}


def _text_of(error: Exception) -> str:
    """Return the text of an exception; the name of its class if the text is "" or cannot be made."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # the exception is the user's, its methods too
        return type(error).__name__


def _failed(reason: str) -> dict[str, Any]:
    """Return {"text": "{'error': REASON}", "failed": True}, the answer to a failed call, as in TRL.

    Of a reason 262,144 characters are kept: as JSON a letter may need 16 bytes of the answer.
    """
    return {"text": encodable(str({"error": reason[: LONGEST_ANSWER // 16]})), "failed": True}


def reward() -> float | None:
    """Return what the environment's get_reward returns as a float.

    Return None without an environment or get_reward, or for None. Raise ValueError if it is no finite
    number within 1e9, and what get_reward raises.
    """
    live = _live[0]
    function = getattr(live.environment, "get_reward", None)
    if function is None:
        return None
    value = live.finished(function())
    return None if value is None else _number("get_reward returned", value, ", or None")


def _number(what: str, value: Any, otherwise: str = "") -> float:
    """Return `value`, of the user's code, as a float. Raise ValueError for no finite number within 1e9.

    The error begins with `what` and ends with `otherwise`. The numbers of numpy and torch count too.
    """
    if hasattr(value, "item"):
        value = value.item()
    is_number = isinstance(value, Real)
    if not is_number or not math.isfinite(value) or abs(value) > HIGHEST_REWARD:
        shown = repr(value)[:80] if is_number else type(value).__name__
        raise ValueError(f"{what} {shown}, expected a finite number within 1e9{otherwise}")
    return float(value)


def agent(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float | None]:
    """Call the agent with `row`, `base_url` and `api_key`; return its numbers, "reward" among them.

    A lone number is the reward; in a dict it may be None. Raise ValueError for any other result.
    """
    live = _live[0]
    assert live.spec.agent is not None, "the actor asks for this step only in a run with an agent"
    found = live.finished(find(live.spec.agent)(dict(row), base_url, api_key))
    if not isinstance(found, dict):
        return {"reward": _number("the agent returned", found, ' or a dict with "reward"')}
    texts = all(isinstance(name, str) for name in found)
    if "reward" not in found or not texts or len(found) > MOST_METRICS:
        raise ValueError(
            f"the agent returned a dict with {len(found)} keys, {str(list(found))[:80]}; expected "
            f'texts, at most {MOST_METRICS}, and "reward" among them'
        )
    return {
        name: None if name == "reward" and value is None else _number(f"the agent's {name} is", value)
        for name, value in found.items()
    }
