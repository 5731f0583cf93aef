"""The scoring processes contain whatever a reward does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from common.errors import ConfigError
from common.settings import RewarderSettings
from rewarders.pool import ScoringFailed, ScoringPool
from rewarders.rewards import REWARDS, Reward
from tests.helpers import wait_until
from tests.rewarders import bad_rewards

MakePool = Callable[..., ScoringPool]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Starts pools that end with the test."""
    with ExitStack() as pools:

        def make(rewards: Mapping[str, Reward] = bad_rewards.REWARDS, **limits: float) -> ScoringPool:
            defaults = {"workers": 1, "timeout_s": 10.0, "memory_gib": 1.0}
            pool = ScoringPool(RewarderSettings(**(defaults | limits)), rewards)
            pools.callback(pool.close)
            pool.start()
            return pool

        yield make


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    """One pool that lives through all that its rewards do to it."""
    pool = ScoringPool(
        RewarderSettings(workers=1, timeout_s=10, memory_gib=1), {**bad_rewards.REWARDS, **REWARDS}
    )
    pool.start()
    yield pool
    pool.close()


def score(pool: ScoringPool, name: str, *completions: str) -> tuple[float | None, ...]:
    return pool.score(name, [""] * len(completions), list(completions), {})


def scoring_processes() -> set[psutil.Process]:
    """The grandchildren: scoring processes are children of the fork server."""
    children = psutil.Process().children()
    return set(psutil.Process().children(recursive=True)) - set(children)


def test_a_healthy_reward_comes_back(pool: ScoringPool) -> None:
    assert score(pool, "length", "a", "abc") == (1.0, 3.0)


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("leave", "killed its process .exit code 3"),
        ("segfault", "killed its process .exit code -11"),
        ("raise_error", "LookupError: no such verifier"),
        ("system_exit", "SystemExit"),
        ("allocate", "more memory than REWARDER_MEMORY_GIB=1"),
        ("swallow_memory_error", "more memory than REWARDER_MEMORY_GIB=1"),
        ("not_a_number", "finite numbers or None, found nan"),
        ("infinite", "finite numbers or None, found inf"),
        ("wrong_count", "a list of 1 values"),
        ("text", "finite numbers or None, found 1.0"),
        ("nothing", "a list of 1 values, found None"),
    ],
)
def test_what_goes_wrong_is_a_failure_and_the_next_scoring_works(
    pool: ScoringPool, reward: str, reason: str
) -> None:
    with pytest.raises(ScoringFailed, match=f"reward {reward}: .*{reason}"):
        score(pool, reward, "a")
    assert score(pool, "length", "a") == (1.0,)


@pytest.mark.parametrize("reward", ["hang", "hang_in_c"])
def test_a_hang_is_killed_in_time_and_the_next_scoring_works(make_pool: MakePool, reward: str) -> None:
    pool = make_pool(timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(ScoringFailed, match=r"took more than 0\.3 s"):
        score(pool, reward, "a")
    assert score(pool, "length", "a") == (1.0,)
    assert time.monotonic() - start < 3


def test_a_tower_of_powers_is_a_failure_and_not_a_zero(make_pool: MakePool) -> None:
    pool = make_pool(REWARDS, timeout_s=1.0)
    columns = {"solution": ["5"]}
    with pytest.raises(ScoringFailed, match="accuracy"):
        pool.score("accuracy", [""], ["$9^{9^{9^{9}}}$"], columns)
    assert pool.score("accuracy", [""], ["5"], columns) == (1.0,)


def test_a_reward_without_its_column_is_a_failure(pool: ScoringPool) -> None:
    with pytest.raises(ScoringFailed, match="solution"):
        score(pool, "accuracy", "5")


def test_a_hang_does_not_hold_up_the_other_processes(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, timeout_s=1.0)
    with ThreadPoolExecutor() as threads:
        hanging = threads.submit(score, pool, "hang", "a")
        wait_until(hanging.running, "the hang")
        for _ in range(20):
            assert score(pool, "length", "a") == (1.0,)
        assert not hanging.done()
        assert isinstance(hanging.exception(), ScoringFailed)


def test_an_idle_process_may_be_killed(make_pool: MakePool) -> None:
    others = scoring_processes()
    pool = make_pool()
    (process,) = scoring_processes() - others
    process.kill()
    wait_until(lambda: not process.is_running(), "the end of the process")
    time.sleep(0.3)  # until pebble has seen it
    assert score(pool, "length", "a") == (1.0,)


@pytest.mark.parametrize("victim", [os.getpid, os.getppid], ids=["itself", "its fork server"])
def test_a_process_that_is_killed_before_it_is_ready_is_replaced(
    make_pool: MakePool, victim: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "killed"
    monkeypatch.setattr("rewarders.pool.ready", partial(bad_rewards.ready_at_last, str(marker), victim))
    pool = make_pool(workers=2)
    assert marker.exists()
    assert score(pool, "length", "a") == (1.0,)


def test_a_process_that_is_killed_at_every_start_fails_but_is_no_wrong_setting(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewarders.pool.ready", partial(bad_rewards.ready_at_last, "", os.getpid))
    with pytest.raises(ScoringFailed, match="killed 5 times before it was ready"):
        make_pool()


def test_a_polite_signal_to_the_process_group_does_not_spoil_a_scoring(make_pool: MakePool) -> None:
    others = scoring_processes()
    pool = make_pool()
    (process,) = scoring_processes() - others
    with ThreadPoolExecutor() as threads:
        scoring = threads.submit(score, pool, "slow", "abc")
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert scoring.result() == (3.0,)


def test_a_memory_limit_that_leaves_no_room_is_a_wrong_setting(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="REWARDER_MEMORY_GIB"):
        make_pool(memory_gib=0.05)


def test_no_process_is_left_behind(make_pool: MakePool) -> None:
    others = scoring_processes()
    pool = make_pool(workers=3)
    assert len(scoring_processes() - others) == 3
    pool.close()
    wait_until(lambda: scoring_processes() <= others, "the end of the processes")
