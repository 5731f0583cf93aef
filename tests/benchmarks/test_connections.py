"""The benchmark of many connections: each of them hands groups off."""

from __future__ import annotations

import pytest

from benchmarks import connections
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import WorkStream


def test_each_connection_hands_groups_off(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    take = WorkStream.take
    monkeypatch.setattr(
        WorkStream, "take", lambda self, count: used.append((self, count)) or take(self, count)
    )
    found = connections.measure(queue_server.url, rounds=1, counts=(1, 3), groups=80)
    assert found[1] == [1.0]
    assert found[3][0] > 0
    batches = [stream for stream, count in used if count == connections.BATCH]
    assert len(set(map(id, batches))) >= 2 * (1 + 3)
