"""The shell scripts of deploy/: linted, and what Slurm reads of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from penstock.common.errors import FLEET_NEVER_RESTARTED
from penstock.deploy.procfile import read_procfile
from tests.helpers import wait_until
from tests.platforms.checks import DEPLOY, planted, program, run

SLURM = DEPLOY / "slurm"
SCRIPTS = [
    DEPLOY / "queue-server.sh",
    *(SLURM / name for name in ("learner.sbatch", "actors.sbatch", "learner-step.sh")),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script):
    found = run(program("shellcheck"), script)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("script", "old", "new", "rule"),
    [
        (SCRIPTS[0], '"$url_file") || exit', "$url_file) || exit", "SC2086"),
        (SCRIPTS[1], 'touch "$folder/ended"', "touch $folder/ended", "SC2086"),
        (SCRIPTS[1], '-nt "$folder/url" ]; then', '-nt "$folder/url" ]', "SC1072"),
        (SCRIPTS[3], 'srun "$@" &', "srun $@ &", "SC2068"),
        (SCRIPTS[2], "code=0\n", "code = 0\n", "SC2283"),
    ],
)
def test_shellcheck_catches_a_planted_error(tmp_path, script, old, new, rule):
    found = run(program("shellcheck"), planted(script, tmp_path, old, new))
    assert rule in found.stdout
    assert found.returncode == 1


def test_slurm_is_told_to_queue_the_actors_again_and_when_to_signal_them():
    told = re.findall(r"^#SBATCH (--\S+)$", (SLURM / "actors.sbatch").read_text(), re.MULTILINE)
    assert {"--array=0-3", "--requeue", "--signal=TERM@60", "--open-mode=append"} <= set(told)


def test_an_element_is_not_queued_again_after_the_exit_codes_that_say_so():
    (codes,) = re.findall(r"^  ([\d |]+)\) exit", (SLURM / "actors.sbatch").read_text(), re.MULTILINE)
    assert set(map(int, codes.split(" | "))) == FLEET_NEVER_RESTARTED


def test_an_element_is_queued_again_without_the_others_of_its_array(tmp_path):
    """The last element has the job id of the whole array: Slurm would queue all of them again.

    Of the 60 s between the signal and the end the actor has 40, so little is left to wait for the run's.
    """
    ends = 'echo "$@" >> slept; kill -TERM $PPID'  # as Slurm does at the end of the element's time
    commands = {
        "actor": "",
        "srun": "exit 70",
        "sleep": ends,
        "scontrol": 'echo "$@" > called',
        "squeue": "",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "first.slurm").mkdir()
    (tmp_path / "first.slurm/url").touch()
    (ended := tmp_path / "first.slurm/ended").touch()  # by an earlier run; squeue knows no time here
    os.utime(ended, (time.time() - 60,) * 2)
    variables = {
        "RUN_NAME": "first", "RUN_DIR": ".", "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "36", "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3",
    }  # fmt: skip
    subprocess.run(["bash", SLURM / "actors.sbatch"], cwd=tmp_path, env=variables, check=True)
    assert (tmp_path / "called").read_text() == "requeue incomplete 36_3\n"
    slept = sum(map(int, (tmp_path / "slept").read_text().split()))
    assert 40 + slept <= 52


@pytest.mark.parametrize(("hours_ago", "waits"), [(1, True), (3, False)])
@pytest.mark.parametrize("starts", [1, 2])
def test_an_element_ends_with_its_own_run_and_not_with_an_earlier_one(
    tmp_path, hours_ago, waits, starts
):
    """A run ended two hours ago. The time of submission is asked for once: a requeue changes it."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 3600 * hours_ago))
    commands = {
        "actor": "", "sleep": "touch waits",
        "squeue": f"[ -e asked ] && date +%FT%T || echo {at}; touch asked",
        "scontrol": 'echo "$@" > called',
    }  # fmt: skip
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "first.slurm").mkdir()
    (ended := tmp_path / "first.slurm/ended").touch()
    os.utime(ended, (time.time() - 7200,) * 2)
    variables = {
        "RUN_NAME": "first", "RUN_DIR": ".", "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3", "SECONDS": "595",
    }  # fmt: skip
    for start in range(starts):
        variables["SLURM_RESTART_COUNT"] = str(start)
        subprocess.run(["bash", SLURM / "actors.sbatch"], cwd=tmp_path, env=variables, check=True)
    assert (tmp_path / "called").exists() is (tmp_path / "waits").exists() is waits


@pytest.mark.parametrize("began", [True, False])
def test_the_learners_job_begins_a_new_run_once_and_its_files_stay_where_the_actors_look(
    tmp_path, began
):
    """A job that is queued again before a learner claimed the run has begun none."""
    up = f"""
        echo $LEARNER_RESUME >> resumes
        if [ $LEARNER_RESUME = new ]; then mv first first.$(wc -l < resumes); mkdir first; fi
        {"mkdir -p first/claims" if began else ""}
        touch up; until [ -e end ]; do sleep 0.1; done; exit 1
    """
    commands = {
        "penstock": up,
        "scontrol": "echo Restarts=9",
        "scancel": "touch end",
        "hostname": "echo n",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "first/claims").mkdir(parents=True)
    os.utime(tmp_path / "first/claims", (0, 0))
    variables = {
        "RUN_NAME": "first", "RUN_DIR": ".", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": ".",
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "LEARNER_RESUME": "new",
    }  # fmt: skip
    for start in range(2):
        for name in ("up", "end"):
            (tmp_path / name).unlink(missing_ok=True)
        job = subprocess.Popen(
            ["bash", SLURM / "learner.sbatch"], cwd=tmp_path,
            env=variables | {"SLURM_RESTART_COUNT": str(start)},
        )  # fmt: skip
        wait_until((tmp_path / "up").exists, "penstock up")
        assert (tmp_path / "first.slurm/url").exists()
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 1
    assert (tmp_path / "resumes").read_text() == f"new\n{'auto' if began else 'new'}\n"


