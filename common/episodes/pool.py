"""Live episodes: a user's tools and environment, or agent, each episode in a sandbox process of its own.

    pool -> nursery (trusted) -> keeper (trusted) -> process with the user's code -> an episode

An episode's process is forked when it begins, keeps its state from step to step, and is killed with all
below it when it ends. A step that takes too long, crashes or answers nonsense ends only its episode.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from penstock.common.config.settings import ActorSettings
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.sandbox import frames
from penstock.common.sandbox.handle import Handle, Mistake, ProcessGone, Session, outcome_of
from penstock.common.sandbox.settings import Code, SandboxSettings
from penstock.common.sandbox.starter import STARTS, Starter
from penstock.common.sandbox.user import hide_memory
from penstock.common.text import encodable, short
from penstock.common.wire.episode_spec import MOST_METRICS, EpisodeSpec
from penstock.common.wire.limits import HIGHEST_REWARD

_PROCESS = "penstock.common.episodes.process"
_CLEANERS = 4
_LONGEST_METRIC = 100
_DESCRIBE_S = 60.0
_SECTION = "ACTOR_EPISODE"
_FORGED = f"its process gave an answer of another form: {frames.FOREIGN}"


class EpisodeFailed(PenstockError):
    """An episode broke: a step hung, crashed, ran out of memory or returned nonsense.

    Its rollout gets no reward. It never becomes a low one.
    """


class _NeverBegan(EpisodeFailed):
    """The process had ended before it got a request."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer of a tool. `failed` is True if the tool raised, or there is no such tool."""

    text: str
    failed: bool


def _sandbox(settings: ActorSettings, limit_s: float, modules: tuple[str, ...]) -> SandboxSettings:
    """Return the settings of the episodes' processes."""
    return SandboxSettings(
        settings.episode_workers, limit_s, settings.episode_memory_gib, settings.episode_user,
        environment=tuple(settings.episode_environment),
        modules=(_PROCESS, *modules),
        built_in="",
        load=f"{_PROCESS}:load",
        section=_SECTION,
    )  # fmt: skip


