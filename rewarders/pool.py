"""Scoring processes that can be killed, so that no completion can stop a run.

Model text makes verifiers hang in C code, crash and eat memory (`9^{9^{9^{9}}}` is enough). Such a
scoring ends as ScoringFailed, which is retried and then set aside; it never becomes a reward.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pebble

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.log import get_logger
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.sandbox import (
    OUT_OF_MEMORY,
    Limits,
    Mistake,
    Scores,
    call_reward,
    check_reward,
    prepare,
    ready,
)
from penstock.rewarders.user import start_fork_server, user_of

START_TIMEOUT_S = 60.0
"""Time for a scoring process to start and take its work, beside the time for the work itself."""

_CALLS_PER_PROCESS = 1000
"""Then the process is replaced: sympy's caches grow, and its memory limit is for the answer."""

_STARTS = 5
"""How often a scoring process is started that is killed before it is ready."""

_CHILDREN = 64
"""Processes and threads that rewards may start, where there is a user to count them by."""

# A fork server has imported the rewards: what replaces a killed process is there at once.
_CONTEXT = multiprocessing.get_context("forkserver")

# Scoring processes ignore the polite signal; pebble would wait 3 s before it kills.
pebble.CONSTS.term_timeout = 0.1

log = get_logger(__name__)


class ScoringFailed(PenstockError):
    """A reward could not be computed: it hung, crashed, ran out of memory or returned nonsense."""


class ScoringPool:
    """`workers` scoring processes; `score` may be called from as many threads.

    As a context: ends the processes. Each process is a pebble pool of its own: a pool that loses an idle
    worker breaks as a whole.
    """

    def __init__(self, settings: RewarderSettings) -> None:
        self.finished = 0
        self._settings = settings
        self._memory_bytes = int(settings.memory_gib * 2**30)
        self._idle: queue.LifoQueue[pebble.ProcessPool] = queue.LifoQueue()
        self._count = threading.Lock()
        self._names = tempfile.TemporaryDirectory(prefix="penstock-scoring-")
        self._started = False

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start all processes and wait until they are ready; raises ConfigError, ScoringFailed.

        Does nothing if they were started before.
        """
        if self._started:
            return
        self._started = True
        self._limits = self._make_limits()
        start_fork_server(_CONTEXT, self._settings.environment)
        count = self._settings.workers
        with ThreadPoolExecutor(count) as threads:
            starts = [threads.submit(self._start_process) for _ in range(count)]
        for start in starts:
            if start.exception() is None:
                self._idle.put(start.result())
        if self._idle.qsize() < count:
            self.close()
        for start in starts:
            start.result()

    def _make_limits(self) -> Limits:
        uid, gid = user_of(self._settings.user)
        processes = self._settings.workers + _CHILDREN
        return Limits(self._memory_bytes, processes, uid, gid, self._names.name)

    def _start_process(self) -> pebble.ProcessPool:
        """A process that is ready. One that is killed before that is no sign of a wrong setting."""
        for _ in range(_STARTS):
            process = self._new_process()
            try:
                fits = process.schedule(ready, args=(self._memory_bytes,)).result(START_TIMEOUT_S)
            except TimeoutError:
                fits = False
            except (pebble.ProcessExpired, RuntimeError):
                _kill(process)
                continue
            if fits:
                return process
            _kill(process)
            raise ConfigError(
                f"scoring processes do not start within {START_TIMEOUT_S:g} s and "
                f"{self._settings.memory_gib:g} GiB: raise REWARDER_MEMORY_GIB"
            )
        raise ScoringFailed(f"a scoring process was killed {_STARTS} times before it was ready")

    def close(self) -> None:
        """Kill all processes; may be repeated."""
        processes = [self._idle.get() for _ in range(self._idle.qsize())]
        for process in processes:
            process.stop()
        for process in processes:
            process.join()
        self._end_strays()

    def check(self, spec: RewardSpec) -> str:
        """Why a reward cannot be loaded by the scoring processes; empty if it can."""
        outcome = self._in_a_process(check_reward, (spec,))
        return outcome.reason if isinstance(outcome, Mistake) else outcome

    def score(self, spec: RewardSpec, arguments: dict[str, list[Any]]) -> Scores:
        """One reward of one group: G values, None where it does not apply; raises ScoringFailed.

        `arguments` are the reward's: prompts, completions, completion_ids and columns, G of each.
        """
        outcome = self._in_a_process(call_reward, (spec, arguments, self._memory_bytes))
        if isinstance(outcome, Mistake):
            raise ScoringFailed(f"reward {spec.name}: {outcome.reason}")
        return outcome

    def _in_a_process(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What `work` returns in the first process that is free, or a Mistake."""
        process = self._idle.get()
        try:
            if not process.active:
                _kill(process)
                process = self._new_process()
            return self._run(process, work, arguments)
        finally:
            self._idle.put(process)
            with self._count:
                self.finished += 1

    def _run(
        self, process: pebble.ProcessPool, work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        timeout_s = self._settings.timeout_s
        try:
            future = process.schedule(work, args=arguments, timeout=timeout_s)
            return future.result(timeout_s + START_TIMEOUT_S)
        except TimeoutError:
            if not future.done():  # the task was lost on its way: this pool is not to be used again
                process.stop()
            self._end_strays()
            return Mistake(f"took more than {timeout_s:g} s")
        except (pebble.ProcessExpired, RuntimeError) as error:  # pebble's words for a dead process
            self._end_strays()
            return Mistake(self._cause_of_death(getattr(error, "exitcode", None)))

    def _cause_of_death(self, exit_code: int | None) -> str:
        if exit_code == OUT_OF_MEMORY:
            return f"needs more memory than REWARDER_MEMORY_GIB={self._settings.memory_gib:g} allows"
        return f"killed its process (exit code {exit_code})"

    def _new_process(self) -> pebble.ProcessPool:
        start_fork_server(_CONTEXT, self._settings.environment)  # if it has died
        return pebble.ProcessPool(
            max_workers=1,
            max_tasks=_CALLS_PER_PROCESS,
            initializer=prepare,
            initargs=(self._limits,),
            context=_CONTEXT,
        )

    def _end_strays(self) -> None:
        """Kill what scoring processes that have ended left behind in their process groups."""
        for path in Path(self._names.name).iterdir():
            pid = int(path.name)
            if not _is_alive(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number is another user's process now
        return False
    return True


def _kill(process: pebble.ProcessPool) -> None:
    process.stop()
    process.join()
