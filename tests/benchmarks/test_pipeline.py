"""The pipeline's benchmark: its limits, and how it reads a run's steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pipeline
from benchmarks.pipeline import Mode


def test_the_limit_of_an_asynchronous_run_is_the_longer_time() -> None:
    even = pipeline.generation_s()
    assert even == pytest.approx(64 / 0.75 * 0.3 / 16)
    assert Mode("", 2, even / 2).limit_s == even
    assert Mode("", 2, 9.0).limit_s == 9.0


def test_a_synchronous_run_waits_for_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FILTERED", 0.0)
    assert pipeline.synchronous_s() == pytest.approx(4 * 0.3)  # 64 groups in 16 places
    monkeypatch.setattr(pipeline, "GROUPS", 65)
    assert pipeline.synchronous_s() == pytest.approx(5 * 0.3)
    assert Mode("", 0, 2.0).limit_s == pytest.approx(2.0 + 5 * 0.3)


def test_replaced_groups_make_a_synchronous_run_slower_than_the_engine_is() -> None:
    assert pipeline.generation_s() < pipeline.synchronous_s() < 2 * pipeline.generation_s()


def test_a_step_takes_the_sum_of_its_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FIRST_STEP", 1)
    rows = [
        {"perf/learner/starting_s": 100.0},
        {
            "perf/learner/a_s": 1.0,
            "perf/learner/a_cpu_s": 50.0,
            "perf/learner/b_s": 2.0,
            "perf/step_s": 7,
            "perf/actor/generating_s": 9.0,
        },
        {"perf/learner/a_s": 3.0, "perf/learner/b_s": 4.0},
    ]
    lines = [json.dumps({"step": number, **row}) for number, row in enumerate(rows, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert pipeline.step_seconds(tmp_path / "metrics.jsonl") == 5.0