class EpisodePool:
    """Starts episodes for one run, at most `settings.episode_workers` at a time.

    The user's code is imported only in sandbox processes. `modules` are imported before the rights of
    the processes are given up. Raise ConfigError if the user of the processes does not exist.
    """

    def __init__(
        self, settings: ActorSettings, spec: EpisodeSpec, modules: tuple[str, ...] = ()
    ) -> None:
        hide_memory()
        self.spec = spec
        self.sandbox = _sandbox(settings, spec.step_timeout_s, modules)
        sources = {code.source: code.digest for code in spec.codes}
        first, *others = sources.items()
        self._code = Code(*first, tuple(others))
        self._starter = Starter(self.sandbox)
        self._lock = threading.Lock()
        self._idle: list[Handle] = []
        self._closed = False
        self.cleaners = ThreadPoolExecutor(_CLEANERS, "episode-end")

    def describe(self, schema_of: str) -> dict[str, list[Any]]:
        """Return the schemas of the tools, see `process.describe`. Raise ConfigError."""
        try:
            episode, found = self._start(
                "reading the tools", "describe", asdict(self.spec), schema_of, limit_s=_DESCRIBE_S
            )
        except EpisodeFailed as error:
            raise ConfigError(f"{self.spec.settings}: {error}") from error
        episode.close()
        if not isinstance(found, dict) or not all(isinstance(tools, list) for tools in found.values()):
            raise ConfigError(f"{self.spec.settings}: {_FORGED}")
        return found

    def begin(self, row: Mapping[str, Any]) -> "Episode":
        """Return a new episode for a row, whose environment is made but not reset.

        Wait for a process to start, if none is idle. Raise EpisodeFailed if none starts, or if the class
        of the environment raises.
        """
        try:
            tools = self.spec.tools_of(row)
        except ValueError as error:
            raise EpisodeFailed(str(error)) from error
        step = "starting the agent" if self.spec.agent else "making the environment"
        episode, _ = self._start(step, "begin", asdict(self.spec), dict(row))
        episode.tools = tools
        return episode

    def give_back(self, handle: Handle) -> None:
        """Keep a process for later episodes, or end it if it cannot serve any."""
        with self._lock:
            if handle.usable and handle.forks and not self._closed:
                self._idle.append(handle)
                return
        handle.end()

    def close(self) -> None:
        """End the idle processes, and those of episodes as they are closed. Twice is harmless."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for handle in idle:
            handle.end()
        self.cleaners.shutdown()
        self._starter.close()

    def _start(
        self, step: str, function: str, *arguments: Any, limit_s: float = 0.0
    ) -> tuple["Episode", Any]:
        """Return a new episode, and what `ask` of it returns. Raise EpisodeFailed.

        A process that was killed while it was idle is replaced.
        """
        for _ in range(STARTS):
            with suppress(_NeverBegan):
                episode = self._episode()
                return episode, episode.ask(step, function, *arguments, limit_s=limit_s)
        raise EpisodeFailed(f"the process of an episode was killed {STARTS} times before it began")

    def _episode(self) -> "Episode":
        """Return an episode in a process. Raise EpisodeFailed, _NeverBegan for a killed process."""
        with self._lock:
            handle = self._idle.pop() if self._idle else None
        started = handle or self._starter.start(self._code)
        if isinstance(started, Mistake):
            raise EpisodeFailed(started.reason)
        try:
            return Episode(self, started, started.open())
        except ProcessGone as error:
            started.end()
            raise _NeverBegan("its process was killed before") from error


class Episode:
    """One live episode. `tools` are the schemas of its tools, `step` is the name of the running step.

    The steps block, and raise EpisodeFailed, which names the step, after the time limit, for a crash,
    and for an answer of another form. After that the episode has ended. Call one step at a time.
    """

    def __init__(self, pool: EpisodePool, handle: Handle, session: Session) -> None:
        self.tools: list[Any] = []
        self.step = ""
        self._pool = pool
        self._handle = handle
        self._session = session
        self._lock = threading.Lock()
        self._ended = False

    def reset(self) -> str | None:
        """Return the observation of the environment's reset, None for none. Raise EpisodeFailed."""
        found = self.ask("reset", "reset")
        if found is None:
            return None
        if not isinstance(found, str):
            raise self._forged("reset")
        return encodable(found)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Return a tool's answer to the arguments that the policy wrote. Raise EpisodeFailed."""
        step = f"tool {frames.short(name)[:80]}"
        try:
            frames.pack_request([name, dict(arguments)])
        except (TypeError, ValueError, OverflowError) as error:  # such as a number of 100 digits
            return ToolAnswer(str({"error": short(error)}), failed=True)
        found = self.ask(step, "call", name, dict(arguments))
        text, failed = (found.get("text"), found.get("failed")) if isinstance(found, dict) else (0, 0)
        if not isinstance(text, str) or not isinstance(failed, bool):
            raise self._forged(step)
        return ToolAnswer(encodable(text), failed)

    def reward(self) -> float | None:
        """Return the reward of the environment, None if it has none. Raise EpisodeFailed."""
        found = self.ask("get_reward", "reward")
        if found is not None and not _is_number(found):
            raise self._forged("get_reward")
        return None if found is None else float(found)

    def agent(self, base_url: str, api_key: str) -> tuple[float | None, dict[str, float]]:
        """Run the agent; return its reward, None if it has none, and its metrics. Raise EpisodeFailed.

        The agent calls the model at `base_url` with the key `api_key`.
        """
        found = self.ask("agent", "agent", base_url, api_key, limit_s=self._pool.spec.agent_timeout_s)
        if not isinstance(found, dict) or not 0 < len(found) <= MOST_METRICS:
            raise self._forged("agent")
        reward = found.pop("reward", None)
        if not all(map(_is_number, [*found.values(), *([] if reward is None else [reward])])):
            raise self._forged("agent")
        metrics = {encodable(name)[:_LONGEST_METRIC]: float(value) for name, value in found.items()}
        return None if reward is None else float(reward), metrics

    def ask(self, step: str, function: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        """Return the result of a function of `process`, called `step` in errors. Raise EpisodeFailed.

        `limit_s` is its time limit in seconds; 0 is the run's.
        """
        request = {"work": f"{_PROCESS}:{function}", "arguments": arguments, "more": True}
        with self._lock:
            if self._ended:
                raise EpisodeFailed(f"{step}: the episode has ended")
            self.step = step
            try:
                return self._result(step, request, limit_s or self._pool.sandbox.timeout_s)
            except BaseException:
                self._end()
                raise
            finally:
                self.step = ""

    def _result(self, step: str, request: Mapping[str, Any], limit_s: float) -> Any:
        """Return the result of a request. Raise EpisodeFailed, _NeverBegan if no process got it."""
        try:
            outcome = self._handle.ask(self._session, frames.pack_request(request), limit_s)
        except (TypeError, ValueError, OverflowError) as error:
            raise EpisodeFailed(f"{step}: the arguments are no plain data: {error}") from error
        except ProcessGone as error:
            raise _NeverBegan(f"{step}: its process was killed before") from error
        result = outcome_of(outcome, self._pool.sandbox, limit_s)
        if isinstance(result, Mistake):
            separator = ": " if isinstance(outcome, dict) else " "  # an exception, or what happened
            raise EpisodeFailed(f"{step}{separator}{result.reason}")
        return result

    def _forged(self, step: str) -> EpisodeFailed:
        """End the episode; return the error for an answer that only other code than Penstock's gives."""
        self.close()
        return EpisodeFailed(f"{step}: {_FORGED}")

    def abandon(self) -> None:
        """End the episode soon, without waiting. A running step then raises EpisodeFailed."""
        self._session.hang_up()
        try:
            self._pool.cleaners.submit(self.close)
        except RuntimeError:  # the pool is closed
            threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        """End the episode, and wait until its process and all below it are killed. Twice is harmless."""
        self._session.hang_up()
        with self._lock:
            self._end()

    def _end(self) -> None:
        """End the episode unless it has ended. The caller holds the lock."""
        if not self._ended:
            self._ended = True
            self._handle.close_session(self._session)
            self._pool.give_back(self._handle)


def _is_number(value: object) -> bool:
    """Return whether a value from a process is a finite number within 1e9."""
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= HIGHEST_REWARD
