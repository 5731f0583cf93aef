"""The benchmark of the learner's reading: both sides read the same groups."""

from __future__ import annotations

from pathlib import Path

from benchmarks import intake
from penstock.common.broker.local_server import LocalServer


def test_both_sides_read_all_groups(queue_server: LocalServer, tmp_path: Path) -> None:
    for number in (0, 1):
        found = intake.measure(queue_server, tmp_path, number, groups=5, tokens=40)
        assert found["plain"] > 0
        assert found["learner"] > found["plain"]
