"""What a start under a used name says: what is reported, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from penstock.common.config.command import build, load
from penstock.common.config.learner_settings import ACCEPTABLE
from penstock.common.config.role_command import LearnerCommand
from penstock.common.config.variables import UP_ENV_FILE, origins_of
from penstock.common.errors import ConfigError, RunTaken
from penstock.common.files.lock import hold_lock
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.wire.messages import Verdict
from penstock.common.wire.reward_spec import RewardSpec
from penstock.deploy.earlier_run import move_away
from penstock.deploy.up import Up
from penstock.learner.report import run_record
from penstock.learner.report.run_record import check_same_run, describe_start, write_start
from penstock.learner.report.small_batches import SmallBatches
from penstock.learner.start import _check_start
from penstock.learner.streams.intake import Arrivals
from tests.learner.builders import make_plan, make_settings


class Home:
    """A run's folder, a model, a data set, and the plan of the next start."""

    def __init__(self, folder: Path):
        self.folder = LearnerFolder(folder / "runs" / "x", 1)
        self.folder.path.mkdir(parents=True)
        self.model, self.data = folder / "model", folder / "sums.jsonl"
        self.model.mkdir()
        (self.model / "model.safetensors").write_bytes(bytes(range(256)) * 100)
        self.data.write_text('{"question": "1+1", "answer": "2"}\n')
        self.changes: dict = {}
        self.rewards = (RewardSpec("accuracy"), RewardSpec("own", source="/own.py", digest="a" * 64))
        self.tokenizer = "t" * 64

    def settings(self):
        found = {"model": str(self.model), "dataset": [str(self.data)]}
        return make_settings(**(found | self.changes))

    def start(self, begun=True):
        """Start the learner; return what it logs."""
        settings = self.settings()
        plan = make_plan(settings)
        contract = replace(plan.contract, rewards=self.rewards, tokenizer_hash=self.tokenizer)
        found = describe_start(settings, replace(plan, model_folder=self.model, contract=contract))
        with structlog.testing.capture_logs() as logs:
            check_same_run(self.folder, found, settings, begun)
        write_start(self.folder, found)
        return [entry["event"] for entry in logs]


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path)
    assert made.start(begun=False) == []
    return made


def test_the_same_run_goes_on_without_a_word(home):
    assert home.start() == []
    record = json.loads(home.folder.record.read_text())
    assert record["settings"]["groups_per_step"] == 2
    assert record["versions"]["torch"]
    assert record["machine"]["threads"] > 0


def test_files_that_only_moved_are_the_same(home, tmp_path):
    home.model = Path(shutil.copytree(home.model, tmp_path / "other"))
    home.data = Path(shutil.copy(home.data, tmp_path / "copy.jsonl"))
    said = home.start()
    assert len(said) == 2, "the settings have other paths"
    assert all("LEARNER_MODEL was" in line or "LEARNER_DATASET was" in line for line in said)


def other_model(home):
    (home.model / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 100)


def other_tokenizer(home):
    home.tokenizer = "u" * 64


def other_rows(home):
    home.data.write_text('{"question": "1+1", "answer": "3"}\n')


def other_count(home):
    home.changes["dataset"] = [f"{home.data}#1"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_model, "model"), (other_tokenizer, "tokenizer"), (other_rows, "dataset"),
        (other_count, "dataset"),
    ],
)  # fmt: skip
def test_another_model_tokenizer_or_data_set_is_refused_unless_accepted(home, change, name):
    change(home)
    before = home.folder.record.read_bytes()
    with pytest.raises(ConfigError, match=rf"another {name} \(.*LEARNER_ACCEPT_CHANGED={name}"):
        home.start()
    assert home.folder.record.read_bytes() == before, "the next start would find nothing changed"
    home.changes["accept_changed"] = [name]
    said = home.start()
    assert f"Another {name} than at the last start, as accepted" in said[-1]
    del home.changes["accept_changed"]
    assert home.start() == [], "it is the run's from now on"


