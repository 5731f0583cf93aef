"""A learner on one host, an actor and a rewarder on another, which share nothing but the queue server.

Each host is a network namespace with an address of its own. In the second one the learner's folder is
hidden behind an empty one, and the processes are another user's.
They know REDIS_URL and RUN_NAME alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from penstock.common.files.atomic import read_json_lines
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.report import right_by_step
from penstock.deploy.demo.task import write_task
from tests.e2e.site import ROOT, Site
from tests.helpers import NIGHTLY
from tests.judge import judge

OTHER_USER = 65534
LEARNER, WORKERS = "10.231.0.1", "10.231.0.2"
STEPS, LIMIT_S = 6, 1500

SEED, LESSONS, GAIN = 5, 40, 0.12
"""Of the demo's task: Updates, and the least rise of its held-out accuracy, three standard errors."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, cwd="/", check=False).returncode == 0


def opening(hidden: Path) -> str:
    """Shell commands that hide a folder, and let other users run this Python with these sources.

    A folder that is closed to them, such as /root, is opened in this mount namespace alone.
    """
    ours = [Path(one).resolve() for one in (sys.base_prefix, sys.prefix, ROOT)]
    closed = {one for path in ours for one in (path, *path.parents) if not one.stat().st_mode & 0o001}
    commands = [f"mount -t tmpfs -o mode=755 none '{hidden}'", f"mkdir '{hidden}/open'"]
    for one in sorted(closed):
        commands.append(f"mount -t overlay -o 'lowerdir={hidden}/open:{one}' none '{one}'")
    return " && ".join([*commands, 'exec "$@"'])


def can_make_hosts() -> bool:
    """Whether this user may make namespaces."""
    name = f"penstock-probe-{os.getpid()}"
    commands = (["ip", "netns", "add", name], ["ip", "netns", "del", name], ["unshare", "-m", "true"])
    found = os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "setpriv")))
    return bool(found) and all(succeeds(*command) for command in commands)


