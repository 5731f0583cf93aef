"""A learner on one host, an actor and a rewarder on another, which share nothing but the queue server.

Each host is a network namespace with an address of its own. In the second one the learner's folder is
hidden behind an empty one, and the processes are another user's where that user can run this Python.
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

import pytest

from penstock.learner.state.versions import KEEP
from tests.e2e.site import ROOT, Site
from tests.helpers import NIGHTLY
from tests.judge import judge

OTHER_USER = 65534
LEARNER, WORKERS = "10.231.0.1", "10.231.0.2"
STEPS = 6


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, cwd="/", check=False).returncode == 0


def other_user() -> list[str]:
    """The beginning of a command as another user; nothing if that one cannot run this Python."""
    user = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    again = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', ''], check=True)"
    return user if succeeds(*user, sys.executable, "-c", again) else []


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
        hide = f'mount -t tmpfs none "{self.hidden}" && exec "$@"'
        inside = ["unshare", "-m", "sh", "-c", hide, "sh", *other_user(), *command]
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
        ip(
            "link",
            "add",
            cards[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            cards[1],
            "netns",
            names[1],
        )
        for name, card, address in zip(names, cards, (LEARNER, WORKERS), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
        yield Hosts(*names, folder, tmp_path)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(folder)


FAKE, REAL = "tests.actors.fake_actor", "penstock.actors"


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
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    site = Site(
        tmp_path, "learner: learner\n",
        LEARNER_MAX_STEPS=str(STEPS), RUN_QUEUE_PASSWORD_FILE=str(password),
    )  # fmt: skip
    if way == "store":  # a folder that both hosts see
        store = hosts.folder / "store"
        site.variables |= {"LEARNER_FILES_ADDRESS": f"file://{store}", "RUN_UMASK": "022"}
        hosts.variables["RUN_ALLOW_FILE_STORE"] = "true"
    if way == "http":
        site.variables["LEARNER_MAX_SHARD_SIZE"] = "30KB"  # each version has several files
    if way == "queue":
        site.variables["LEARNER_DTYPE"] = "bfloat16"  # an Update changes few bits of it
        hosts.variables["ACTOR_WEIGHTS_FROM"] = "queue"
    site.command = ["ip", "netns", "exec", hosts.learner, *site.command]
    site.start("--listen", f"{LEARNER}:6399")
    url = f"redis://:secret@{LEARNER}:6399"
    workers = []
    try:
        site.wait_for(lambda: "on other hosts get the run's files" in str(site.lines), "the learner")
        workers += [hosts.start_worker(url, actor), hosts.start_worker(url, "penstock.rewarders")]
        site.wait_for(lambda: site.steps() >= 2, "two steps")
        site.kill("learner")
        assert site.wait(240) == 0, site.lines[-20:]
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        site.stop()
        for log in hosts.folder.glob("*.log"):
            print(log.name, log.read_text())
    assert judge(site.run_folder)["faults"] == []
    assert site.steps() == STEPS
    cache = hosts.folder / ".cache/penstock/e2e"
    file = "model-00001-of-*.safetensors" if way == "http" else "model.safetensors"
    assert len(list(cache.glob(f"versions/*/{file}"))) >= 2
    assert not list(cache.rglob("*.py"))
    lines = (site.run_folder / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("perf/delta_bytes") for line in lines) is (way == "queue")
    assert any(cache.glob("deltas/*/model.delta")) is (way == "queue")
    if way == "store":
        assert len(list(store.glob("e2e/versions/*/model.safetensors"))) == KEEP
    assert not succeeds(*hosts.second("cat", str(site.run_folder / "metrics.jsonl")))
    assert succeeds(*hosts.second("ls", str(cache)))