def test_what_is_no_row_of_a_saved_data_set_may_change(home, tmp_path):
    home.data = tmp_path / "saved"
    home.data.mkdir()
    (home.data / "data.arrow").write_bytes(b"rows")
    home.start(begun=False)
    (home.data / "README.md").write_text("new")
    (home.data / "cache-0123.arrow").write_bytes(b"of a map")
    (home.data / ".cache").mkdir()
    (home.data / ".cache" / "x.arrow").write_bytes(b"cached")
    assert home.start() == []
    (home.data / "data.arrow").write_bytes(b"other")
    with pytest.raises(ConfigError, match="another dataset"):
        home.start()


def test_a_large_file_is_known_by_its_size_and_samples(home, monkeypatch):
    monkeypatch.setattr(run_record, "_WHOLE", 1000)
    monkeypatch.setattr(run_record, "_SAMPLE", 100)
    file = home.model / "model.safetensors"
    file.write_bytes(bytes(10_000))
    home.start(begun=False)
    assert home.start() == []
    file.write_bytes(bytes(5_010) + b"x" + bytes(4_989))
    with pytest.raises(ConfigError, match="another model"):
        home.start()
    file.write_bytes(bytes(10_001))
    with pytest.raises(ConfigError, match="another model"):
        home.start()


def test_a_run_without_a_batch_may_start_with_anything(home):
    other_model(home)
    other_rows(home)
    assert home.start(begun=False) == []


def test_changed_settings_and_code_of_rewards_are_reported(home):
    home.changes |= {"learning_rate": 3e-6, "epsilon_high": 0.3}
    home.rewards = (RewardSpec("accuracy"), RewardSpec("own", source="/own.py", digest="b" * 64))
    said = home.start()
    assert "Changed since the last start: LEARNER_LEARNING_RATE was 1e-06 and is 3e-06." in said
    assert "Changed since the last start: LEARNER_EPSILON_HIGH was 0.28 and is 0.3." in said
    assert any("the code or options of own" in line for line in said)
    assert len(said) == 3


def test_another_file_of_a_judge_is_reported(home):
    judge = RewardSpec("judge", kind="judge", options={"model": "a", "prompt": "Is it right?"})
    home.rewards = (judge,)
    home.start()
    assert home.start() == []
    home.rewards = (replace(judge, options=judge.options | {"model": "b"}),)
    assert len(home.start()) == 1


def test_changed_held_out_questions_are_reported_and_moved_ones_are_not(home, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text('{"question": "2+2", "answer": "4"}\n')
    home.changes["eval_dataset"] = [str(held)]
    (said,) = home.start()
    assert "LEARNER_EVAL_DATASET was empty" in said, "there was none before"
    assert home.start() == []
    home.changes["eval_dataset"] = [str(shutil.copy(held, tmp_path / "moved.jsonl"))]
    (said,) = home.start()
    assert "LEARNER_EVAL_DATASET was" in said
    (tmp_path / "moved.jsonl").write_text('{"question": "2+2", "answer": "5"}\n')
    (said,) = home.start()
    assert "the held-out questions of LEARNER_EVAL_DATASET" in said
    assert "before and after cannot be compared" in said
    record = json.loads(home.folder.record.read_text())
    del record["eval_dataset"]
    home.folder.record.write_text(json.dumps(record))
    assert home.start() == [], "an earlier release wrote none"


@pytest.mark.parametrize(
    ("name", "hint"), [("modle", "did you mean model?"), ("data", "did you mean dataset?"),
                       ("rewards", "expected model, tokenizer, dataset")],
)  # fmt: skip
def test_a_name_that_cannot_be_accepted_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError) as found:
        load(LearnerCommand, "learner", ["--learner.accept-changed", f"model,{name}"])
    assert str(found.value).startswith(f"LEARNER_ACCEPT_CHANGED: {name!r} cannot be accepted: {hint}")


def test_what_is_refused_can_be_accepted():
    assert set(run_record.REFUSED) == set(ACCEPTABLE)


