"""Settings of TRL, verl, ms-swift and prime-rl under our prefix, and misspelt flags and commands."""

from __future__ import annotations

import re

import pytest

from penstock.common.config.command import execute_command
from penstock.common.config.other_names import OTHER_NAMES, same_here
from penstock.common.config.variables import REQUIRED, START_HERE, check_names, field_of, variables
from penstock.common.errors import ConfigError
from penstock.common.queues import Queues
from penstock.deploy.__main__ import Penstock
from penstock.learner.__main__ import Learner

BATCH = "TRL's per_device_train_batch_size is here: LEARNER_GROUPS_PER_STEP x LEARNER_NUM_GENERATIONS"
NAMES = [(system, name) for system, names in OTHER_NAMES.items() for name in names]


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("LEARNER_PER_DEVICE_TRAIN_BATCH_SIZE", f"{BATCH}; memory: LEARNER_MICRO_BATCH_TOKENS"),
        ("ACTOR_VLLM_GPU_MEMORY_UTILIZATION", "is here: ACTOR_GPU_MEMORY_UTILIZATION"),
        ("LEARNER_CLIP_RATIO_HIGH", "verl's clip_ratio_high is here: LEARNER_EPSILON_HIGH"),
        ("LEARNER_OVERLONG_FILTER", "ms-swift's overlong_filter is here: LEARNER_MASK_TRUNCATED_COMPL"),
        ("LEARNER_MAX_ASYNC_LEVEL", "prime-rl's max_async_level is here: LEARNER_MAX_STALENESS"),
        ("RUN_OUTPUT_DIR", "TRL's output_dir is here: RUN_DIR and RUN_NAME"),
        ("LEARNER_MAX_STEP", "did you mean LEARNER_MAX_STEPS?"),
    ],
)
def test_an_unknown_variable_is_answered_with_our_name(variable: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        check_names([variable])
    assert str(found.value).startswith(f"unknown variable {variable}: ")
    assert words in str(found.value)


@pytest.mark.parametrize(("system", "name"), NAMES)
def test_the_table_names_settings_that_exist_and_none_that_is_ours(system: str, name: str) -> None:
    here = OTHER_NAMES[system][name]
    assert name == name.lower().replace("-", "_").replace(".", "_")
    assert f"LEARNER_{name.upper()}" not in variables()
    mentioned = re.findall(r"\b(?:LEARNER|ACTOR|REWARDER|RUN)_[A-Z_0-9]+", here)
    assert set(mentioned) <= set(variables())
    assert mentioned or re.search(
        r"no setting|REDIS_URL|HF_TOKEN|WANDB_PROJECT|torchrun|penstock up", here
    )
    with pytest.raises(ConfigError, match=f"{system}'s {name} is here"):
        check_names([f"LEARNER_{name.upper()}"])


def test_a_name_belongs_to_one_system() -> None:
    assert len({name for _, name in NAMES}) == len(NAMES) > 100
    assert same_here("rollout.n") == "verl's rollout_n is here: LEARNER_NUM_GENERATIONS"
    assert same_here("nothing") == ""


@pytest.mark.parametrize(
    ("kind", "words", "hint"),
    [
        (Learner, "--learner.temprature 1", "--learner.temprature: did you mean --learner.temperature?"),
        (Learner, "--learner.max_steps=1", "did you mean --learner.max-steps?"),
        (Learner, "--max-steps 1", "did you mean --learner.max-steps?"),
        (Learner, "--env-fiel x", "did you mean --env-file?"),
        (Learner, "--learner.per-device-train-batch-size 1", BATCH),
        (Learner, "--clip_ratio_low=0.1", "is here: LEARNER_EPSILON"),
        (Learner, "--dri-run --rwos 3", "did you mean --dry-run? did you mean --rows?"),
        (Penstock, "up --actor 2", "did you mean --actors?"),
        (Penstock, "samples runs/x --worts", "did you mean --worst?"),
        (Penstock, "evaluat", "did you mean evaluate?"),
        (Queues, "statsu", "did you mean status?"),
        (Queues, "status --rediss-url x", "did you mean --redis-url?"),
    ],
)
def test_a_misspelt_flag_or_command_is_answered_with_the_nearest(kind, words, hint, capsys) -> None:
    assert execute_command(kind, "it", words.split()) == 78
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words"), [(Learner, "--qqq"), (Queues, "xyzzy"), (Penstock, "replay runs/x --actors 2")]
)
def test_what_is_like_nothing_gets_no_guess(kind, words, capsys) -> None:
    assert execute_command(kind, "it", words.split()) == 78
    said = capsys.readouterr().err
    assert "did you mean" not in said, "a flag of another command is no answer"
    assert "see `it --help`" in said


def test_the_ten_settings_that_matter_first_begin_the_help_and_the_required_are_marked(capsys) -> None:
    assert len(START_HERE) == 10
    assert set(REQUIRED) <= set(START_HERE)
    assert all(field_of(name).description for name in START_HERE)
    assert execute_command(Learner, "learner", ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines[lines.index("start here:") + 1 :][:10]
    assert [line.split()[0] for line in first] == list(START_HERE)
    assert [line.split()[0] for line in first if "(required)" in line] == list(REQUIRED)
