"""Whole runs as compose.yaml and the Slurm scripts start them, with a fake engine. Nightly."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.common.broker.server_binary import find_binary
from tests.e2e.site import FAKE_PROCFILE, ROOT, Site
from tests.helpers import free_port, nightly, wait_until
from tests.judge import judge
from tests.platforms.checks import BIN, DEPLOY
from tests.platforms.test_containers import COMPOSE, services

pytestmark = [pytest.mark.e2e, nightly]
STEPS = 6


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH with the image's commands; `actor` has the fake engine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "valkey-server").symlink_to(find_binary())
    (folder / "queue-server").symlink_to(DEPLOY / "queue-server.sh")
    actor = folder / "actor"
    actor.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -m tests.actors.fake_actor "$@"\n'
    )
    actor.chmod(0o755)
    return folder


class Containers:
    """The services of compose.yaml as processes, whose containers' paths are folders of the test."""

    def __init__(self, folder: Path, commands: Path, found: dict[str, Any]) -> None:
        self.found = found
        self.places = {
            "/queue": folder / "queue",
            "/runs": folder / "runs",
            "/secrets": folder / "secrets",
        }
        self.places |= {
            f"/run/secrets/{role}_url": folder / "secrets" / f"{role}.url"
            for role in ("operator", "learner", "actor", "rewarder")
        }
        self.path = f"{commands}:{BIN}:{os.environ['PATH']}"
        self.log = (folder / "log").open("ab")

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """A service's command with its variables and nothing else of this process's."""
        service = self.found[name]
        variables = {key: self.inside(value) for key, value in service["environment"].items()}
        variables |= {"PATH": self.path, "HOME": str(self.places["/runs"]), "OMP_NUM_THREADS": "1"}
        command = [self.inside(word) for word in service["command"]]
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=self.log, stderr=self.log)

    def inside(self, text: str) -> str:
        """A word, or the place of the test where it is a path in a container."""
        for path, place in sorted(self.places.items(), key=lambda one: -len(one[0])):
            if text == path or text.startswith(f"{path}/"):
                return f"{place}{text.removeprefix(path)}"
        return text


def test_the_commands_of_compose_make_a_whole_run(tmp_path: Path, commands: Path) -> None:
    site = Site(tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS=str(STEPS))
    (tmp_path / "secrets").mkdir(mode=0o700)
    operator = tmp_path / "secrets" / "operator.url"
    operator.write_text(f"redis://:secret@127.0.0.1:{free_port()}/0\n")
    operator.chmod(0o600)
    found = services(COMPOSE, tmp_path, "cpu", "setup")
    for service in found.values():  # as run.env gives them
        del service["environment"]["LEARNER_MODEL"]
        given = {key: value for key, value in site.variables.items() if key != "RUN_DIR"}
        service["environment"] = given | service["environment"] | {"RUN_NAME": "e2e"}
    containers = Containers(tmp_path, commands, found)
    with ExitStack() as stack:
        queue = containers.start("queue")
        stack.callback(queue.wait)
        stack.callback(queue.terminate)
        assert containers.start("acl").wait(120) == 0
        roles = [containers.start(name) for name in ("learner", "actor", "rewarder")]
        for role in roles:
            stack.callback(role.kill)
        assert [role.wait(300) for role in roles] == [0, 0, 0], (tmp_path / "log").read_text()[-3000:]
    assert judge(tmp_path / "runs" / "e2e")["faults"] == []
    assert site.steps() == STEPS


