"""What a replay refuses before it touches anything."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from penstock.common.errors import ConfigError
from penstock.learner.replay import _difference, replay
from penstock.learner.resume import settings_of


def test_a_folder_without_a_journal_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}: no journal of a run"):
        replay(tmp_path, tmp_path / "out", {})


def test_a_replay_into_the_runs_own_folder_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "claims").mkdir()
    with pytest.raises(ConfigError, match="a run's own files would be overwritten"):
        replay(tmp_path, tmp_path / "x" / "..", {})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="no journal of a run"):
        replay(tmp_path / "typo", tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == []


def test_another_runs_folder_is_not_written_to(tmp_path):
    (tmp_path / "other" / "journal").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a run's own files would be overwritten"):
        replay(tmp_path, tmp_path / "other", {})


def test_models_of_other_shapes_are_not_compared(tmp_path):
    for name, size in (("one", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.zeros(size)}, tmp_path / name / "model.safetensors")
    with pytest.raises(ConfigError, match="hold different tensors"):
        _difference(tmp_path / "one", tmp_path / "other")


def test_a_setting_in_a_journal_that_is_wrong_is_named():
    with pytest.raises(ConfigError, match=r"LEARNER_BETA: .*found '-1'"):
        settings_of({"beta": 0.1}, {"beta": "-1"})
