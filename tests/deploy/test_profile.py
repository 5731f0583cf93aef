"""`penstock profile` shows where the time of a run's steps went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.common.config.command import load
from penstock.common.errors import ConfigError
from penstock.deploy.profile import Profile


def write(run: Path, *steps: dict[str, object]) -> Path:
    lines = [json.dumps({"step": number, **step}) for number, step in enumerate(steps, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run


def step(wait: float, forward: float, cpu: float = 0.0) -> dict[str, object]:
    return {
        "perf/step_s": 99.0,
        "perf/learner/waiting_for_groups_s": wait,
        "perf/learner/waiting_for_groups_cpu_s": 0.25,
        "perf/learner/running_forward_s": forward,
        "perf/learner/running_forward_cpu_s": cpu,
    }


def test_the_phases_are_shown_per_step_without_the_start(tmp_path: Path, capsys) -> None:
    run = write(tmp_path, step(20.0, 5.0), step(3.0, 1.0, 2.0), step(5.0, 1.0, 4.0))
    assert load(Profile, "profile", [str(run)]).execute() == 0
    assert capsys.readouterr().out.splitlines() == [
        "the learner was               s per step   share  CPU s per step",
        "waiting for groups                 4.000   80.0%           0.250",
        "running forward                    1.000   20.0%           3.000",
        "all                                5.000  100.0%           3.250",
        "Not in the tables: the start and the first step, 25.0 s together.",
    ]


def test_each_role_has_a_table_with_its_subprocesses(tmp_path: Path, capsys) -> None:
    costs = {
        "perf/actor/generating_s": 1.5,
        "perf/actor/generating_cpu_s": 0.5,
        "perf/actor/subprocesses_cpu_s": 0.75,
        "perf/actor/waiting_for_tickets_s": 0.5,
        "perf/rewarder/scoring_s": 0.25,
    }
    run = write(tmp_path, step(3.0, 1.0) | costs)
    assert load(Profile, "profile", [str(run)]).execute() == 0
    assert capsys.readouterr().out.splitlines()[4:] == [
        "the actors together were      s per step   share  CPU s per step",
        "generating                         1.500   75.0%           0.500",
        "waiting for tickets                0.500   25.0%           0.000",
        "subprocesses                       0.000    0.0%           0.750",
        "all                                2.000  100.0%           1.250",
        "the rewarders together were   s per step   share  CPU s per step",
        "scoring                            0.250  100.0%           0.000",
        "all                                0.250  100.0%           0.000",
    ]


def test_one_step_is_shown_as_it_is_and_json_has_the_phases(tmp_path: Path, capsys) -> None:
    run = write(tmp_path, step(3.0, 1.0) | {"perf/learner/odd_s": "no number"})
    assert load(Profile, "profile", ["--json", str(run)]).execute() == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"role": "learner", "phase": "waiting for groups", "seconds": 3.0, "cpu_s": 0.25},
        {"role": "learner", "phase": "running forward", "seconds": 1.0, "cpu_s": 0.0},
    ]


def test_a_run_without_a_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(ConfigError, match=r"has no step with a profile: wait for the first step"):
        load(Profile, "profile", [str(tmp_path)]).execute()
    (tmp_path / "journal").rmdir()
    for run in (tmp_path, write(tmp_path, {"perf/step_s": 1.0})):
        with pytest.raises(ConfigError, match="has no step with a profile"):
            load(Profile, "profile", [str(run)]).execute()
