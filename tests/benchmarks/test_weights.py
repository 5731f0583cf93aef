"""The benchmarks of how versions are sent, at their smallest sizes."""

from __future__ import annotations

import json

import pytest

from benchmarks import fetchers, weights

Capture = pytest.CaptureFixture[str]


def test_every_delta_is_applied(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    for name, value in {"WIDTH": 128, "LAYERS": 1, "UPDATES": 2}.items():
        monkeypatch.setattr(weights, name, value)
    monkeypatch.setattr("sys.argv", ["weights", "--rounds", "1", "--json"])
    assert weights.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["int32 and bf16"] for one in found["sizes"]] == [6.0, 6.0]
    assert all(found["ms per GB"][stage]["least"] > 0 for stage in ("send the delta", weights.RATIO))
    monkeypatch.setattr(weights.delta, "_apply", lambda *_: True)
    with pytest.raises(AssertionError, match="the round trip is not exact"):
        weights.main()


def test_fetchers_are_served_in_order(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(fetchers, "ACTORS", 3)
    monkeypatch.setattr(fetchers, "STEPS", 1)
    monkeypatch.setattr("sys.argv", ["fetchers", "--mib", "1", "--rounds", "1", "--json"])
    code, found = fetchers.main(), json.loads(capsys.readouterr().out)
    assert code == (found["ratio"] > fetchers.GOAL or not found["in order"])
    assert len(found["rounds"][0]["had_it_after_s"]) == 3
    orders = ([1, 2, 3], [2, 1, 3], [3, 2, 1], [2, 3, 1], [1, 2])
    assert [fetchers.in_order(one) for one in orders] == [True, True, False, False, False]
