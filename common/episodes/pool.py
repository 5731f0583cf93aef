"""Live episodes: a user's tools and environment, or agent, each episode in a sandbox process of its own.

    pool -> nursery (trusted) -> keeper (trusted) -> process with the user's code -> an episode

An episode's process is forked when it begins, keeps its state from step to step, and is killed with all
below it when it ends. A step that takes too long, crashes or answers nonsense ends only its episode.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from penstock.common.config.settings import ActorSettings
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.sandbox import frames
from penstock.common.sandbox.handle import KILLED, Handle, Mistake, ProcessGone, Session, outcome_of
from penstock.common.sandbox.settings import Code, SandboxFailed, SandboxSettings
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
_TOO_FEW = f"raise the actor's limits (ulimit -a), or lower {_SECTION}_WORKERS"
_ALL_KILLED = (
    f"{STARTS} processes for an episode were killed before it began: see in the machine's log what "
    "kills them, such as a lack of memory"
)
_FORGED = f"the code's process gave an answer of another form: {frames.FOREIGN}"


class EpisodeFailed(PenstockError):
    """An episode broke: a step hung, crashed, ran out of memory or returned nonsense.

    Its rollout gets no reward. It never becomes a low one.
    """


class _Killed(EpisodeFailed):
    """The process was killed in a step, or before."""


class _NeverBegan(_Killed):
    """The process was killed before it got a request."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer of a tool. `failed` is True if the tool raised, or there is no such tool."""

    text: str
    failed: bool


def _sandbox(settings: ActorSettings, limit_s: float, modules: tuple[str, ...]) -> SandboxSettings:
    """Return the settings of the episodes' sandbox processes, by the actor's `settings`.

    `limit_s` is the time limit of a step in seconds. `modules` are imported before any process starts,
    beside the module that runs episodes.
    """
    return SandboxSettings(
        settings.episode_workers, limit_s, settings.episode_memory_gib, settings.episode_user,
        environment=tuple(settings.episode_environment),
        modules=(_PROCESS, *modules),
        built_in="",
        load=f"{_PROCESS}:load",
        section=_SECTION,
    )  # fmt: skip