def test_the_learners_procfile_uses_what_its_script_sets():
    commands = read_procfile(SLURM / "Procfile")
    assert set(commands) == {"learner", "rewarder"}
    script = (SLURM / "learner.sbatch").read_text()
    for name in set(re.findall(r"\$(\w+)", commands["learner"])):
        assert name.startswith("SLURM_") or f"export {name}=" in script, name


@pytest.mark.parametrize(
    ("told", "restarts", "goes_on"), [(True, 1, True), (True, 0, False), (False, 0, False)]
)
def test_the_learners_job_is_queued_again_if_it_is_told_to_stop(tmp_path, told, restarts, goes_on):
    """As under torchrun, whose exit code after SIGTERM is 1. Without a signal 1 is a failure.

    A job that was cancelled is not queued again: Slurm counts no restart. The actors then end too.
    """
    commands = {
        "penstock": "trap 'touch told' TERM; echo $* > up; until [ -e end ]; do sleep 0.1; done; exit 1",
        "scontrol": f'echo "$@" >> called; echo "   Requeue=1 Restarts={restarts} BatchFlag=1"',
        "scancel": 'echo "$@" > signal; touch end',
        "hostname": '[ "$1" ] && echo fd00::7 10.0.0.7 || echo node7',
        "getent": "echo 127.0.1.1 STREAM node7",  # as Debian's /etc/hosts has a machine's own name
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    variables = {"RUN_NAME": "first", "RUN_DIR": ".", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "."}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", SLURM / "learner.sbatch"], cwd=tmp_path, env=variables | path)
    wait_until((tmp_path / "up").exists, "penstock up")
    if told:
        job.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "end").touch()
    assert job.wait(30) == 1
    assert "--listen 10.0.0.7:6379 " in (tmp_path / "up").read_text()
    assert (tmp_path / "called").exists() is told
    if told:
        assert (tmp_path / "called").read_text().startswith("requeue incomplete 7\n")
        assert (tmp_path / "signal").read_text() == "--quiet --signal=TERM 7\n"
    assert not (tmp_path / "told").exists(), "the learner is told by its step alone"
    assert not (tmp_path / "first.slurm/url").exists()
    assert (tmp_path / "first.slurm/ended").exists() is not goes_on


def test_the_learners_step_ends_at_once_when_its_time_is_over(tmp_path):
    """The job's end would come before `penstock up` kills a learner."""
    for name, text in {"srun": "touch runs; sleep 60", "scancel": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    mark, path = tmp_path / "stopping", f"{tmp_path}:{os.environ['PATH']}"
    step = subprocess.Popen(
        ["bash", SLURM / "learner-step.sh"], cwd=tmp_path, start_new_session=True,
        env={"SLURM_JOB_ID": "7", "PENSTOCK_STOPPING": str(mark), "PATH": path},
    )  # fmt: skip
    try:
        wait_until((tmp_path / "runs").exists, "srun")
        mark.touch()
        step.send_signal(signal.SIGTERM)
        assert step.wait(30) == 1
    finally:
        os.killpg(step.pid, signal.SIGKILL)


@pytest.mark.parametrize("stopping", [True, False])
def test_the_learners_step_is_told_by_slurm_and_not_by_its_srun(tmp_path, stopping):
    commands = {
        "srun": "trap 'touch killed' TERM; touch runs; until [ -e end ]; do sleep 0.05; done; exit 3",
        "scancel": 'echo "$@" > signal; touch end',
        "up": f"trap 'touch told' TERM; bash {SLURM}/learner-step.sh a & wait $!; echo $? > code; wait",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    mark = tmp_path / "stopping"
    variables = {"SLURM_JOB_ID": "7", "PENSTOCK_STOPPING": str(mark)}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    up = subprocess.Popen([tmp_path / "up"], cwd=tmp_path, env=variables | path, start_new_session=True)
    try:
        wait_until((tmp_path / "runs").exists, "srun")
        if stopping:
            mark.touch()
            (tmp_path / "end").touch()
            wait_until((tmp_path / "told").exists, "the signal to `penstock up`")
        else:
            (step,) = map(int, run("pgrep", "-P", up.pid).stdout.split())
            os.kill(step, signal.SIGTERM)
            assert up.wait(30) == 0
            assert (tmp_path / "signal").read_text() == "--quiet --signal=TERM 7\n"
            assert (tmp_path / "code").read_text() == "3\n"
            assert not (tmp_path / "told").exists()
        assert not (tmp_path / "killed").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(up.pid, signal.SIGKILL)
        up.wait(30)
