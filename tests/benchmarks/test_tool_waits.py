"""The benchmark of waiting tools: its measure, and that its actor holds conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tool_waits
from benchmarks.talk_model import make_tokenizer
from penstock.common.broker.local_server import LocalServer


def test_the_share_counts_only_what_is_between_the_two_times() -> None:
    spans_s = [(0.0, 2.0), (3.0, 4.0), (9.0, 12.0), (20.0, 30.0)]
    assert tool_waits.busy_share(spans_s, 1.0, 11.0) == (1 + 1 + 2) / (tool_waits.PLACES * 10.0)


def test_an_actor_keeps_the_engine_busy(
    queue_server: LocalServer, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_waits, "_STEADY_S", 0.2)
    monkeypatch.setattr(tool_waits, "COMPLETION_S", 0.1)
    make_tokenizer().save_pretrained(tmp_path / "model")
    share = tool_waits.measure(queue_server, tmp_path, run_name, wait_s=0.01, seconds=1.0)
    assert 0 < share <= 1
