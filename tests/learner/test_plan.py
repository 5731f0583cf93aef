"""What is refused before anything is started, and what tickets ask for."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx

from penstock.common.errors import ConfigError, DataError, ServerUnavailable
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Sampling, Version
from penstock.learner.data.plan import make_plan, resolve_model
from penstock.learner.data.preview import preview
from penstock.learner.data.reward_specs import resolve_reward_model
from penstock.learner.data.sources import Source, load_rows
from tests.e2e.site import make_model, write_questions
from tests.learner.builders import make_plan as plan_without_files
from tests.learner.builders import make_settings


@pytest.mark.parametrize(
    "plan", [make_plan, lambda settings: list(preview(settings, 0, lambda _: None))]
)
@pytest.mark.parametrize("narrowed", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}])
def test_a_narrowed_sampler_is_refused_with_the_reason_and_two_ways_out(narrowed, plan):
    ((name, value),) = narrowed.items()
    with pytest.raises(ConfigError, match=f"LEARNER_{name.upper()}={value}: .* is biased") as caught:
        plan(make_settings(**narrowed))
    assert "Sample from the full distribution" in str(caught.value)
    assert "LEARNER_ACCEPT_SAMPLING_BIAS=true" in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8, "accept_sampling_bias": True}])
def test_the_full_distribution_and_an_accepted_bias_pass(settings):
    with pytest.raises(
        ConfigError, match="LEARNER_MODEL is not set"
    ):  # the next thing that is looked at
        make_plan(make_settings(**settings))


def test_tickets_ask_for_what_the_settings_say():
    asked = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    settings = make_settings(**asked, max_completion_length=17, num_generations=6, seed=3)
    one, again, other, reseeded = (
        plan_without_files(made).source.train(TicketId(name), Version(1, 0))
        for made, name in (
            (settings, "train:0"),
            (settings, "train:0"),
            (settings, "train:1"),
            (settings.model_copy(update={"seed": 4}), "train:0"),
        )
    )
    assert one.num_generations == 6
    assert one.sampling == Sampling(**asked, max_tokens=17, seed=one.sampling.seed)
    assert one.sampling.seed == again.sampling.seed
    assert len({one.sampling.seed, other.sampling.seed, reseeded.sampling.seed}) == 3


def test_a_value_that_looks_copied_from_trl_is_logged(capsys):
    with pytest.raises(ConfigError, match="LEARNER_MODEL is not set"):
        make_plan(make_settings(loss_type="cispo"))
    assert "TRL's epsilon_high is the bound itself" in capsys.readouterr().out


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_contract_says_how_rewards_are_summed(tmp_path, aggregation):
    settings = make_settings(
        model=str(make_model(tmp_path / "model")),
        dataset=[str(write_questions(tmp_path / "questions.jsonl", 5))],
        max_prompt_length=16,
        multi_objective_aggregation=aggregation,
    )
    assert make_plan(settings).contract.multi_objective_aggregation == aggregation


def test_a_reward_can_have_the_columns_that_all_data_sets_have(tmp_path):
    (tmp_path / "own.py").write_text("def own(completions, level):\n    return [1.0]\n")
    first = write_questions(tmp_path / "first.jsonl", 120)
    first.write_text(first.read_text().replace("}", ', "level": 1}'))
    second = write_questions(tmp_path / "second.jsonl", 5)
    settings = make_settings(
        model=str(make_model(tmp_path / "model")),
        dataset=[str(first), str(second)],
        dataset_shuffle=False,
        max_prompt_length=16,
        rewards=[f"{tmp_path / 'own.py'}:own"],
    )
    (reward,) = make_plan(settings).contract.rewards
    assert reward.options["columns"] == ["answer", "prompt", "question", "solution"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_that_lacks_a_file_is_refused(tmp_path, missing):
    model = make_model(tmp_path / "model")
    (model / missing).unlink()
    questions = str(write_questions(tmp_path / "questions.jsonl", 5))
    settings = make_settings(model=str(model), dataset=[questions], max_prompt_length=16)
    name = missing.replace("model", "*")
    with pytest.raises(ConfigError, match=f"model: no {re.escape(name)} is there; expected .*complete"):
        make_plan(settings)


@pytest.mark.parametrize("is_cast", [True, False])
def test_the_contract_says_how_logits_are_computed(tmp_path, is_cast):
    settings = make_settings(
        model=str(make_model(tmp_path / "model")),
        dataset=[str(write_questions(tmp_path / "questions.jsonl", 5))],
        max_prompt_length=16,
        cast_lm_head_to_fp32=is_cast,
    )
    assert make_plan(settings).contract.cast_lm_head_to_fp32 is is_cast


def hub_error(status: int) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("of the hub", response=response)


@pytest.mark.parametrize(
    ("cause", "local", "raised"),
    [
        (hub_error(429), False, ServerUnavailable),
        (hub_error(503), False, ServerUnavailable),
        (hub_error(404), False, ConfigError),
        (hub_error(503), True, ServerUnavailable),
        (hub_error(403), True, ConfigError),
        (TimeoutError("no route"), True, ServerUnavailable),
        (httpx.ReadError("reset in the middle of a file"), False, ServerUnavailable),
        (ConnectionError("of hf_xet, likewise"), False, ServerUnavailable),
        (OfflineModeIsEnabled("HF_HUB_OFFLINE"), True, ConfigError),
        (None, True, ConfigError),
    ],
)
def test_a_hub_that_is_away_is_no_fault_of_the_settings(monkeypatch, cause, local, raised):
    """After ConfigError a learner is not started again. `local`: nothing is there beside, either."""

    def download(*_, **__):
        if local:
            raise LocalEntryNotFoundError("not in the cache") from cause
        raise cause

    for name in ("huggingface_hub.snapshot_download", "huggingface_hub.model_info"):
        monkeypatch.setattr(name, download)
    monkeypatch.setattr("datasets.load_dataset", download)
    with pytest.raises(raised, match="LEARNER_MODEL=org/model: "):
        resolve_model("org/model")
    with pytest.raises(raised, match="model:helpful=org/model: "):
        resolve_reward_model("helpful", "org/model", 1.0)
    with pytest.raises(DataError if raised is ConfigError else raised, match="org/data"):
        load_rows(Source("org/data"), "train", 0)


def test_a_revision_is_of_a_hub_id_alone(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is a folder here, which has no revisions"):
        resolve_model(str(tmp_path), revision="main")
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/model", revision="v2") == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/model", "v2")
    resolve_model("org/model")
    assert asked["revision"] is None


def test_a_name_like_a_folders_is_no_hub_id_while_the_hub_is_away(tmp_path, monkeypatch):
    """A restart would not help; a folder that is called as the organisation is does not matter else."""

    def download(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base-1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"runs/base1: no such .*did you mean runs/base-1\?"):
        resolve_model("runs/base1")
    with pytest.raises(ConfigError, match="link: a link to gone, which is not there"):
        resolve_model("link")
    with pytest.raises(ServerUnavailable):
        resolve_model("org/base-1")
