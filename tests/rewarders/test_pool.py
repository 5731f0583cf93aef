"""The scoring processes contain whatever a reward does."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import NEVER_RESTARTED, ConfigError
from penstock.common.sandbox.handle import Mistake
from penstock.common.sandbox.settings import SandboxFailed
from penstock.common.sandbox.starter import Starter
from penstock.common.sandbox.user import unused_id
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool, _file_of
from tests.helpers import is_dead, needs_root, wait_until
from tests.rewarders.stand_ins import reward

MakePool = Callable[..., ScoringPool]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Starts pools that end with the test."""
    with ExitStack() as pools:

        def make(**limits: Any) -> ScoringPool:
            defaults = {"workers": 1, "timeout_s": 60.0, "memory_gib": 1.0}
            pool = pools.enter_context(ScoringPool(RewarderSettings(**(defaults | limits))))
            return pool

        yield make


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    """One pool that lives through all that its rewards do to it."""
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=1)) as pool:
        yield pool


def arguments(*completions: str, **columns: Any) -> dict[str, list[Any]]:
    size = len(completions)
    return {
        "prompts": [""] * size,
        "completions": list(completions),
        "completion_ids": [[1] * len(text) for text in completions],
        **{name: [value] * size for name, value in columns.items()},
    }


def score(pool: ScoringPool, name: str, *completions: str, **columns: Any) -> tuple[float | None, ...]:
    return pool.score(reward(name), arguments(*completions, **columns)).values


def below(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """The children of these processes."""
    found: set[psutil.Process] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= set(process.children())
    return found


def nurseries() -> set[psutil.Process]:
    return below([psutil.Process()])


def keepers() -> set[psutil.Process]:
    return below(nurseries())


def scoring_processes() -> set[psutil.Process]:
    """Without the calls that are below some of them."""
    return below(keepers())


def test_a_healthy_reward_comes_back(pool: ScoringPool) -> None:
    assert score(pool, "length_in_letters", "a", "abc") == (1.0, 3.0)


@pytest.mark.parametrize(
    ("name", "reason"),
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
        ("logs_too_few", "log_extra.* has 0 values, expected 1"),
    ],
)
def test_what_goes_wrong_is_a_failure_and_the_next_scoring_works(
    pool: ScoringPool, name: str, reason: str
) -> None:
    with pytest.raises(ScoringFailed, match=f"reward {name}: .*{reason}"):
        score(pool, name, "a")
    assert score(pool, "length_in_letters", "a") == (1.0,)


def test_a_call_may_have_a_limit_of_its_own(make_pool: MakePool) -> None:
    with pytest.raises(ScoringFailed, match=r"took more than 0.5 s .REWARDER_TIMEOUT_S"):
        make_pool().score(reward("hang"), arguments("a"), timeout_s=0.5)


@pytest.mark.parametrize("name", ["hang", "hang_in_c", "spin"])
def test_a_hang_is_killed_and_the_next_scoring_works(make_pool: MakePool, name: str) -> None:
    pool = make_pool(timeout_s=4.0)
    with pytest.raises(ScoringFailed, match=r"took more than 4 s"):
        score(pool, name, "a")
    assert score(pool, "length_in_letters", "a") == (1.0,)


def test_a_tower_of_powers_is_a_failure_and_not_a_zero(make_pool: MakePool) -> None:
    pool = make_pool(timeout_s=4.0)
    with pytest.raises(ScoringFailed, match="accuracy"):
        score(pool, "accuracy", "$9^{9^{9^{9}}}$", solution="5")
    assert score(pool, "accuracy", "5", solution="5") == (1.0,)


@needs_root
def test_no_process_of_the_same_user_changes_the_limits_of_a_scoring_process(pool: ScoringPool) -> None:
    user = pwd.getpwnam("nobody")
    assert score(pool, "length_in_letters", "a") == (1.0,)  # built-in code has a process already
    uids = {user.pw_uid, unused_id(user.pw_uid)}
    pids = [process.pid for process in scoring_processes() if process.uids().real in uids]
    assert len(pids) >= 2
    if (attacker := os.fork()) == 0:
        refused = 0
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
            for pid in pids:
                try:
                    resource.prlimit(pid, resource.RLIMIT_AS, (2**28, 2**28))
                except PermissionError:
                    refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(attacker, 0)[1]) == len(pids)


def test_a_column_of_bytes_fails_no_reward(pool: ScoringPool) -> None:
    assert score(pool, "accuracy", "5", "6", solution="5", image=b"\x89PNG\xff") == (1.0, 0.0)


def test_a_large_column_is_sent_once_for_all_completions(pool: ScoringPool) -> None:
    """One copy for each of 64 completions would be over 512 MiB, the most that a request may have."""
    texts = ["a"] * 64
    assert score(pool, "length_in_letters", *texts, context="x" * (9 * 2**20)) == (1.0,) * 64


def test_what_a_reward_changes_in_one_value_of_a_column_is_not_in_the_others(pool: ScoringPool) -> None:
    assert score(pool, "changes_the_first", "a", "b", "c", cases=[[1, 2]]) == (3.0, 2.0, 2.0)


def test_a_reward_without_its_column_is_a_failure(pool: ScoringPool) -> None:
    with pytest.raises(ScoringFailed, match="solution"):
        score(pool, "accuracy", "5")


