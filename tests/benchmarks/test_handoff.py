"""The benchmark of the hand-off at a tiny size: all ways do the work, and its report is whole."""

from __future__ import annotations

from benchmarks.handoff import RATIOS, WAYS, Load, measure, table

TINY = Load(groups={100: 5, 2048: 3}, batches=(1, 2), ticket_bytes=10)


def test_every_way_hands_every_group_off_and_the_report_is_whole():
    rows = measure(TINY, rounds=7)  # by two servers
    assert [(row["payload"], row["batch"]) for row in rows] == [(100, 1), (100, 2), (2048, 1), (2048, 2)]
    for row in rows:
        calls = row["calls_per_group"]
        assert [calls["plain"][name] for name in ("xadd", "xack", "xdel")] == [1, 1, 1]
        assert calls["ledger"]["fcall"] == calls["one by one"]["fcall"] == 1
        assert list(row["ratio"]) == [f"{way} / {base}" for way, base in RATIOS]
        assert all(row["groups_per_s"][way]["min"] > 0 for way in WAYS)
    assert len(table(rows).splitlines()) == 1 + 4 + 2 + 4 * len(WAYS)
