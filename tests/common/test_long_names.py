"""Names that are longer than any file's: a message may hold them, and no OSError may leave its check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.common.config.command import execute_command
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, ContractMismatch, DataError, MalformedMessage
from penstock.common.queues import Queues
from penstock.common.wire.contract import check_tokenizer
from penstock.deploy.doctor.inputs import check_inputs
from penstock.deploy.doctor.shape import find_config
from penstock.learner.data.plan import resolve_model
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.learner.data.sources import Source, load_rows, stream_rows
from penstock.rewarders.model_process import load
from tests.rewarders.stand_ins import make_contract, make_model_folder, reward

LONG = "m" * 3000


def test_a_name_that_is_too_long_is_a_folder_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    contract = make_contract(make_model_folder(tmp_path / "model"), {})
    with pytest.raises(ContractMismatch, match="which does not exist on this host"):
        check_tokenizer(replace(contract, model=LONG))
    with pytest.raises(ConfigError, match="there is no folder m"):
        load({"model": LONG})
    with pytest.raises(ConfigError, match="neither a folder here nor a model of the hub"):
        resolve_rewards(LearnerSettings(rewards=[f"model:long={LONG}"]))
    with pytest.raises(ConfigError, match="m"):
        resolve_model(LONG)


@pytest.mark.parametrize("name", [f"{LONG}.jsonl", f"{LONG}*.jsonl", f"{LONG}/{LONG}", LONG])
def test_a_data_set_of_such_a_name_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for read in (load_rows, stream_rows):
        with pytest.raises(DataError, match="m"):
            list(read(Source.parse(name), "train", 0))


def test_the_doctor_finds_that_nothing_of_such_a_name_is_there() -> None:
    settings = LearnerSettings(model=f"./{LONG}", dataset=[f"{LONG}.jsonl"], loss=f"{LONG}.py:own")
    found = [finding.found for finding in check_inputs(settings)]
    assert len(found) == 3
    assert all("cannot be looked at (File name too long)" in one for one in found)
    assert find_config(LONG, "") is None


def test_a_path_with_nul_is_no_contract(tmp_path: Path) -> None:
    contract = make_contract(make_model_folder(tmp_path / "model"), {})
    with pytest.raises(MalformedMessage, match="a path has the letter NUL"):
        replace(contract, model="/models/a\0b")
    with pytest.raises(MalformedMessage, match="a path has the letter NUL"):
        replace(contract, rewards=(replace(reward("accuracy"), source="/a\0b.py"),))


def test_a_folder_of_runs_of_such_a_name_is_named(tmp_path: Path, capfd) -> None:
    flags = ["--run.dir", str(tmp_path / LONG), "--run.name", "a"]
    assert execute_command(Queues, "queues", ["status", *flags]) == 78
    assert "File name too long. Name another path" in capfd.readouterr().err
