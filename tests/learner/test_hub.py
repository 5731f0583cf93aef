"""Models go to a hub in the background; what fails there is logged and ends no training."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError
from pydantic import ValidationError

from penstock.common.errors import ConfigError
from penstock.learner.report import hub as module
from penstock.learner.report.hub import Hub, make_hub
from tests.learner.builders import make_settings

ASKED = {"push_to_hub": True, "hub_model_id": "me/model", "hub_private_repo": True}


def refusal(status: int) -> HfHubHTTPError:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.test"))
    return HfHubHTTPError("refused, said the hub to hf_secret", response=response)


class FakeApi:
    """The three calls of HfApi; `fails` names what each call raises."""

    def __init__(self, **fails: Exception):
        self.fails, self.calls, self.uploads = fails, [], []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _call(self, name: str, *said: object) -> None:
        self.calls.append((name, *said))
        if name in self.fails:
            raise self.fails[name]

    def whoami(self):
        self._call("whoami")

    def create_repo(self, repo_id, *, private, exist_ok):
        self._call("create_repo", repo_id, private, exist_ok)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        assert self.goes_on.wait(60)
        files = {path.name: path.read_text() for path in folder_path.iterdir()}
        self._call("upload_folder", repo_id, commit_message)
        self.uploads.append(files)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture(autouse=True)
def logged(monkeypatch):
    """The log lines, as (level, text, fields)."""
    lines: list[tuple] = []
    levels = {
        level: lambda text, level=level, **fields: lines.append((level, text, fields))
        for level in ("info", "warning", "error")
    }
    monkeypatch.setattr(module, "log", SimpleNamespace(**levels))
    return lines


def make(tmp_path, api, **changes) -> Hub:
    return Hub(make_settings(**(ASKED | changes)), tmp_path / "uploads", api)


def test_the_token_is_checked_first_then_each_save_is_uploaded(tmp_path, model):
    api = FakeApi()
    hub = make(tmp_path, api)
    assert api.calls == [("whoami",), ("create_repo", "me/model", True, True)]
    hub.saved(model, 50, last=False)
    hub.finish()
    assert api.calls[-1] == ("upload_folder", "me/model", "Model of step 50")
    assert api.uploads == [{"model.safetensors": "weights"}]
    assert not list((tmp_path / "uploads").iterdir())


def test_a_refused_token_ends_the_learner_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match="refuses HF_TOKEN") as error:
        make(tmp_path, FakeApi(whoami=refusal(401)))
    assert "hf_secret" not in str(error.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="needs HF_TOKEN"):
        make_hub(make_settings(**ASKED), tmp_path)
    assert make_hub(make_settings(), tmp_path) is None


@pytest.mark.parametrize("error", [refusal(503), ConnectionError("no network")])
def test_a_hub_that_is_away_at_the_start_is_logged(tmp_path, error, logged):
    make(tmp_path, FakeApi(whoami=error))
    assert [level for level, _, _ in logged] == ["warning"]


def test_a_failed_upload_is_logged_and_the_next_save_is_uploaded(tmp_path, model, logged, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    api = FakeApi(upload_folder=refusal(403))
    hub = make(tmp_path, api)
    hub.saved(model, 1, last=False)
    hub.finish()
    assert "hf_secret" not in str(logged)
    assert ("error", "The model of step 1 was not uploaded; the next is.") in [x[:2] for x in logged]
    api.fails.clear()
    hub.saved(model, 2, last=True)
    hub.finish()
    assert len(api.uploads) == 1


def test_with_strategy_end_only_the_last_is_uploaded(tmp_path, model):
    api = FakeApi()
    hub = make(tmp_path, api, hub_strategy="end")
    hub.saved(model, 1, last=False)
    hub.saved(model, 2, last=True)
    hub.finish()
    assert [call for call in api.calls if call[0] == "upload_folder"] == [
        ("upload_folder", "me/model", "Model of step 2")
    ]


def test_a_running_upload_delays_no_save_and_is_given_up_at_its_deadline(tmp_path, model, logged):
    api = FakeApi()
    api.goes_on.clear()
    hub = make(tmp_path, api, hub_timeout_s=0.01)
    hub.saved(model, 1, last=False)
    hub.saved(model, 2, last=False)
    hub.finish()
    texts = [text for _, text, _ in logged]
    assert any(text.startswith("The model of step 2 is not uploaded") for text in texts)
    assert texts[-1].startswith("The upload to the hub took too long")
    api.goes_on.set()


@pytest.mark.parametrize("wrong", [{"push_to_hub": True}, {"hub_model_id": "me/model"}])
def test_a_push_and_its_repository_belong_together(wrong):
    with pytest.raises(ValidationError, match="LEARNER_HUB_MODEL_ID"):
        make_settings(**wrong)


def test_a_whole_run_uploads_its_last_model_with_its_card(run, monkeypatch, logged):
    api = FakeApi()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(module, "HfApi", lambda token: api)
    run.start(steps=2, save_steps=1, hub_strategy="end", **ASKED)
    (files,) = api.uploads
    assert files["model.safetensors"] == "weights"
    assert "in 2 Updates" in files["README.md"]
    assert "hf_secret" not in files["README.md"]
    assert ("info", "The model of step 2 was uploaded to me/model.") in [x[:2] for x in logged]
