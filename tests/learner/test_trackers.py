"""Metrics in other places than metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.run_folder import LearnerFolder
from penstock.learner.report.recorder import Recorder
from tests.helpers import wait_until


def test_tensorboard_has_the_steps_metrics(tmp_path):
    recorder = Recorder(LearnerFolder(tmp_path, 1), ["tensorboard"], "run")
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
    recorder = Recorder(LearnerFolder(tmp_path, 1), ["wandb"], "run")
    recorder.metrics(1, {"reward": 0.5})
    recorder.completions(1, lambda: [{"step": 1, "prompt": "1+1=", "completion": "2"}])
    recorder.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(table.read_text())["data"] == [[1, "1+1=", "2"]]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5}


SETTINGS = {
    "learning_rate": 1e-6,
    "dataset": ["a", "b"],
    "generation_kwargs": {"stop": "x"},
    "files_url": "http://me:hidden@host/runs?token=hidden",
}


def test_settings_are_sent_without_a_password(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    Recorder(LearnerFolder(tmp_path, 1), ["wandb", "tensorboard"], "run", SETTINGS).close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = (event.tensor_proto for event in events.Tensors("settings/text_summary"))
    said = text.string_val[0].decode()
    assert "    learning_rate: 1e-06\n" in said
    assert '    dataset: ["a", "b"]\n' in said
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    wait_until(lambda: b"generation_kwargs" in run.read_bytes(), "wandb's process to write")
    sent = run.read_bytes()
    for found in (said.encode(), sent):
        assert b"http://***@host/runs?token=***" in found
        assert b"hidden" not in found


def test_a_run_of_the_same_name_elsewhere_is_another_one_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for machine in ("one", "two"):
        for _ in range(2):  # a restart goes on with its id
            (tmp_path / machine).mkdir(exist_ok=True)
            Recorder(LearnerFolder(tmp_path / machine, 1), ["wandb"], "run").close()
    ids = {
        machine: {path.stem for path in (tmp_path / machine / "wandb").glob("offline-run-*/*.wandb")}
        for machine in ("one", "two")
    }
    assert all(len(found) == 1 for found in ids.values())
    assert ids["one"] != ids["two"]
    assert all(name.startswith("run-run-") for name in ids["one"] | ids["two"])


OWN = """
import json
from pathlib import Path


class Lines:
    def __init__(self, folder, run):
        self.file = (folder / "lines.jsonl").open("w")
        self.say(run=run)

    def say(self, **what):
        print(json.dumps(what), file=self.file, flush=True)

    def log(self, metrics, step):
        self.say(step=step, **metrics)

    def log_completions(self, rows, step):
        self.say(step=step, rows=len(rows))

    def close(self):
        self.say(closed=True)


def start(folder, run):
    return Lines(folder, run)


class Broken(Lines):
    def log(self, metrics, step):
        raise SystemExit(0)

    def close(self):
        raise ValueError("closed badly")


def ends(folder, run):
    raise SystemExit(3)


def lacks(folder, run):
    return object()


NUMBER = 3
"""


def own_tracker(folder: Path, name: str) -> str:
    """The setting that names a tracker of OWN."""
    (folder / "lines.py").write_text(OWN)
    return f"{folder / 'lines.py'}:{name}"


@pytest.mark.parametrize("name", ["start", "Lines"])
def test_a_users_tracker_gets_the_same(tmp_path, name):
    recorder = Recorder(LearnerFolder(tmp_path, 1), [own_tracker(tmp_path, name)], "mine")
    recorder.metrics(1, {"reward": 0.5})
    recorder.completions(1, lambda: [{"step": 1, "prompt": "1+1=", "completion": "2"}])
    recorder.close()
    assert [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == [
        {"run": "mine"},
        {"step": 1, "reward": 0.5},
        {"step": 1, "rows": 1},
        {"closed": True},
    ]


def test_a_tracker_that_fails_later_ends_nothing_and_is_logged_once(tmp_path, capsys):
    recorder = Recorder(
        LearnerFolder(tmp_path, 1), [own_tracker(tmp_path, "Broken"), "tensorboard"], "mine"
    )
    for step in (1, 2):
        recorder.metrics(step, {"reward": 0.5})
    recorder.completions(1, lambda: [{"step": 1, "prompt": "1+1=", "completion": "2"}])
    recorder.close()
    said = capsys.readouterr()
    assert (said.out + said.err).count("lines.py:Broken failed") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "lines.jsonl").read_text().splitlines()[1:] == ['{"step": 1, "rows": 1}']
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("reward")) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ends", "does not start: SystemExit: 3"),
        ("lacks", "expected an object with the methods log, log_completions and close, found object"),
        ("NUMBER", "has no function NUMBER; it has "),
    ],
)
def test_a_tracker_that_fails_at_the_start_is_a_wrong_setting(tmp_path, name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Recorder(LearnerFolder(tmp_path, 1), [own_tracker(tmp_path, name)], "mine")
    assert caught.value.exit_code == 78
    assert f"LEARNER_REPORT_TO={tmp_path}" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [("gone.py:start", "there is no file .*gone.py"), ("nosuchpackage.start", "there is no module")],
)
def test_a_tracker_that_is_not_found_is_a_wrong_setting(tmp_path, asked, words):
    with pytest.raises(ConfigError, match=words):
        Recorder(LearnerFolder(tmp_path, 1), [asked], "mine")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("wandbb", "LEARNER_REPORT_TO: there is no tracker 'wandbb': did you mean wandb"),
        ("lines.py", "LEARNER_REPORT_TO: 'lines.py' names no function"),
    ],
)
def test_a_trackers_wrong_name_is_refused_with_the_settings(asked, words):
    with pytest.raises(ValueError, match=words):
        LearnerSettings(report_to=asked)


def test_a_users_tracker_gets_the_settings_if_it_takes_them(tmp_path, capsys):
    code = OWN + (
        "\nclass Told(Lines):\n    def log_settings(self, settings):\n        self.say(**settings)\n"
        "\nclass Fails(Lines):\n    def log_settings(self, settings):\n        raise ValueError('no')\n"
    )
    (tmp_path / "lines.py").write_text(code)
    Recorder(LearnerFolder(tmp_path, 1), [f"{tmp_path / 'lines.py'}:Told"], "mine", {"seed": 3}).close()
    assert '{"seed": 3}' in (tmp_path / "lines.jsonl").read_text().splitlines()
    Recorder(LearnerFolder(tmp_path, 1), [f"{tmp_path / 'lines.py'}:Fails"], "mine", {"seed": 3}).close()
    said = capsys.readouterr()
    assert "lines.py:Fails failed" in said.out + said.err, "logged, and the run goes on"