def test_a_run_that_has_to_be_there_is_missed_and_a_new_one_does_not_go_on(home):
    home.changes["resume"] = "must"
    assert home.start() == []
    with pytest.raises(ConfigError, match=r"LEARNER_RESUME=must: .* has no run with a step"):
        home.start(begun=False)
    home.changes["resume"] = "new"
    for begun in (False, True):  # or the start after a crash would be refused, and the first one not
        with pytest.raises(ConfigError, match="LEARNER_RESUME=new is for `penstock up`"):
            home.start(begun)


def test_a_damaged_record_is_named_and_a_missing_one_is_no_fault(home):
    for text in ('{"model": 3}', home.folder.record.read_text().replace('"name"', '"nom"')):
        home.folder.record.write_text(text)
        other_model(home)
        with pytest.raises(ConfigError, match=r"run\.json: damaged"):
            home.start()
    home.folder.record.unlink()
    assert home.start() == []


def test_an_evaluation_leaves_a_record_which_no_training_is_compared_with(home):
    home.changes |= {"evaluate_only": True, "eval_dataset": [str(home.data)]}
    plan = replace(make_plan(home.settings()), model_folder=home.model)
    command = SimpleNamespace(learner=home.settings())
    assert _check_start(command, plan, home.folder, None, None) == {}, "that of the training stays"
    home.folder.record.unlink()
    write_start(home.folder, _check_start(command, plan, home.folder, None, None))
    home.changes.clear()
    other_model(home)
    assert home.start() == []


def test_settings_are_written_as_variables(home):
    lines = home.folder.settings.read_text().splitlines()
    assert "LEARNER_GROUPS_PER_STEP=2" in lines
    assert "# LEARNER_SEED=42" in lines
    assert f"LEARNER_DATASET={home.data}" in lines
    for text, mark in (("In ${HOME}.", ""), ("${HOME} is here.", "# set this one yourself: ")):
        home.changes["system_prompt"] = text
        home.start()
        lines = home.folder.settings.read_text().splitlines()
        assert f"{mark}LEARNER_SYSTEM_PROMPT='{text}'" in lines


def test_the_written_settings_say_where_they_come_from(home, monkeypatch, tmp_path):
    shared, own = tmp_path / "up.env", tmp_path / "my.env"
    shared.write_text("LEARNER_SEED=7\nLEARNER_EPSILON=0.3\n")
    for name, value in (("SEED", "7"), ("EPSILON", "0.1"), ("TEMPERATURE", "0.5")):
        monkeypatch.setenv(f"LEARNER_{name}", value)
    monkeypatch.setenv(UP_ENV_FILE, str(shared))
    monkeypatch.setattr(sys, "argv", ["learner", "--learner.temperature=0.7"])
    names = [f"LEARNER_{name}" for name in ("SEED", "EPSILON", "TEMPERATURE", "BETA")]
    found = origins_of(names, own)
    assert dict(zip(names, found.values(), strict=True)) == {
        "LEARNER_SEED": str(shared), "LEARNER_EPSILON": "environment", "LEARNER_TEMPERATURE": "flag",
        "LEARNER_BETA": str(own),
    }  # fmt: skip
    assert origins_of(["LEARNER_BETA"], None) == {"LEARNER_BETA": "flag"}, "--learner '{\"beta\": 1}'"
    start = json.loads(home.folder.record.read_text())
    write_start(home.folder, start, {"LEARNER_DATASET": "a\nflag"})
    lines = home.folder.settings.read_text().splitlines()
    assert f"LEARNER_DATASET={home.data}  # a\\nflag" in lines
    assert build(LearnerCommand, {"env_file": home.folder.settings}).learner.dataset == [str(home.data)]