def test_a_long_scoring_does_not_hold_up_the_other_processes(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(workers=2, timeout_s=60.0, user="")
    with ThreadPoolExecutor() as threads:
        long = threads.submit(score, pool, "wait_for_files", "a", folder=str(tmp_path), count=2)
        wait_until(lambda: list(tmp_path.iterdir()), "the start of the long scoring")
        for _ in range(20):
            assert score(pool, "length_in_letters", "a") == (1.0,)
        assert not long.done()
        (tmp_path / "end").touch()
        assert long.result() == (1.0,)


@pytest.mark.parametrize("victims", [scoring_processes, keepers, nurseries])
@pytest.mark.parametrize("name", ["accuracy", "length_in_letters"])
def test_an_idle_process_may_be_killed(
    make_pool: MakePool, name: str, victims: Callable[[], set[psutil.Process]]
) -> None:
    others = victims()
    pool = make_pool()
    before = score(pool, name, "5", solution="5")
    killed = victims() - others
    for process in killed:
        process.kill()
    wait_until(lambda: all(is_dead(one.pid) for one in killed), "the end of the processes")
    assert killed
    with structlog.testing.capture_logs() as logs:
        assert score(pool, name, "5", solution="5") == before
    told = [log["event"] for log in logs if "lack of memory" in log["event"]]
    assert told or victims is not scoring_processes


def test_a_reward_whose_processes_end_before_they_run_it_is_not_taken_for_a_wrong_one(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewarder ends with an exit code after which it is started again."""
    pool = make_pool()
    monkeypatch.setattr(Starter, "_await_ready", lambda *_: False)
    with pytest.raises(SandboxFailed, match=r"\.py was killed 5 times before it was ready") as failure:
        pool.check(reward("length_in_letters"))
    assert failure.value.exit_code not in NEVER_RESTARTED


def test_a_check_whose_process_is_killed_once_is_made_again(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, outcomes = make_pool(), [Mistake("killed its process (exit code -9)", killed=True)] * 2 + [""]
    monkeypatch.setattr(pool, "run", lambda *_, **__: outcomes.pop(0))
    assert pool.check(reward("length_in_letters")) == ""


def test_a_polite_signal_to_the_process_group_does_not_spoil_a_scoring(
    make_pool: MakePool, tmp_path: Path
) -> None:
    others = scoring_processes()
    pool = make_pool(user="")
    score(pool, "length_in_letters", "a")
    started = scoring_processes() - others
    with ThreadPoolExecutor() as threads:
        scoring = threads.submit(score, pool, "wait_for_files", "abc", folder=str(tmp_path), count=2)
        wait_until(lambda: list(tmp_path.iterdir()), "the start of the scoring")
        for process in started | below(started):
            process.send_signal(signal.SIGTERM)
        (tmp_path / "end").touch()
        assert scoring.result() == (3.0,)


def test_a_memory_limit_that_leaves_no_room_is_a_wrong_setting(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="REWARDER_MEMORY_GIB"):
        make_pool(memory_gib=0.05)


def test_no_process_is_left_behind(make_pool: MakePool) -> None:
    others = set(psutil.Process().children(recursive=True))
    pool = make_pool(workers=3)
    score(pool, "length_in_letters", "a")
    assert len(set(psutil.Process().children(recursive=True)) - others) == 2 + 2 * 4
    pool.close()
    wait_until(
        lambda: set(psutil.Process().children(recursive=True)) <= others, "the end of the processes"
    )


@needs_root
def test_a_fork_bomb_is_contained(pool: ScoringPool) -> None:
    """Root would not be held by a limit of processes: the scoring process is somebody else."""
    with pytest.raises(ScoringFailed, match=r"BlockingIOError"):
        score(pool, "fork_bomb", "a")
    wait_until(lambda: len(scoring_processes()) < 5, "the end of the bomb")
    assert score(pool, "length_in_letters", "a") == (1.0,)


@pytest.mark.parametrize("name", ["fork_and_hang", "fork_and_return", "fork_out_of_reach"])
def test_what_a_reward_starts_ends_with_it(make_pool: MakePool, name: str, tmp_path: Path) -> None:
    others = keepers()
    pool = make_pool(timeout_s=4.0, user="")
    with contextlib.suppress(ScoringFailed):
        score(pool, name, "a", marker=str(tmp_path / "child"))
    assert (tmp_path / "child").read_text()
    bodies = below(keepers() - others)
    assert all(is_dead(one.pid) for one in below(bodies))
    assert len(bodies) <= 2  # of built-in rewards, and of this code
    assert score(pool, "length_in_letters", "a") == (1.0,)


def test_secrets_are_not_seen_unless_they_are_named(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    assert score(make_pool(), "show_environment", "a") == (0.0,)


def test_a_timer_that_a_reward_forgot_strikes_nobody(pool: ScoringPool) -> None:
    assert score(pool, "forget_a_timer", "a") == (1.0,)
    assert score(pool, "slow", "a") == (1.0,)


@needs_root
def test_a_scoring_process_is_nobody(make_pool: MakePool) -> None:
    assert score(make_pool(), "show_environment", "uid") == (pwd.getpwnam("nobody").pw_uid,)
    assert score(make_pool(user=""), "show_environment", "uid") == (0.0,)


@needs_root
def test_a_user_that_does_not_exist_is_a_wrong_setting(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="REWARDER_USER: there is no user 'nosuchuser'"):
        make_pool(user="nosuchuser")


def test_what_a_reward_logs_comes_back(pool: ScoringPool) -> None:
    scores = pool.score(reward("logs"), arguments("a", "bc"))
    assert scores.extra == {"shouted": ("A", "BC"), "parsed": ("1" + "0" * 30,) * 2}
    assert scores.metrics == {"letters": 3.0}


@pytest.mark.parametrize("name", ["pipe", "nul\0", "gone"])
def test_what_replaced_a_rewards_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    spec = RewardSpec("own", source=str(tmp_path / name), digest="")
    assert _file_of(spec, Mistake("took more than 1 s")).startswith(", in ")