SLURM = """\
ClusterName=penstock
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
AuthInfo=cred_expire=20
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and one node of 16 pretended cores on loopback; `with` starts and ends both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        self.configuration = folder / "slurm.conf"
        ports = {"controller": free_port(), "node": free_port()}
        self.configuration.write_text(
            SLURM.format(folder=folder, user=os.environ.get("USER", "root"), **ports)
        )
        self.daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            path = shutil.which(command[0], path="/usr/sbin:/usr/bin") or command[0]
            words = [path, *command[1:], "-f", str(self.configuration)]
            self.daemons.append(
                subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        wait_until(lambda: "idle" in self("sinfo", "-h", "-o", "%T"), "an idle node")
        return self

    def __exit__(self, *_: object) -> None:
        self("scancel", "--signal=KILL", "--full", "--me")
        wait_until(lambda: not self.jobs(), "the end of all jobs")
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)

    def __call__(self, *command: str, **variables: str) -> str:
        """The output of one of Slurm's commands, also if it fails."""
        environment = os.environ | variables | {"SLURM_CONF": str(self.configuration)}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, str]:
        """The states of the jobs that wait or run, by number; of an array `1_0`, `1_1` and so on."""
        lines = self("squeue", "-h", "-r", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines if "_" in line or line[0].isdigit())


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if not shutil.which("sbatch") or not shutil.which("slurmd", path="/usr/sbin:/usr/bin"):
        pytest.skip("slurm is not installed (Debian's slurm-wlm)")
    with Slurm(tmp_path / "slurm") as slurm:
        yield slurm


def test_a_run_on_slurm_loses_nothing_when_an_element_is_queued_again(
    tmp_path: Path, commands: Path, slurm: Slurm
) -> None:
    site = Site(tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS="80", FAKE_TOKEN_DELAY_S="0.4")
    variables = site.variables | {
        "PATH": f"{commands}:{BIN}:{os.environ['PATH']}",
        "PENSTOCK_HOST": "127.0.0.1",
        "PENSTOCK_PORT": str(free_port()),
        "PENSTOCK_RENDEZVOUS_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }

    def submit(script: str, *flags: str) -> str:
        said = slurm("sbatch", f"--output={tmp_path}/%x-%a.log", *flags, script, **variables)
        assert "Submitted batch job" in said
        return said.split()[-1]

    learner = submit(f"{DEPLOY}/slurm/learner.sbatch")
    array = submit(f"{DEPLOY}/slurm/actors.sbatch")
    short = submit(f"{DEPLOY}/slurm/actors.sbatch", "--array=4", "--time=2")  # SIGTERM after one minute
    try:
        wait_until(lambda: site.steps() >= 3, "three steps", 600)
        assert {slurm.jobs()[f"{array}_{index}"] for index in range(4)} == {"RUNNING"}
        slurm("scancel", "--signal=TERM", f"{array}_3")  # the last one, whose job id is the array's
        wait_until(lambda: slurm.jobs().get(f"{array}_3") == "PENDING", "its actor's end", 120)
        assert {slurm.jobs()[f"{array}_{index}"] for index in range(3)} == {"RUNNING"}
        slurm("scontrol", "requeue", f"{array}_2")
        slurm("scancel", f"{array}_3")
        wait_until(lambda: slurm.jobs().get(f"{array}_2") == "PENDING", "the element in the queue")
        wait_until(lambda: f"{array}_3" not in slurm.jobs(), "the end of the cancelled element")
        wait_until(lambda: slurm.jobs().get(f"{short}_4") == "PENDING", "the end of its time", 300)
        assert site.steps() < 80, "its actor was told to stop during the run"
        slurm("scancel", "--batch", "--signal=TERM", learner)  # as Slurm does before the end of its time
        wait_until(lambda: slurm.jobs().get(learner) == "PENDING", "the learner in the queue", 120)
        newest = max(path.name for path in (site.run_folder / "checkpoints").iterdir())
        assert int(newest.rpartition("-")[2]) == site.steps() < 80, "of the step at which it was told"
        ended = site.run_folder.with_name(f"{site.run_folder.name}.slurm") / "ended"
        wait_until(ended.exists, "the run's end", 1200)
        wait_until(lambda: not slurm.jobs(), "the end of all jobs", 900)
    except AssertionError as error:
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))
        raise AssertionError(f"{error}\n{slurm.jobs()}\n{logs}") from error
    assert judge(site.run_folder)["faults"] == []
    assert site.steps() == 80