def test_the_written_settings_are_those_of_the_run_again(home, monkeypatch):
    home.changes |= {
        "dataset_weights": [1.0], "dataset": [str(home.data), f"{home.data}#2"], "temperature": 0.7,
        "system_prompt": "Don't\nuse # or \\n or \"",
        "rewards": ["accuracy", "format"], "generation_kwargs": {"stop": ["a", "b c"]},
        "prompt_template": "none",
    }  # fmt: skip
    home.changes["dataset_weights"] = [1.0, 2.0]
    home.changes["accept_changed"] = ["dataset"]
    home.start()
    for name in [name for name in os.environ if name.startswith("LEARNER_")]:
        monkeypatch.delenv(name)
    again = build(LearnerCommand, {"env_file": home.folder.settings})
    assert again.learner == home.settings().model_copy(update={"accept_changed": []})


def test_an_old_run_is_moved_away_unless_it_is_in_use(tmp_path):
    folder = RunFolder(tmp_path / "x")
    move_away(folder)  # there is none
    for number in (1, 2):
        folder.path.mkdir()
        (folder.path / "nonce").write_text(str(number))
        move_away(folder)
        assert not folder.path.exists()
        assert (tmp_path / f"x.{number}" / "nonce").read_text() == str(number)
    folder.path.mkdir()
    with hold_lock(folder.learner_lock, "learner"), pytest.raises(RunTaken):
        move_away(folder)
    assert folder.path.exists()


def test_what_a_failed_start_left_is_not_moved(tmp_path):
    folder = RunFolder(tmp_path / "x")
    folder.logs.mkdir(parents=True)
    folder.up_lock.touch()
    assert move_away(folder) == folder.path
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    (folder.path / "mine.txt").touch()
    assert move_away(folder) == tmp_path / "x.1"


def test_a_run_is_moved_away_after_the_checks_of_its_server(tmp_path, monkeypatch):
    folder, password = tmp_path / "runs" / "x", tmp_path / "password"
    (folder / "claims").mkdir(parents=True)
    password.write_text("a" * 48)
    password.chmod(0o600)
    variables = {
        "RUN_NAME": "x", "RUN_DIR": str(folder.parent), "LEARNER_RESUME": "new", "REDIS_URL": "",
        "LEARNER_MODEL": "m", "LEARNER_DATASET": "d", "RUN_QUEUE_PASSWORD_FILE": "",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        up = Up(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="RUN_QUEUE_PASSWORD_FILE is not set"):
            up.run()
        monkeypatch.setenv("RUN_QUEUE_PASSWORD_FILE", str(password))
        with pytest.raises(ConfigError, match="--listen: no server can listen"):
            up.run()
    assert [path.name for path in folder.parent.iterdir()] == ["x"]


def test_a_run_of_another_queue_server_is_not_moved(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    variables = {"RUN_NAME": "x", "RUN_DIR": str(folder.parent), "REDIS_URL": "redis://127.0.0.1:1/0"}
    for name, value in (variables | {"LEARNER_RESUME": "new"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"REDIS_URL names another server"):
        Up().run()
    assert folder.is_dir()


def arrivals(filtered, dead=0, stale=0):
    one = Verdict("train:0", "filtered", "no spread", {}, ())
    return Arrivals(filtered=[one] * filtered, dead=dead, stale=stale)


def test_a_small_batch_says_why_and_three_in_a_row_give_advice():
    small = SmallBatches(64)

    def step(trained, *outcomes):
        """Count a step and return what its line says."""
        small.add(trained, arrivals(*outcomes))
        said = small.describe()
        assert small.describe() == said, "to describe counts nothing"
        small.warn()
        return said

    with structlog.testing.capture_logs() as logs:
        assert step(64, 10) == ""
        for _ in range(2):
            said = step(19, 189, 48)
            assert said == ", trained 19 of 64 groups (189 of 256 had no spread, 48 of 256 died)"
        assert step(40, 24) == ", trained 40 of 64 groups (24 of 64 had no spread)"
        assert logs == [], "one was over half"
        for _ in range(4):
            step(19, 189)
        for _ in range(2):
            step(19, 10, 200)
        assert step(64, 10) == ""
    assert [("LEARNER_TEMPERATURE" in one["event"], "queues dead" in one["event"]) for one in logs] == [
        (True, False), (False, True)
    ]  # fmt: skip
