from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.common.config import device
from penstock.common.config.command import Command, execute_command, load
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.role_command import (
    ActorCommand,
    LearnerCommand,
    RewarderCommand,
    RoleCommand,
    RunCommand,
)
from penstock.common.config.variables import check_names, environment_of, section_variables, variables
from penstock.common.errors import ConfigError
from penstock.common.wire.contract import Contract
from penstock.common.wire.limits import HIGHEST_REWARD
from penstock.common.wire.messages import Sampling
from penstock.common.wire.reward_spec import RewardSpec
from tests.common.builders import make_ticket

ROLES: dict[str, type[RoleCommand]] = {
    "LEARNER": LearnerCommand,
    "ACTOR": ActorCommand,
    "REWARDER": RewarderCommand,
}


def test_a_variable_sets_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEARNER_MAX_STEPS", "7")
    monkeypatch.setenv("RUN_LEASE_S", "2.5")
    settings = load(LearnerCommand, "learner", [])
    assert (settings.learner.max_steps, settings.run.lease_s) == (7, 2.5)


@pytest.mark.parametrize(("gpu", "dtype", "stage"), [(True, "bfloat16", 1), (False, "float32", 0)])
def test_the_precision_is_that_of_the_device_unless_set(
    gpu: bool, dtype: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: gpu)
    found = load(LearnerCommand, "learner", []).learner
    assert (found.dtype, found.resolved_zero_stage) == (dtype, stage)
    assert environment_of(load(LearnerCommand, "learner", []))["LEARNER_DTYPE"] == dtype
    for wanted in ("float32", "bfloat16"):
        assert load(LearnerCommand, "learner", ["--learner.dtype", wanted]).learner.dtype == wanted
    with pytest.raises(ConfigError, match="LEARNER_DTYPE"):
        load(LearnerCommand, "learner", ["--learner.dtype", "half"])


@pytest.mark.parametrize("missing", ["nothing", "device", "build", "torch", "hidden"])
def test_a_gpu_needs_a_device_that_is_not_hidden_and_a_build_of_torch_for_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    library = "libtorch_cpu.so" if missing == "build" else "libtorch_cuda.so"
    (tmp_path / "lib" / library).touch()
    found = None if missing == "torch" else SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(device, "find_spec", lambda name: found)
    (tmp_path / ("nvidiactl" if missing == "device" else "nvidia3")).touch()
    monkeypatch.setattr(device, "_FOLDER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if missing == "hidden" else "0")
    assert device.has_gpu() == (missing == "nothing")


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.env"
    file.write_text("LEARNER_MAX_STEPS=1\nLEARNER_SEED=1\nLEARNER_BETA1_IS_NOT_READ_HERE=\n")
    with pytest.raises(ConfigError, match="LEARNER_BETA1_IS_NOT_READ_HERE"):
        load(LearnerCommand, "learner", ["--env-file", str(file)])
    file.write_text("LEARNER_MAX_STEPS=1\nLEARNER_SEED=1\nLEARNER_EPSILON=0.1\n")
    monkeypatch.setenv("LEARNER_MAX_STEPS", "2")
    monkeypatch.setenv("LEARNER_SEED", "2")
    found = load(LearnerCommand, "learner", [f"--env-file={file}", "--learner.max-steps", "3"]).learner
    assert (found.max_steps, found.seed, found.epsilon) == (3, 2, 0.1)


def test_a_file_of_variables_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.env").write_bytes("RUN_NAME=café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"--env-file .*my\.env: cannot be read: .*0xe9.*UTF-8 text"):
        load(LearnerCommand, "learner", ["--env-file", str(tmp_path / "my.env")])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("LEARNER_MAX_STEPS 10", "LEARNER_MAX_STEPS ... sets no variable, expected NAME=VALUE"),
        ("REDIS_URL: redis://:hidden@far", "REDIS_URL ... sets no variable, expected NAME=VALUE"),
        ("LEARNER_SEED", "LEARNER_SEED sets no variable, expected NAME=VALUE"),
        ("learner_seed=4", "learner_seed is no setting, expected LEARNER_SEED"),
    ],
)
@pytest.mark.parametrize("before", ["", "\n", "A=1\n  \n\r\n# a\n\n"])
def test_a_line_of_the_file_that_would_have_no_effect_is_refused(
    tmp_path: Path, line: str, words: str, before: str
) -> None:
    file = tmp_path / "my.env"
    file.write_bytes(f"{before}{line}\nB=2\n".encode())
    with pytest.raises(ConfigError) as caught:
        load(LearnerCommand, "learner", ["--env-file", str(file)])
    expected = f"{file}, line {before.count(chr(10)) + 1}: {words}"
    assert str(caught.value) == f"{expected}\nCorrect these lines, or write # before them"