@dataclass
class Hosts:
    """Two network namespaces, the folder of the second one's user, and the folder hidden from it."""

    learner: str
    workers: str
    folder: Path
    hidden: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Of the second host, beside the queue server's address."""

    def second(self, *command: str) -> list[str]:
        """A command as a process of the second host."""
        user = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
        inside = ["unshare", "-m", "sh", "-c", opening(self.hidden), "sh", *user, *command]
        return ["ip", "netns", "exec", self.workers, *inside]

    def start_worker(self, url: str, *command: str) -> subprocess.Popen[str]:
        """Start a role on the second host, with nothing but the run's name and the server's URL."""
        variables = {
            "PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(ROOT),
            "REDIS_URL": url, "RUN_NAME": "e2e", "OMP_NUM_THREADS": "1", **self.variables,
        }  # fmt: skip
        log = (self.folder / f"{command[-1]}.log").open("w")
        return subprocess.Popen(
            self.second(sys.executable, "-m", *command),
            cwd=self.folder, env=variables, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if not can_make_hosts():
        pytest.skip("this user cannot make namespaces")
    names = [f"penstock-{side}-{os.getpid()}" for side in "ab"]
    folder = Path(tempfile.mkdtemp(prefix="penstock-other-host-"))
    os.chown(folder, OTHER_USER, OTHER_USER)
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        cards = [f"ps{side}{os.getpid()}" for side in "ab"]
        ends = [(card, "netns", name) for card, name in zip(cards, names, strict=True)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, card, address in zip(names, cards, (LEARNER, WORKERS), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
        yield Hosts(*names, folder, tmp_path)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(folder)


FAKE, REAL = "tests.actors.fake_actor", "penstock.actors"


def train_apart(site: Site, hosts: Hosts, actor: str, *arguments: str) -> Path:
    """Run a learner on the first host, killed once, and workers on the other; return their cache."""
    (password := site.folder / "password").write_text("secret\n")
    password.chmod(0o600)
    site.variables["RUN_QUEUE_PASSWORD_FILE"] = str(password)
    site.command = ["ip", "netns", "exec", hosts.learner, *site.command]
    site.start("--listen", f"{LEARNER}:6399", *arguments)
    url = f"redis://:secret@{LEARNER}:6399"
    workers = []
    try:
        site.wait_for(lambda: "on other hosts get the run's files" in str(site.lines), "the learner")
        workers += [hosts.start_worker(url, actor), hosts.start_worker(url, "penstock.rewarders")]
        site.wait_for(lambda: site.steps() >= 2, "two steps")
        assert {psutil.Process(worker.pid).uids().real for worker in workers} == {OTHER_USER}
        site.kill("learner")
        assert site.wait(LIMIT_S) == 0, site.lines[-20:]
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        site.stop()
        for log in hosts.folder.glob("*.log"):
            print(log.name, log.read_text())
    assert judge(site.run_folder)["faults"] == []
    cache = hosts.folder / ".cache/penstock/e2e"
    assert not list(cache.rglob("*.py"))
    assert not succeeds(*hosts.second("cat", str(site.run_folder / "metrics.jsonl")))
    assert succeeds(*hosts.second("ls", str(cache)))
    return cache


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("actor", "way"),
    [
        *((FAKE, way) for way in ("http", "store", "queue")),
        *((REAL, way) for way in ("http", "queue") if NIGHTLY),
    ],
)
def test_roles_join_and_train_with_the_queue_servers_address_alone(
    hosts: Hosts, tmp_path: Path, actor: str, way: str
) -> None:
    site = Site(tmp_path, "learner: learner\n", LEARNER_MAX_STEPS=str(STEPS))
    if way == "store":  # a folder that both hosts see
        store = hosts.folder / "store"
        site.variables |= {"LEARNER_FILES_ADDRESS": f"file://{store}", "RUN_UMASK": "022"}
        hosts.variables["RUN_ALLOW_FILE_STORE"] = "true"
    if way == "http":
        site.variables["LEARNER_MAX_SHARD_SIZE"] = "30KB"  # each version has several files
    if way == "queue":
        site.variables["LEARNER_DTYPE"] = "bfloat16"  # an Update changes few bits of it
        hosts.variables["ACTOR_WEIGHTS_FROM"] = "queue"
    cache = train_apart(site, hosts, actor)
    assert site.steps() == STEPS
    file = "model-00001-of-*.safetensors" if way == "http" else "model.safetensors"
    assert len(list(cache.glob(f"versions/*/{file}"))) >= 2
    lines = (site.run_folder / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("perf/delta_bytes") for line in lines) is (way == "queue")
    assert any(cache.glob("deltas/*/model.delta")) is (way == "queue")
    if way == "store":
        assert len(list(store.glob("e2e/versions/*/model.safetensors"))) > STEPS  # all are young


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.skipif(not NIGHTLY, reason="the demo takes minutes: NIGHTLY=1")
def test_the_demos_task_is_learned_with_answers_from_another_host(hosts: Hosts, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", SEED)
    make_base_model(tmp_path / "base", task, SEED, print)
    site = Site(tmp_path, "learner: learner\n")
    site.variables = {
        "RUN_NAME": "e2e", "RUN_DIR": str(tmp_path / "runs"), "LEARNER_MODEL": str(tmp_path / "base"),
        "LEARNER_DATASET": str(task.train), "LEARNER_EVAL_DATASET": str(task.heldout),
        "LEARNER_SEED": str(SEED), "LEARNER_MAX_STEPS": str(LESSONS),
    }  # fmt: skip
    train_apart(site, hosts, REAL, "--env-file", str(ROOT / "deploy/recipes/demo.env"))
    solved = right_by_step(read_json_lines(site.run_folder / "evaluations.jsonl"))
    before, after = fmean(solved[0]), fmean(solved[LESSONS])
    assert after - before > GAIN, (before, after)
