"""Generated golds equal themselves however they are marked, and no others; pairs are symmetric.

NIGHTLY=1 has 5,000 golds and 5,000 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.gold_kinds import KINDS, gold_pairs
from benchmarks.golds import WRAPPINGS
from penstock.common.config.settings import RewarderSettings
from penstock.rewarders.rewards.accuracy import accuracy
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.helpers import NIGHTLY
from tests.rewarders.stand_ins import reward
from tests.rewarders.test_pool import arguments

GOLDS = 5000 if NIGHTLY else 3 * len(KINDS)
PAIRS = 5_000 if NIGHTLY else 200
WRAPS = [WRAPPINGS[name] for name in ("boxed", "<answer> tight", "after ####")]

_ATOMS = st.one_of(
    st.integers(-999, 99_999).map(str),
    st.decimals(0, 99, places=2, allow_nan=False).map(str),
    st.builds(gold_pairs, st.integers(0, 10**6), st.just(len(KINDS))).flatmap(
        lambda pairs: st.sampled_from([gold for _, gold, _ in pairs])
    ),
    st.sampled_from(
        ["x", "ab", r"\pi", "yes", "A", "(B)", r"\frac{1}{0}", "", "{", "}", "$", "it depends"]
    ),
)
TEXTS = st.one_of(
    _ATOMS,
    st.builds(
        "".join,
        st.lists(
            st.one_of(
                _ATOMS, st.sampled_from([",", "=", " ", "+", "<", ":", r"\%", " cm", "^2", "_", "-"])
            ),
            max_size=4,
        ),
    ),
    st.text(max_size=12),
)


def test_generated_golds_equal_themselves_and_no_neighbors():
    own = wrong = count = 0
    for _, gold, neighbor in gold_pairs(seed=7, count=GOLDS):
        wraps = WRAPS if "$" in gold else [*WRAPS, "${}$"]
        own += sum(accuracy([""], [wrap.format(gold)], [gold]) == [1.0] for wrap in wraps)
        wrong += sum(
            accuracy([""], [wrap.format(neighbor)], [gold]) == [1.0]
            for wrap in wraps[:: 1 if NIGHTLY else 3]
        )
        count += len(wraps)
    assert own >= 0.995 * count
    assert wrong <= 0.001 * count


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(RewarderSettings(workers=1, timeout_s=2.0, memory_gib=2)) as pool:
        yield pool


def verdict(pool: ScoringPool, gold: str, answer: str) -> object:
    """The verdict on a boxed answer; for one over the limits of time or memory the failure's words."""
    asked = arguments(rf"\boxed{{{answer}}}", solution=rf"\boxed{{{gold}}}")
    try:
        return pool.score(reward("accuracy"), asked).values[0]
    except ScoringFailed as error:
        return str(error)


def test_verdicts_are_symmetric_and_always_there(pool: ScoringPool) -> None:
    """In the sandbox, as in a run: sympy's simplification of large powers has no other limit."""
    decided = []

    @settings(max_examples=PAIRS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(one=TEXTS, other=TEXTS)
    @example(one="x = 5", other="y = 5")
    @example(one=r"\sqrt{2x}", other=r"\sqrt{2}x")
    @example(one=r"\frac{1}{2x}", other=r"\frac{12}{x}")
    def compare(one: str, other: str) -> None:
        forth, back = verdict(pool, one, other), verdict(pool, other, one)
        for found in (forth, back):
            assert found in (None, 0.0, 1.0) or "took more than" in str(found) or "memory" in str(found)
        decided.append({forth, back} <= {0.0, 1.0})
        assert not decided[-1] or forth == back

    compare()
    assert sum(decided) > PAIRS / 2
