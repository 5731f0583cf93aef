"""Metrics in other places than metrics.jsonl."""

from __future__ import annotations

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.learner.report.recorder import Recorder


def test_tensorboard_has_the_steps_metrics(tmp_path):
    recorder = Recorder(tmp_path, ["tensorboard"], "run")
    for step in (1, 2):
        recorder.metrics(step, {"reward": step / 2, "groups/dead": 0, "note": "text"})
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward", "groups/dead"]
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_wandb_gets_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    recorder = Recorder(tmp_path, ["wandb"], "run")
    recorder.metrics(1, {"reward": 0.5})
    recorder.completions(1, [{"step": 1, "prompt": "1+1=", "completion": "2"}])
    recorder.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(table.read_text())["data"] == [[1, "1+1=", "2"]]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5}
