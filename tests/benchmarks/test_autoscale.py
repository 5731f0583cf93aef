"""The benchmark of autoscale: its formula, its judge, and times that change while a run goes on."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.autoscale import LOADS, TARGET, Load
from benchmarks.pipeline_roles import group_seconds, paced

RIGHT = {1: 0.1, 2: 0.09}


def test_the_computed_numbers_differ_and_waits_are_clearly_on_their_sides() -> None:
    assert [(load.computed(), load.wait(load.computed())) for load in LOADS] == [(2, 0), (4, 0), (3, 0)]
    assert min(load.wait(load.computed() - 1) for load in LOADS) > 1.5 * TARGET
    assert [Load("", 3.0, 0.75).wait(n) for n in (1, 2, 3)] == pytest.approx([5 / 8, 1 / 4, 0])


@pytest.mark.parametrize(
    ("changes", "waits", "said"),
    [
        ([(0, 4), (50, 2), (90, 1), (170, 2)], RIGHT, ""),  # a search returns once
        ([(0, 4), (50, 2), (200, 1)], RIGHT, ""),
        ([(0, 4), (181, 2)], RIGHT, "within one of 2"),
        ([(0, 3), (190, 4)], RIGHT, "within one of 2"),
        ([(0, 3), (190, 2), (230, 3)], RIGHT, "at most one change"),
        ([(0, 1), (30, 2), (60, 1), (90, 2)], RIGHT, "no two numbers alternate"),
        (
            [(0, 2)],
            {1: 0.2, 2: 0.1, 3: 0.09},
            "expected 2 to be right by the formula, found 3 by the wait",
        ),
        ([(0, 2)], {1: 0.09}, "expected 2 to be right by the formula, found 1 by the wait"),
        (
            [(0, 7)],
            {1: 0.2, 2: 0.2, 8: 0.2},
            "expected 2 to be right by the formula, found 8 by the wait",
        ),
    ],
)
def test_a_bound_that_is_missed_is_said(changes, waits, said: str) -> None:
    faults = Load("slow", 4.5, 0.7, changes, waits).faults()
    assert len(faults) == bool(said)
    assert said in "".join(faults)


def test_the_times_in_the_file_hold_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_TIMES", str(tmp_path / "times.json"))
    for load in LOADS:
        load.begin(tmp_path / "times.json")
        assert paced("PIPELINE_UPDATE_S") == load.update_s
        drawn = [group_seconds(seed) for seed in range(2000)]
        assert fmean(drawn) == pytest.approx(load.group_s, rel=0.05)
        assert max(drawn) > 2 * load.group_s
