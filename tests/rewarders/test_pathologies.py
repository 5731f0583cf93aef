"""Texts that make math_verify hang, crash or eat memory: contained, named, never a 0, on either side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.common.config.settings import RewarderSettings
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.helpers import wait_until
from tests.rewarders.stand_ins import reward
from tests.rewarders.test_pool import arguments

pytestmark = pytest.mark.e2e  # some seconds each

TEXTS = {
    "a tower of powers": "$9^{9^{9^{9}}}$",
    "a large factorial": "$10000000!$",
    "a large power": "$2^{10^{9}}$",
    "a long sum": r"$\sum_{n=1}^{10^9} 1/n$",
    "an integral": r"$\int_0^\infty e^{-x^x}dx$",
    "a large binomial": r"$\binom{10^9}{5*10^8}$",
    "a long product": r"$\prod_{k=1}^{10^7} k$",
    "a factorial of a factorial": "$((100!)!)$",
    "an expansion": "$(a+b+c+d+e+f)^{60}$",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(RewarderSettings(workers=2, timeout_s=1.0, memory_gib=2)) as pool:
        yield pool


def outcome(pool: ScoringPool, completion: str, gold: str) -> object:
    """The value, or the failure's words."""
    try:
        return pool.score(reward("accuracy"), arguments(completion, solution=gold)).values[0]
    except ScoringFailed as error:
        return str(error)


@pytest.fixture(scope="module")
def outcomes(pool: ScoringPool) -> dict[tuple[str, str], object]:
    """All of them on either side, two at a time."""
    cases = [(name, side) for name in TEXTS for side in ("answer", "gold")]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(
            lambda case: outcome(
                pool, *((TEXTS[case[0]], "5") if case[1] == "answer" else ("5", TEXTS[case[0]]))
            ),
            cases,
        )
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("side", ["answer", "gold"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_pathology_is_a_failure_that_names_the_reward(outcomes, name: str, side: str) -> None:
    found = outcomes[name, side]
    assert isinstance(found, str), f"it was worth {found}"
    assert found.startswith("reward accuracy: ")


def test_the_pool_works_on(pool: ScoringPool, outcomes) -> None:
    wait_until(lambda: outcome(pool, "72", "72") == 1.0, "a score")  # a busy machine may need over 1 s