class EpisodePool:
    """Starts episodes for one run. The caller keeps to `settings.episode_workers` at a time.

    `spec` has tools, environments or an agent, one at least. The user's code is imported only in sandbox
    processes; `modules` are imported before the rights of these are given up. Making a pool starts no
    process, but hides this process's memory from others of its user. Raise ConfigError if the user of
    the processes does not exist.
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
        """Return the JSON schemas of the tools by the environment's name, "" without environments.

        `schema_of` names the function, "package.module:function", that a process calls for a tool's
        schema. Start and end an episode for it. The calls have 60 s. Raise ConfigError if the code
        cannot be imported, is no tool or environment, or fails, SandboxFailed if its processes are
        killed.
        """
        try:
            episode, found = self._start(
                "reading the tools", "describe", asdict(self.spec), schema_of, limit_s=_DESCRIBE_S
            )
        except EpisodeFailed as error:
            kind = SandboxFailed if isinstance(error, _Killed) else ConfigError
            raise kind(f"{self.spec.settings}: {error}") from error
        episode.close()
        if not isinstance(found, dict) or not all(isinstance(tools, list) for tools in found.values()):
            raise ConfigError(f"{self.spec.settings}: {_FORGED}")
        return found

    def begin(self, row: Mapping[str, Any]) -> "Episode":
        """Return a new episode for a row of the data. Its `tools` are set, its environment is not reset.

        Wait for a process to start, if none is idle, and for the environment's class, which gets the
        names of the columns. Raise EpisodeFailed if no process starts, also for a lack of descriptors,
        the code cannot be imported, the row names no environment of the run, or the class raises.
        """
        step = "starting the agent" if self.spec.agent else "making the environment"
        try:
            tools, name = self.spec.tools_of(row), self.spec.environment_of(row)
            episode, wanted = self._start(step, "begin", asdict(self.spec), name, list(row))
        except ValueError as error:
            raise EpisodeFailed(str(error)) from error
        except OSError as error:
            raise EpisodeFailed(f"{step}: {error}: {_TOO_FEW}") from error
        if not isinstance(wanted, list):
            raise episode._forged(step)
        episode.tools, episode.columns = tools, {name: row[name] for name in row if name in wanted}
        return episode

    def give_back(self, handle: Handle) -> None:
        """Keep a process for later episodes, or end it.

        The process is ended if it is not usable, cannot fork for each episode, or the pool is closed.
        """
        with self._lock:
            if handle.usable and handle.forks and not self._closed:
                self._idle.append(handle)
                return
        handle.end()

    def close(self) -> None:
        """End the idle processes, and wait until the episodes that `Episode.abandon` ended are killed.

        The process of an episode that is still running ends when that episode is closed. Closing twice
        does no harm.
        """
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for handle in idle:
            handle.end()
        self.cleaners.shutdown()
        self._starter.close()

    def _start(self, step: str, name: str, *arguments: Any, limit_s: float = 0) -> tuple["Episode", Any]:
        """Return a new episode and the result of its first step, the function `name` of process.py.

        `step` is the step's name in errors, `limit_s` its limit in seconds; 0 is the run's. A process
        that was killed before the step is replaced, up to five times; one that was killed in it, once.
        Raise EpisodeFailed after that, if none starts, or if the step fails.
        """
        replaced = False
        for _ in range(STARTS):
            try:
                episode = self._episode()
                return episode, episode.ask(step, name, *arguments, limit_s=limit_s)
            except _NeverBegan:
                continue
            except _Killed:
                if replaced or self._closed:
                    raise
                replaced = True
        raise _Killed(_ALL_KILLED)

    def _episode(self) -> "Episode":
        """Return an episode in an idle process, else in a new one. Nothing has been asked of it yet.

        Raise EpisodeFailed if no process starts, its subclass _Killed if all were killed, _NeverBegan if
        the idle process was, OSError if this process lacks descriptors.
        """
        with self._lock:
            handle = self._idle.pop() if self._idle else None
        try:
            started = handle or self._starter.start(self._code)
        except SandboxFailed as error:
            raise _Killed(str(error)) from error
        if isinstance(started, Mistake):
            raise (_Killed if started.killed else EpisodeFailed)(started.reason)
        try:
            return Episode(self, started, started.open())
        except ProcessGone as error:
            started.end()
            raise _NeverBegan("the episode's idle process was killed: begin another one") from error
        except OSError:
            self.give_back(started)
            raise


class Episode:
    """One live episode in the process of `handle`, whose requests go through `session`.

    `tools` are the schemas of its tools, and `columns` those of the row that its process gets, at first
    none. `step` is the name of the running step, "" between steps. The steps block, and raise
    EpisodeFailed, which names the step, after the time limit, for a crash, and for an answer of another
    form. After that the episode has ended, and `pool` has the process again. Call one step at a time.
    """

    def __init__(self, pool: EpisodePool, handle: Handle, session: Session) -> None:
        self.tools: list[Any] = []
        self.columns: dict[str, Any] = {}
        self.step = ""
        self._pool = pool
        self._handle = handle
        self._session = session
        self._lock = threading.Lock()
        self._ended = False

    def reset(self) -> str | None:
        """Call the environment's reset and return its observation, a text; None for none.

        Raise EpisodeFailed, after which the episode has ended, if reset raises, takes too long or
        returns no text.
        """
        found = self.ask("reset", "reset", self.columns)
        if found is None:
            return None
        if not isinstance(found, str):
            raise self._forged("reset")
        return encodable(found)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the tool `name` with the arguments that the policy wrote, and return the tool's answer.

        The answer has `failed` if the tool raises or does not exist, or the arguments cannot be sent.
        Raise EpisodeFailed, after which the episode has ended, for a crash, over the time limit or for a
        wrong answer.
        """
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
        """Return what the environment's get_reward returns; None for None, and without get_reward.

        Raise EpisodeFailed, after which the episode has ended, if get_reward fails, or for a number over
        1e9.
        """
        found = self.ask("get_reward", "reward")
        if found is not None and not _is_number(found):
            raise self._forged("get_reward")
        return None if found is None else float(found)

    def agent(self, base_url: str, api_key: str) -> tuple[float | None, dict[str, float]]:
        """Run the agent on the row; return its reward, which may be None, and its other numbers by name.

        The agent calls the model at `base_url` with the key `api_key`. Raise EpisodeFailed, after which
        the episode has ended, if the agent raises, crashes, takes over `agent_timeout_s` of the spec, or
        returns no number and no dict of numbers with "reward". Names are cut to 100 characters.
        """
        limit_s = self._pool.spec.agent_timeout_s
        found = self.ask("agent", "agent", self.columns, base_url, api_key, limit_s=limit_s)
        if not isinstance(found, dict) or not 0 < len(found) <= MOST_METRICS:
            raise self._forged("agent")
        reward = found.pop("reward", None)
        if not all(map(_is_number, [*found.values(), *([] if reward is None else [reward])])):
            raise self._forged("agent")
        metrics = {encodable(name)[:_LONGEST_METRIC]: float(value) for name, value in found.items()}
        return None if reward is None else float(reward), metrics

    def ask(self, step: str, function: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        """Return the result of `function` of episodes/process.py, called in the episode's process.

        `step` is the name of the call in errors. `limit_s` is its time limit in seconds; 0 is the run's.
        Raise EpisodeFailed, and end the episode, if the function raises, the process crashes or the time
        is over. Raise EpisodeFailed too if the episode has ended before; the subclass _Killed if its
        process was killed, _NeverBegan if that happened before the step.
        """
        request = {"work": f"{_PROCESS}:{function}", "arguments": arguments, "more": True}
        with self._lock:
            if self._ended:
                raise EpisodeFailed(f"{step}: the episode has ended: begin another one")
            self.step = step
            try:
                return self._result(step, request, limit_s or self._pool.sandbox.timeout_s)
            except BaseException:  # Ctrl-C too: the process may still be at the step
                self._end()
                raise
            finally:
                self.step = ""

    def _result(self, step: str, request: Mapping[str, Any], limit_s: float) -> Any:
        """Return the result of `request`, a call for the process; `limit_s` is its limit in seconds.

        `step` is the name of the call in errors. Raise EpisodeFailed if it fails or takes longer, or its
        arguments are no plain data, its subclass _Killed if the process was killed, _NeverBegan if that
        happened before it got the request.
        """
        try:
            outcome = self._handle.ask(self._session, frames.pack_request(request), limit_s)
        except (TypeError, ValueError, OverflowError) as error:
            raise EpisodeFailed(f"{step}: expected arguments as JSON has them: {error}") from error
        except ProcessGone as error:
            raise _NeverBegan(f"{step}: its idle process was killed: begin another episode") from error
        result = outcome_of(outcome, self._pool.sandbox, limit_s)
        if isinstance(result, Mistake):
            separator = ": " if isinstance(outcome, dict) else " "  # an exception, or what happened
            kind = _Killed if outcome in KILLED else EpisodeFailed
            raise kind(f"{step}{separator}{result.reason}")
        return result

    def _forged(self, step: str) -> EpisodeFailed:
        """End the episode and wait for that; return an error for `step`, for the caller to raise.

        The error says that the step's answer came from other code than Penstock's.
        """
        self.close()
        return EpisodeFailed(f"{step}: {_FORGED}")

    def abandon(self) -> None:
        """End the episode soon, in a thread, without waiting. A running step raises EpisodeFailed."""
        self._session.hang_up()
        try:
            self._pool.cleaners.submit(self.close)
        except RuntimeError:  # the pool is closed
            threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        """End the episode, and wait until its process and all below it are killed. Twice is harmless.

        A step that runs in another thread ends first, with EpisodeFailed.
        """
        self._session.hang_up()
        with self._lock:
            self._end()

    def _end(self) -> None:
        """End the episode unless it has ended: kill what it left, and give its process back to the pool.

        The caller holds the lock.
        """
        if not self._ended:
            self._ended = True
            self._handle.close_session(self._session)
            self._pool.give_back(self._handle)


def _is_number(value: object) -> bool:
    """Return whether a value from a process is a finite number within 1e9, and not True or False."""
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= HIGHEST_REWARD