def test_values_of_the_file_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "my.env").write_text("LEARNER_SYSTEM_PROMPT=Pay ${AMOUNT}.\n")
    found = load(LearnerCommand, "learner", ["--env-file", str(tmp_path / "my.env")])
    assert found.learner.system_prompt == "Pay ${AMOUNT}."
    (tmp_path / "my.env").write_text("RUN_DIR=${HOME}/runs\n")
    with pytest.raises(ConfigError, match=r"line 1: RUN_DIR begins with \$\{, which is not replaced"):
        load(LearnerCommand, "learner", ["--env-file", str(tmp_path / "my.env")])


def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEARNER_REWARDS", "accuracy, format")
    monkeypatch.setenv("LEARNER_REWARD_WEIGHTS", "1,0.5")
    found = load(LearnerCommand, "learner", []).learner
    assert (found.rewards, found.reward_weights) == (["accuracy", "format"], [1.0, 0.5])


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.env").write_text(
        "RUN_DIR=~/runs\nLEARNER_DATASET=a.jsonl,~/b.jsonl#5\nLEARNER_MODEL=~/model\n"
        "LEARNER_REWARDS=~/r.py:f,model:g=~/rm,accuracy\nREDIS_URL_FILE=~/url\n"
    )
    (tmp_path / "url").write_text("redis://far")
    (tmp_path / "url").chmod(0o600)
    found = load(LearnerCommand, "learner", ["--env-file", str(tmp_path / "my.env")])
    assert found.run.dir == tmp_path / "runs"
    assert found.learner.dataset == ["a.jsonl", f"{tmp_path}/b.jsonl#5"]
    assert found.learner.model == f"{tmp_path}/model"
    assert found.learner.rewards == [f"{tmp_path}/r.py:f", f"model:g={tmp_path}/rm", "accuracy"]
    assert found.redis_url == "redis://far"


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("LEARNER_MAX_STALENES", "LEARNER_MAX_STALENESS"),
        ("ACTOR_MAX_NUM_SEQ", "ACTOR_MAX_NUM_SEQS"),
        ("RUN_LEASE", "RUN_LEASE_S"),
    ],
)
def test_an_unknown_variable_is_an_error_that_suggests_the_nearest(
    monkeypatch: pytest.MonkeyPatch, wrong: str, nearest: str
) -> None:
    monkeypatch.setenv(wrong, "1")
    with pytest.raises(ConfigError, match=rf"unknown variable {wrong}: did you mean {nearest}\?"):
        load(RunCommand, "queues", [])


def test_all_unknown_variables_are_named_with_their_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUN_DISPLAY_URL", "http://jenkins")
    file = tmp_path / "my.env"
    file.write_text("LEARNER_SEEDS=1\n")
    with pytest.raises(ConfigError) as caught:
        load(LearnerCommand, "learner", ["--env-file", str(file)])
    assert str(caught.value).splitlines() == [
        f"unknown variable LEARNER_SEEDS: did you mean LEARNER_SEED? (in {file}: correct or delete it "
        "there)",
        "unknown variable RUN_DISPLAY_URL: did you mean RUN_DIR? (set in this process: correct it, or "
        "type `unset RUN_DISPLAY_URL`)",
    ]


def test_names_that_kubernetes_injects_pass() -> None:
    check_names(
        dict.fromkeys(
            [
                "LEARNER_PORT",
                "LEARNER_SERVICE_HOST",
                "LEARNER_SERVICE_PORT",
                "LEARNER_SERVICE_PORT_HTTP",
                "ACTOR_PORT_8000_TCP_ADDR",
                "LEARNERS_OF_THE_WORLD",
                "RUN",
            ]
        )
    )


def test_variables_that_kubernetes_injects_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(LearnerCommand, "learner", [])
    monkeypatch.setenv("LEARNER_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("RUN", "1")
    assert load(LearnerCommand, "learner", []) == expected


@pytest.mark.parametrize("prefix", ROLES)
def test_every_variable_is_also_a_flag(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["help", "all"], ["--help"]):
        assert execute_command(ROLES[prefix], prefix.lower(), arguments) == 0
    flags = set(re.findall(r"--[a-z0-9.-]+", capsys.readouterr().out))
    for name in variables():
        section, _, field = name.partition("_")
        if section in (prefix, "RUN"):
            assert f"--{section.lower()}.{field.lower().replace('_', '-')}" in flags
    assert "--redis-url" in flags


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (LearnerCommand, ["--learner.max-steps", "many"], "LEARNER_MAX_STEPS: .*found 'many'"),
        (LearnerCommand, ["--learner.reward-weights", "1,2"], "set 1, one per reward, found 2"),
        (LearnerCommand, ["--learner.reward-weights", "nan"], "LEARNER_REWARD_WEIGHTS.*finite"),
        (LearnerCommand, ["--learner.learning-rate", "inf"], "LEARNER_LEARNING_RATE.*finite"),
        (LearnerCommand, ["--learner.loss-type", "ppo"], "LEARNER_LOSS_TYPE"),
        (RunCommand, ["--run.name", "a b"], "RUN_NAME"),
        (RunCommand, ["--run.name", "a" * 129], "RUN_NAME"),
        (RunCommand, ["--run.nam", "a"], "--help"),
        (RunCommand, ["--env-file"], "--env-file: expected one argument"),
        (RunCommand, ["--env-file", "/nowhere.env"], "--env-file /nowhere.env: no such file or folder"),
    ],
)
def test_a_wrong_setting_is_named(kind: type[Command], arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(kind, "command", arguments)


def test_a_dry_run_prints_the_environment_that_gives_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute_command(LearnerCommand, "learner", ["--learner.max-steps", "9", "--dry-run"]) == 0
    printed = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines() if "=" in line)
    assert printed["LEARNER_MAX_STEPS"] == "9"
    for name, value in printed.items():
        monkeypatch.setenv(name, value)
    again = load(LearnerCommand, "learner", [])
    assert again.learner.max_steps == 9
    assert again.learner == load(LearnerCommand, "learner", ["--learner.max-steps", "9"]).learner


