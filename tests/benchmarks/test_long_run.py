"""The benchmark of memory over many groups: its points, and what counts as growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import long_run
from penstock.common.broker.local_server import LocalServer


def test_all_groups_are_handled_and_the_memory_is_that_of_both_processes(
    queue_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_run, "GROUPS", 4)
    points = long_run.measure(queue_server, tmp_path, groups=10)
    assert [point["groups"] for point in points] == [4, 8, 12]
    assert points[-1]["learner"] > 100 > points[-1]["server"] > 1


def test_growth_is_from_a_tenth_to_the_end() -> None:
    points = [{"groups": float(n), "learner": 100.0 + n, "server": 10.0} for n in range(20)]
    assert long_run.growth(points) == {"learner": 119 / 101, "server": 1.0}
