"""The shell scripts of deploy/: linted, and what Slurm reads of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from penstock.common.errors import NEVER_RESTARTED
from penstock.deploy.procfile import read_procfile
from tests.helpers import wait_until
from tests.platforms.checks import DEPLOY, planted, program, run

SLURM = DEPLOY / "slurm"
SCRIPTS = [DEPLOY / "queue-server.sh", SLURM / "learner.sbatch", SLURM / "actors.sbatch"]


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
    assert set(map(int, codes.split(" | "))) == NEVER_RESTARTED


def test_the_learners_procfile_uses_what_its_script_sets():
    commands = read_procfile(SLURM / "Procfile")
    assert set(commands) == {"learner", "rewarder"}
    script = (SLURM / "learner.sbatch").read_text()
    for name in set(re.findall(r"\$(\w+)", commands["learner"])):
        assert name.startswith("SLURM_") or f"export {name}=" in script, name


@pytest.mark.parametrize("told", [True, False])
def test_the_learners_job_is_queued_again_if_it_is_told_to_stop(tmp_path, told):
    """As under torchrun, whose exit code after SIGTERM is 1. Without a signal 1 is a failure."""
    commands = {
        "penstock": "trap 'exit 1' TERM; touch up; while [ ! -e end ]; do sleep 0.05; done; exit 1"
    }
    commands |= {"scontrol": 'echo "$@" > queued', "hostname": "echo here"}
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
    assert (tmp_path / "queued").exists() is told
    assert (tmp_path / "first/slurm/ended").exists() is not told
