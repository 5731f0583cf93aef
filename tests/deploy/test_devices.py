"""Which process of `penstock up` gets which GPUs: a table, errors, and what --dry-run prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.common.config import device
from penstock.common.config.command import execute_command
from penstock.common.errors import ConfigError
from penstock.deploy import devices
from penstock.deploy.devices import DevicePlan, Gpus, threads_of_each, variables_of
from penstock.deploy.up import Up

COMMANDS = {"learner": "learner", "actor": "actor", "rewarder": "rewarder"}
OWN = COMMANDS | {"actor": "CUDA_VISIBLE_DEVICES='0,1' actor"}
LAUNCHER = "python -m penstock.learner.torchrun --standalone --nproc-per-node"
EIGHT = tuple("01234567")


def planned(count: int, actors: int = 1, size: int = 1, asked: str = "", **more: object) -> str:
    """The plan of a machine with so many GPUs, as "learner 0-5, actor 6, actor 7"."""
    commands = more.pop("commands", COMMANDS)
    gpus = Gpus(EIGHT[:count], size, **more)  # type: ignore[arg-type]
    plan = DevicePlan(commands, {"actor": actors}, gpus, asked)  # type: ignore[arg-type]
    return " ".join(f"{one.name}:{''.join(one.devices)}" for one in plan.processes)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (planned(0, 2), "learner.1: actor.1: actor.2: rewarder.1:"),
        (planned(0, shared=True), "learner.1: actor.1: rewarder.1:"),
        (planned(1, 2), "learner.1:0 actor.1:0 actor.2:0 rewarder.1:"),
        (planned(4), "learner.1:012 actor.1:3 rewarder.1:"),
        (planned(4, 3), "learner.1:0 actor.1:1 actor.2:2 actor.3:3 rewarder.1:"),
        (planned(4, shared=True), "learner.1:0 actor.1:0 rewarder.1:"),
        (planned(4, 3, idle=True), "learner.1:0 actor.1:0 actor.2:1 actor.3:2 rewarder.1:"),
        (planned(4, 2, size=2, idle=True), "learner.1:0 actor.1:01 actor.2:23 rewarder.1:"),
        (planned(1, 2, idle=True), "learner.1:0 actor.1:0 actor.2:0 rewarder.1:"),
        (planned(0, 2, idle=True), "learner.1: actor.1: actor.2: rewarder.1:"),
        (planned(4, 2, asked="actor=2-3", idle=True), "learner.1:0 actor.1:2 actor.2:3 rewarder.1:"),
        (planned(8), "learner.1:0123456 actor.1:7 rewarder.1:"),
        (planned(8, 2, size=2), "learner.1:0123 actor.1:45 actor.2:67 rewarder.1:"),
        (planned(8, 0), "learner.1:01234567 rewarder.1:"),
        (planned(1, 0, size=2), "learner.1:0 rewarder.1:"),
        (planned(8, asked="learner=0+2-3,actor=6,rewarder=7"), "learner.1:023 actor.1:6 rewarder.1:7"),
        (planned(8, 2, asked="actor=1-4"), "learner.1:0567 actor.1:1 actor.2:2 rewarder.1:"),
        (planned(8, commands={"actor": "actor"}), "actor.1:0"),
        (planned(4, 2, commands=OWN), "learner.1:23 actor.1:01 actor.2:01 rewarder.1:"),
    ],
)  # fmt: skip
def test_each_process_has_its_own_gpus(found: str, expected: str) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("count", "actors", "size", "asked", "error"),
    [
        (4, 4, 1, "", r"found 4 GPUs \(0, 1, 2, 3\), expected at least 5 for 4 actors and the learner"),
        (1, 1, 2, "", "found 1 GPU .* expected at least 2 for an actor"),
        (2, 1, 1, "learner=0-1", "expected at least 1 for 1 actor"),
        (2, 1, 1, "learner=0,actor.1=0", "GPU 0 is given to learner too, expected each once"),
        (
            2,
            1,
            1,
            "lerner=0",
            "expected one of learner, actor, rewarder, learner.1, actor.1, rewarder.1",
        ),
        (2, 1, 1, "actor.2=0", "expected one of learner, actor"),
        (2, 1, 1, "learner", "write --devices learner=0-5"),
        (2, 1, 1, "learner=2", "found no GPU 2, expected of: 0, 1"),
        (4, 1, 1, "learner=2-0", "found no GPU 2-0, expected of: 0, 1, 2, 3"),
        (0, 1, 1, "learner=0", "found no GPU 0, expected of: none"),
        (4, 1, 2, "actor.1=3", "found 1 GPU, expected 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    count: int, actors: int, size: int, asked: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        planned(count, actors, size, asked)


def test_a_flag_is_refused_for_what_the_procfile_or_a_shared_device_decides() -> None:
    with pytest.raises(ConfigError, match="the Procfile's command sets CUDA_VISIBLE_DEVICES too"):
        planned(4, asked="actor.1=3", commands=OWN)
    with pytest.raises(ConfigError, match="GPU 0 is given to actor in the Procfile too"):
        planned(4, asked="learner=0-1", commands=OWN)
    with pytest.raises(ConfigError, match="with LEARNER_SHARE_DEVICE"):
        planned(4, asked="learner=0", shared=True)


def test_torchrun_starts_a_plain_learner_with_several_gpus() -> None:
    many = DevicePlan(COMMANDS, {}, Gpus(EIGHT)).commands["learner"]
    assert many == f"{LAUNCHER} 7"
    assert DevicePlan(COMMANDS, {}, Gpus(EIGHT[:2])).commands["learner"] == "learner"
    mine = COMMANDS | {"learner": "env A=1 learner"}
    assert DevicePlan(mine, {}, Gpus(EIGHT)).commands == mine


def test_a_later_actor_takes_what_is_free_and_keeps_it() -> None:
    plan = DevicePlan(COMMANDS, {}, Gpus(EIGHT[:4]), "learner=0,actor=1-3")
    assert [plan.take("actor.2"), plan.take("actor.3"), plan.take("actor.4")] == [("2",), ("3",), None]
    assert plan.take("rewarder.2") == ()
    assert [plan.take("actor.1"), plan.take("actor.2")] == [("1",), ("2",)]
    assert DevicePlan(COMMANDS, {}, Gpus(("0",))).take("actor.9") == ("0",)
    assert DevicePlan(COMMANDS, {}, Gpus(())).take("actor.9") == ()


def test_a_process_sees_its_devices_alone_also_where_hip_reads_its_own_variable() -> None:
    one = {"CUDA_VISIBLE_DEVICES": "GPU-8f,2"}
    assert variables_of(("GPU-8f", "2"), {}) == one
    amd = {"HIP_VISIBLE_DEVICES": "0,1,2,3"}
    assert variables_of(("GPU-8f", "2"), amd) == one | {"HIP_VISIBLE_DEVICES": "GPU-8f,2"}
    assert variables_of((), amd) == {}


@pytest.mark.parametrize(
    ("listed", "found"), [(None, ("0", "1")), ("5, GPU-8f", ("5", "GPU-8f")), ("", ()), ("-1", ())]
)
def test_the_gpus_are_those_that_the_user_lets_be_seen(
    listed: str | None, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(device, "_FOLDER", tmp_path)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert device.visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == found
    rocr = {"ROCR_VISIBLE_DEVICES": "GPU-8f,5,6"}  # AMD's driver numbers anew what it shows
    assert device.visible_gpus(rocr) == ("0", "1", "2")
    assert device.visible_gpus(rocr | {"HIP_VISIBLE_DEVICES": "1,2"}) == ("1", "2")
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert device.visible_gpus({}) == ()


@pytest.mark.parametrize(
    ("count", "learner", "actors"),
    [
        (1, "0                  all     learner\n", ["0", "0"]),
        (4, f"0,1                all     {LAUNCHER} 2", ["2", "3"]),
        (8, f"0,1,2,3,4,5        all     {LAUNCHER} 6", ["6", "7"]),
    ],
)
def test_a_dry_run_prints_the_plan_and_starts_nothing(
    count: int,
    learner: str,
    actors: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda _: EIGHT[:count])
    monkeypatch.chdir(tmp_path)
    assert execute_command(Up, "penstock up", ["--dry-run", "--actors", "2"]) == 0
    out = capsys.readouterr().out
    assert f"learner.1   {learner}" in out
    assert out.index("threads") == out.splitlines()[1].index("all"), "the heads are over their columns"
    assert [f"actor.{i + 1}     {one} " in out for i, one in enumerate(actors)] == [True, True]
    assert "rewarder.1  all" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "shared", "idle"),
    [("LEARNER_SHARE_DEVICE", True, False), ("LEARNER_EVALUATE_ONLY", False, True)],
)
def test_a_learner_shares_its_device_if_asked_to_or_if_it_trains_nothing(
    variable: str, shared: bool, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda _: EIGHT)
    monkeypatch.setenv(variable, "true")
    assert devices.find_gpus(None, COMMANDS) == Gpus(EIGHT, 1, shared, idle)
    assert devices.find_gpus(None, ["actor"]) == Gpus(EIGHT)


@pytest.mark.parametrize(
    ("cores", "actors", "each"), [(2, 1, 1), (16, 1, 8), (16, 3, 4), (2, 8, 1), (4, 0, 4)]
)
def test_learner_and_actors_share_the_cores_of_a_machine_without_a_gpu(
    cores: int, actors: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    assert threads_of_each({}, 1 + actors, ()) == each
    assert threads_of_each({"OMP_NUM_THREADS": "3"}, actors, ()) == 0
    assert threads_of_each({}, actors, ("0",)) == 0
