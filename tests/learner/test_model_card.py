"""The card of a checkpoint's model: what was trained and how, and nothing of the user's machine."""

from __future__ import annotations

from huggingface_hub import ModelCard

from penstock.learner.report.model_card import model_card
from tests.learner.builders import make_settings
from tests.learner.trained import make_policy

METRICS = {"reward": 0.75, "rewards/accuracy/mean": 0.5, "rewards/own/mean": 0.25}


def test_a_card_has_the_hubs_metadata_and_the_runs_figures():
    settings = make_settings(
        model="org/base", dataset=["org/data:main@v1#10"], rewards=["accuracy", "/home/me/own.py:own"]
    )
    text = model_card(settings, 7, METRICS)
    data = ModelCard(text).data
    assert (data.base_model, data.datasets) == ("org/base", ["org/data"])
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    for part in ("7 Updates", "| accuracy | 0.5 |", "| own | 0.25 |", "| learning_rate | 1e-06 |"):
        assert part in text
    assert "| torch | " in text
    assert "/home/me" not in text


def test_a_card_names_no_folder_of_the_users_machine(tmp_path):
    (tmp_path / "base").mkdir()
    files = [str(tmp_path / "rows.jsonl"), f"{tmp_path}/parts/*.jsonl#9"]
    text = model_card(make_settings(model=str(tmp_path / "base"), dataset=files), 7, {})
    assert str(tmp_path) not in text
    assert "`rows.jsonl`, `*.jsonl#9`" in text
    assert ModelCard(text).data.base_model is None


def test_a_model_that_was_trained_without_cache_is_exported_with_its_own_setting(model_folder, tmp_path):
    policy = make_policy(model_folder, gradient_checkpointing=True)
    policy.export(tmp_path)
    assert '"use_cache": true' in (tmp_path / "config.json").read_text()
