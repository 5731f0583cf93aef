"""The modes of a run's files: RUN_UMASK decides, whatever the umask of the caller and of libraries."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.common.broker.local_server import LocalServer
from penstock.common.config.command import execute_command
from penstock.common.config.role_command import RunCommand
from penstock.common.config.settings import RunSettings
from penstock.common.files.atomic import make_folder, whole_folder, write_whole
from penstock.common.files.lock import hold_lock
from penstock.common.files.modes import umask
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.queues import Queues
from penstock.deploy.__main__ import Penstock
from penstock.learner.report.recorder import Recorder
from penstock.learner.state.incarnations import claim_incarnation, read_nonce
from penstock.learner.state.journal import Journal
from penstock.runs import _opened
from tests.helpers import needs_root

NOBODY = 65534


def modes(folder: Path) -> dict[str, int]:
    """Of the folder and all below it, links aside, by path: the mode."""
    found = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in found}


def wider(folder: Path, mask: int) -> dict[str, str]:
    """Those with a right that the mask takes away."""
    return {name: oct(mode) for name, mode in modes(folder).items() if mode & mask}


@pytest.fixture
def careless() -> Iterator[None]:
    """A caller whose own files are open to all."""
    with umask("000"):
        yield


def write_model(folder: Path) -> None:
    """A model folder, by the library that learner and demo use."""
    save_file({"weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "adapter").mkdir()


def write_run(path: Path, trackers: list[str]) -> None:
    """Files of all kinds that a run has."""
    folder = LearnerFolder(path, 1)
    with hold_lock(folder.learner_lock, "learner"), LocalServer(path):
        read_nonce(folder)
        claim_incarnation(folder)
        Journal(folder).append("header")
        folder.write_folder("weights", folder.version(1, 0), write_model)
        recorder = Recorder(folder, trackers, "run")
        recorder.metrics(1, {"reward": 0.5})
        recorder.completions(1, [{"step": 1, "prompt": "1+1=", "completion": "2"}])
        recorder.results("train", {"reward": 0.5})
        recorder.close()


@pytest.mark.parametrize(("octal", "mask"), [("077", 0o077), ("027", 0o027)])
def test_no_file_of_a_run_is_open_to_others(tmp_path, monkeypatch, careless, octal, mask):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "runs" / "first"
    with umask(octal):
        write_run(run, ["tensorboard", "wandb"])
    assert wider(run, mask) == {}
    names = set(modes(run))
    assert {
        "learner.lock",
        "nonce",
        "metrics.jsonl",
        "claims/000001.json",
        "queue/appendonlydir",
    } <= names
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755  # other runs in it may be shared


def test_what_a_group_shares_it_can_read_all_of_but_the_password(tmp_path, careless):
    with umask("027"):
        write_run(tmp_path / "run", [])
    lacking = {name for name, mode in modes(tmp_path / "run").items() if not mode & 0o040}
    assert {name.partition("/")[0] for name in lacking} == {"queue"}
    assert {"queue", "queue/url", "queue/server.conf", "queue/users.acl"} <= lacking


class Creates(RunCommand):
    """A command that creates a file."""

    def work(self) -> int:
        (self.run.dir / "file").touch()
        return 0


@pytest.mark.parametrize(("given", "mode"), [([], 0o600), (["--run.umask", "027"], 0o640)])
def test_every_command_of_a_run_creates_files_by_run_umask(tmp_path, careless, given, mode):
    assert execute_command(Creates, "creates", ["--run.dir", str(tmp_path), *given]) == 0
    assert modes(tmp_path)["file"] == mode
    (tmp_path / "mine").touch()
    assert modes(tmp_path)["mine"] == 0o666


def test_a_command_restores_the_umask_of_its_caller():
    before = os.umask(0o022)
    try:
        with pytest.raises(ValueError, match="x"), umask("077"):
            raise ValueError("x")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_file_aside_is_never_wider_than_the_file(tmp_path, careless):
    aside = tmp_path / f".url.{os.getpid()}"
    aside.write_text("of a process that was killed")
    write_whole(tmp_path / "url", b"secret", mode=0o600)
    assert modes(tmp_path)["url"] == 0o600
    assert not aside.exists()


def test_a_folder_aside_is_closed_before_it_is_whole(tmp_path, careless):
    with umask("077"), whole_folder(tmp_path / "version") as aside:
        write_model(aside)
        assert wider(aside, 0o077) == {}


@pytest.mark.parametrize("text", ["27", "0o27", "088", "277", "-77", "0770", ""])
def test_a_umask_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="umask"):
        RunSettings(umask=text)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


READ = """
import os, sys
from pathlib import Path
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[3]))
try:
    print(len(Path(sys.argv[1]).read_bytes()))
except PermissionError:
    print("refused")
"""


@needs_root
@pytest.mark.parametrize(
    ("octal", "same_group", "can_read"),
    [("077", True, False), ("027", True, True), ("027", False, False)],
)
def test_another_user_reads_versions_as_run_umask_allows(reachable, octal, same_group, can_read):
    run = RunFolder(reachable / "runs" / "shared")
    with umask(octal):
        make_folder(run.path)
        LearnerFolder(run.path, 1).write_folder("weights", run.version(1, 0), write_model)
    group = os.getegid() if same_group else NOBODY
    path = run.version(1, 0) / "model.safetensors"
    command = [sys.executable, "-c", READ, str(path), str(group), str(NOBODY)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()
    assert (answer != "refused") is can_read


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """The rights of an ordinary user."""
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


@needs_root
def test_a_user_without_the_right_to_a_run_is_told_so(reachable, request, capfd):
    run = RunFolder(reachable / "runs" / "private")
    with umask("077"):
        make_folder(run.path)
    request.getfixturevalue("as_nobody")
    assert execute_command(Penstock, "penstock", ["samples", str(run.path)]) == 78
    flags = ["--run.dir", str(run.path.parent), "--run.name", run.path.name]
    assert execute_command(Queues, "queues", ["status", *flags]) == 78
    for line in capfd.readouterr().err.splitlines():
        assert str(run.path) in line
        assert "this user has no right to it" in line
        assert "RUN_UMASK=027" in line


def test_the_log_of_a_run_from_python_is_as_closed_as_the_run(tmp_path, careless):
    with _opened(tmp_path / "log.txt", "077"):
        pass
    assert modes(tmp_path)["log.txt"] == 0o600
    (tmp_path / "mine").touch()
    assert modes(tmp_path)["mine"] == 0o666
