"""Scoring processes that can be killed, so that no completion can stop a run.

Model text makes verifiers hang in C code, crash and eat memory (`9^{9^{9^{9}}}` is enough). Such a
scoring ends as ScoringFailed, which is retried and then set aside; it never becomes a reward.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pebble

from common.errors import ConfigError, PenstockError
from common.settings import RewarderSettings
from rewarders.rewards import Reward
from rewarders.sandbox import OUT_OF_MEMORY, Reply, call_reward, prepare, ready

START_TIMEOUT_S = 60.0
"""Time for a scoring process to start and take its work, beside the time for the work itself."""

_CALLS_PER_PROCESS = 1000
"""Then the process is replaced: sympy's caches grow, and its memory limit is for the answer."""

_STARTS = 5
"""How often a scoring process is started that is killed before it is ready."""

# A fork server has imported the rewards: what replaces a killed process is there at once.
_CONTEXT = multiprocessing.get_context("forkserver")

# Scoring processes ignore the polite signal; pebble would wait 3 s before it kills.
pebble.CONSTS.term_timeout = 0.1


class ScoringFailed(PenstockError):
    """A reward could not be computed: it hung, crashed, ran out of memory or returned nonsense."""


class ScoringPool:
    """`workers` scoring processes; `score` may be called from as many threads.

    Each process is a pebble pool of its own: a pool that loses an idle worker breaks as a whole.
    """

    def __init__(self, settings: RewarderSettings, rewards: Mapping[str, Reward]) -> None:
        self.rewards = rewards
        self.finished = 0
        self._settings = settings
        self._memory_bytes = int(settings.memory_gib * 2**30)
        self._idle: queue.LifoQueue[pebble.ProcessPool] = queue.LifoQueue()
        self._count = threading.Lock()

    def start(self) -> None:
        """Start all processes and wait until they are ready; raises ConfigError, ScoringFailed."""
        _CONTEXT.set_forkserver_preload(["__main__", "rewarders.sandbox"])
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
        """Kill all processes."""
        processes = [self._idle.get() for _ in range(self._idle.qsize())]
        for process in processes:
            process.stop()
        for process in processes:
            process.join()

    def score(
        self, name: str, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[float | None, ...]:
        """One reward of one group: G values, None where it does not apply; raises ScoringFailed."""
        task = (self.rewards[name], prompts, completions, columns, self._memory_bytes)
        process = self._idle.get()
        try:
            if not process.active:
                _kill(process)
                process = self._new_process()
            values, mistake = self._run(process, task)
        finally:
            self._idle.put(process)
            with self._count:
                self.finished += 1
        if values is None:
            raise ScoringFailed(f"reward {name}: {mistake}")
        return tuple(values)

    def _run(self, process: pebble.ProcessPool, task: tuple[Any, ...]) -> Reply:
        timeout_s = self._settings.timeout_s
        try:
            future = process.schedule(call_reward, args=task, timeout=timeout_s)
            return future.result(timeout_s + START_TIMEOUT_S)
        except TimeoutError:
            if not future.done():  # the task was lost on its way: this pool is not to be used again
                process.stop()
            return None, f"took more than {timeout_s:g} s"
        except (pebble.ProcessExpired, RuntimeError) as error:  # pebble's words for a dead process
            return None, self._cause_of_death(getattr(error, "exitcode", None))

    def _cause_of_death(self, exit_code: int | None) -> str:
        if exit_code == OUT_OF_MEMORY:
            return f"needs more memory than REWARDER_MEMORY_GIB={self._settings.memory_gib:g} allows"
        return f"killed its process (exit code {exit_code})"

    def _new_process(self) -> pebble.ProcessPool:
        return pebble.ProcessPool(
            max_workers=1,
            max_tasks=_CALLS_PER_PROCESS,
            initializer=prepare,
            initargs=(self._memory_bytes,),
            context=_CONTEXT,
        )


def _kill(process: pebble.ProcessPool) -> None:
    process.stop()
    process.join()
