"""Generated golds equal themselves however they are marked, and no others; pairs are symmetric.

NIGHTLY=1 has 5,000 golds and 20,000 pairs.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.gold_kinds import KINDS, gold_pairs
from benchmarks.golds import WRAPPINGS
from penstock.rewarders.rewards.accuracy import accuracy

NIGHTLY = os.environ.get("NIGHTLY") == "1"
GOLDS = 5000 if NIGHTLY else 3 * len(KINDS)
PAIRS = 20_000 if NIGHTLY else 200
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


@settings(max_examples=PAIRS, deadline=None, suppress_health_check=list(HealthCheck))
@given(TEXTS, TEXTS)
@example("x = 5", "y = 5")
@example(r"\sqrt{2x}", r"\sqrt{2}x")
@example(r"\frac{1}{2x}", r"\frac{12}{x}")
def test_verdicts_are_symmetric_and_always_there(one: str, other: str) -> None:
    forth, back = (
        accuracy([""], [rf"\boxed{{{other}}}"], [rf"\boxed{{{one}}}"]),
        accuracy([""], [rf"\boxed{{{one}}}"], [rf"\boxed{{{other}}}"]),
    )
    assert forth[0] in (None, 0.0, 1.0)
    if None not in (forth[0], back[0]):
        assert forth == back
