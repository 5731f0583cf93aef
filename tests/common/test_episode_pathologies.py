"""What goes wrong in tools and environments is contained and named, and is never a reward of 0."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from penstock.common.episodes.pool import Episode, EpisodeFailed, EpisodePool
from tests.common.test_episodes import begin, make_pool, spec

HANGING = ("spin", "spin_in_c", "never_ends", "never_awakes", "fork_bomb")
LIMIT_S = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    with closing(make_pool(spec("", "Bad Resets Rewards"), episode_memory_gib=2)) as pool:
        yield pool


def begun(pool: EpisodePool) -> Episode:
    episode = begin(pool, "Bad")
    assert episode.reset() is None
    return episode


def outcome(pool: EpisodePool, tool: str) -> Any:
    """The answer of a tool of Bad, or the text of the failure."""
    return outcome_of(begun(pool), tool)


def outcome_of(episode: Episode, tool: str) -> Any:
    """The same of an episode, which is closed. A failed episode has no reward."""
    with closing(episode):
        try:
            return episode.call(tool, {})
        except EpisodeFailed as error:
            with pytest.raises(EpisodeFailed):
                episode.reward()
            return str(error)


@pytest.fixture(scope="module")
def hung() -> Iterator[dict[str, Any]]:
    """What came of the tools that never return, side by side."""
    with closing(make_pool(spec("", "Bad", step_timeout_s=LIMIT_S))) as pool:
        episodes = [begun(pool) for _ in HANGING]  # before the machine is busy
        with ThreadPoolExecutor(len(HANGING)) as threads:
            found = dict(zip(HANGING, threads.map(outcome_of, episodes, HANGING), strict=True))
        found["afterwards"] = outcome(pool, "nothing")
        yield found


@pytest.mark.parametrize("tool", HANGING)
def test_a_tool_that_never_returns_is_killed_and_named(hung: dict[str, Any], tool: str) -> None:
    assert hung[tool] == f"tool {tool} took more than {LIMIT_S:g} s"


def test_after_all_of_them_an_episode_works(hung: dict[str, Any]) -> None:
    assert not hung["afterwards"].failed


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("gigabyte", "MEMORY_GIB"),
        ("allocate", "MEMORY_GIB"),
        ("long_answer", "characters"),
        ("leave", "exit code 0"),
        ("kill_itself", "exit code -9"),
        ("segfault", "exit code -11"),
        ("leave_politely", "the server is lost"),
        ("forge", "of another form"),
        ("close_all", ""),
    ],
)
def test_what_a_tool_does_to_its_process_fails_the_episode(
    pool: EpisodePool, tool: str, words: str
) -> None:
    found = outcome(pool, tool)
    assert isinstance(found, str), f"it was answered with {found}"
    assert found.startswith((f"tool {tool} ", f"tool {tool}: "))
    assert words in found


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("fail", "no such page"),
        ("fail_without_a_text", "Silent"),
        ("an_object", "hidden"),
        ("nosuch", "nosuch"),
    ],
)
def test_what_a_tool_raises_is_its_answer(pool: EpisodePool, tool: str, words: str) -> None:
    found = outcome(pool, tool)
    assert found.failed
    assert words in found.text


@pytest.mark.parametrize(
    ("tool", "text"), [("nothing", "None"), ("a_dict", "{'a': (1, 2)}"), ("fork_twice", "once")]
)
def test_what_a_tool_returns_becomes_text_as_in_trl(pool: EpisodePool, tool: str, text: str) -> None:
    found = outcome(pool, tool)
    assert (found.text, found.failed) == (text, False)


def test_secrets_are_not_seen_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    monkeypatch.setenv("A_NAMED_ONE", "loud")
    with closing(make_pool(spec("", "Bad"), episode_environment=["A_NAMED_ONE"])) as pool:
        found = outcome(pool, "secrets").text
    assert "hush" not in found
    assert "loud" in found


def test_no_command_to_a_terminal_comes_out_of_a_failure(pool: EpisodePool) -> None:
    for tool in ("escapes", "fail_with_escapes"):  # the policy reads them
        assert "half \\ud800" in outcome(pool, tool).text.replace("\\\\", "\\")
    with (
        closing(begin(pool, "Resets", how="raises")) as episode,
        pytest.raises(EpisodeFailed, match="no such level") as raised,
    ):
        episode.reset()
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "LookupError"), ("ends", "exit code 3"), ("number", "int"), ("list", "list"),
     ("bytes", "bytes")],
)  # fmt: skip
def test_a_reset_that_goes_wrong_fails_the_episode(pool: EpisodePool, how: str, words: str) -> None:
    with (
        closing(begin(pool, "Resets", how=how)) as episode,
        pytest.raises(EpisodeFailed, match="reset") as raised,
    ):
        episode.reset()
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "value", ["nan", "inf", "large", "text", "list", "huge", "raises", "exits"]
)  # fmt: skip
def test_a_reward_that_is_no_number_fails_the_episode(pool: EpisodePool, value: str) -> None:
    with closing(begin(pool, "Rewards", value=value)) as episode:
        episode.reset()
        with pytest.raises(EpisodeFailed, match="get_reward"):
            episode.reward()


@pytest.mark.parametrize(("value", "expected"), [("none", None), ("whole", 2.0)])
def test_no_reward_is_none_and_not_0(pool: EpisodePool, value: str, expected: float | None) -> None:
    with closing(begin(pool, "Rewards", value=value)) as episode:
        episode.reset()
        assert episode.reward() == expected