@pytest.mark.parametrize("text", ['{"enable_thinking": false, "n": [1, "a,b"]}', "{}", ""])
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_setting_that_is_a_map_is_json(
    monkeypatch: pytest.MonkeyPatch, text: str, by_flag: bool
) -> None:
    expected = json.loads(text or "{}")
    if not by_flag:
        monkeypatch.setenv("LEARNER_CHAT_TEMPLATE_KWARGS", text)
    arguments = ["--learner.chat-template-kwargs", text] if by_flag else []
    found = load(LearnerCommand, "learner", arguments)
    assert found.learner.chat_template_kwargs == expected
    printed = environment_of(found)["LEARNER_CHAT_TEMPLATE_KWARGS"]
    assert json.loads(printed) == expected


@pytest.mark.parametrize(
    "text", ["yes", "[1]", "1", '{"a": }', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 999]
)
def test_what_is_no_json_map_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LEARNER_CHAT_TEMPLATE_KWARGS", text)
    with pytest.raises(ConfigError, match=r"LEARNER_CHAT_TEMPLATE_KWARGS: .*expected a JSON map"):
        load(LearnerCommand, "learner", [])


def test_a_section_is_the_same_from_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LearnerSettings(
        model="m", dataset=["a.jsonl", "b.jsonl"], generation_kwargs={"stop": ["x, y", "{}"]}
    )
    for name, text in section_variables("LEARNER", made).items():
        monkeypatch.setenv(name, text)
    assert load(LearnerCommand, "learner", []).learner == made


def test_a_mistake_ends_a_role_with_78(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute_command(ActorCommand, "actor", ["--actor.dtype", "int3"]) == 78
    assert "actor: ConfigError: ACTOR_DTYPE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LEARNER_TEMPERATURE", "100.5"),
        ("LEARNER_EVAL_TEMPERATURE", "1000"),
        ("LEARNER_TEMPERATURE", "0.009"),
        ("LEARNER_EVAL_TEMPERATURE", "0.009"),
        ("LEARNER_NUM_GENERATIONS", "65537"),
        ("LEARNER_EVAL_NUM_GENERATIONS", "65537"),
        ("LEARNER_MAX_COMPLETION_LENGTH", str(2**31)),
        ("LEARNER_TOP_K", str(2**31)),
        ("LEARNER_COSINE_MAX_LEN_VALUE_WRONG", "2e9"),
        ("LEARNER_REPETITION_MAX_PENALTY", "-2e9"),
        ("LEARNER_SEED", str(2**63)),
        ("LEARNER_MAX_STEPS", str(10**23)),
        ("LEARNER_REWARD_WEIGHTS", "1e300"),
        ("LEARNER_REWARD_WEIGHTS", "nan"),
        ("LEARNER_REWARDS", f"file.py:{'f' * 201}"),
        ("LEARNER_REWARDS", ",".join(f"file.py:f{number}" for number in range(1025))),
    ],
)
def test_what_no_message_can_carry_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        load(LearnerCommand, "learner", [])


def test_the_largest_values_make_a_ticket_and_a_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TEMPERATURE": "100", "NUM_GENERATIONS": "65536", "MAX_COMPLETION_LENGTH": str(2**31 - 1)}
    values |= {"TOP_K": str(2**31 - 1), "GROUPS_PER_STEP": str(2**31 - 1), "MAX_STALENESS": "100000"}
    for name, value in (values | {"MAX_PROMPT_LENGTH": str(2**31 - 1)}).items():
        monkeypatch.setenv(f"LEARNER_{name}", value)
    found = load(LearnerCommand, "learner", []).learner
    sampling = Sampling(found.temperature, 1.0, found.top_k, 0.0, found.max_completion_length, 0)
    replace(make_ticket(num_generations=found.num_generations), sampling=sampling)
    tokens = found.max_prompt_length + found.max_completion_length
    specs = (RewardSpec("accuracy", HIGHEST_REWARD),)
    Contract("m", "h", "float32", tokens, specs, True, found.groups_per_step, found.credit)
