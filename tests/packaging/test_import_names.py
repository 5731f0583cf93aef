"""Penstock owns one import name: folders named like its parts break nothing, wherever they are."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.site import ROOT, Site
from tests.helpers import NIGHTLY, is_dead, wait_until
from tests.traps import NAMES, trap_folders

SCRIPTS = ("learner", "actor", "rewarder", "queues", "penstock")
FAKES = ("__init__.py", "fake_engine.py", "actors/__init__.py", "actors/fake_actor.py")
PROCFILE = "learner: learner\nactor: python -m actor_with_child\nrewarder: rewarder\n"
ACTOR_WITH_CHILD = """
import os, runpy, subprocess
from pathlib import Path
from tests.fake_engine import FakeEngine

start = FakeEngine.from_environment

def start_with_child(slots):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(os.environ["CHILDREN"], str(child.pid)).touch()
    return start(slots)

FakeEngine.from_environment = staticmethod(start_with_child)
runpy.run_module("tests.actors.fake_actor", run_name="__main__")
"""
GUARDED = """
import os, signal, subprocess
from penstock.common.guard import guard_children
guard_children()
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Installation:
    """An environment with Penstock: its programs, and where Penstock's code must come from."""

    programs: Path
    code: Path

    def check(self) -> None:
        """The code is the expected one, and it is the only name that the environment adds."""
        names = ", ".join(NAMES)
        assert self.run("python", "-c", "import penstock; print(penstock.__file__)") == str(
            self.code / "penstock" / "__init__.py"
        )
        found = (
            f"from importlib.util import find_spec; print([find_spec(n) for n in '{names}'.split(', ')])"
        )
        assert self.run("python", "-c", found) == str([None] * len(NAMES))

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        """The program's output; `cwd` among the variables is the working directory."""
        answer = subprocess.run(
            [self.programs / program, *arguments],
            cwd=variables.pop("cwd", "/"), env=without_paths() | variables,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout.strip()


def without_paths() -> dict[str, str]:
    """The environment without PYTHONPATH."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def packages() -> list[str]:
    """The folders in which this interpreter finds installed packages."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def build_wheel(folder: Path) -> Path:
    """Build Penstock's wheel from a copy of the checkout, which stays as it is."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("penstock", *NAMES):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    newest = int(importlib.metadata.version("setuptools").partition(".")[0]) >= 77
    pip(["wheel", "--no-deps", *["--no-build-isolation"] * newest, "-w", str(folder), str(source)])
    (wheel,) = folder.glob("penstock-*.whl")
    return wheel


def pip(arguments: list[str]) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True, text=True, timeout=300, check=False, env=without_paths(),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr


# All other tests run in the editable installation.


@pytest.fixture(scope="module", params=["wheel", *["editable"] * NIGHTLY])
def installation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """This environment, or a fresh one with the wheel, which sees the dependencies of this one."""
    if request.param == "editable":
        return Installation(Path(sys.executable).parent, ROOT)
    assert not [path for path in packages() if Path(path, "penstock").exists()]
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    # Before the dependencies are visible: pip would see this environment's Penstock among them.
    pip(["--python", str(programs / "python"), "install", "--no-deps", "--no-index",
         str(build_wheel(folder))])  # fmt: skip
    (own,) = folder.glob("venv/lib/python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(packages()))
    return Installation(programs, own)


@pytest.mark.e2e
def test_an_installation_adds_one_name(installation: Installation) -> None:
    installation.check()


@pytest.mark.e2e
def test_every_console_script_runs_among_the_traps(installation: Installation, tmp_path: Path) -> None:
    here, path = trap_folders(tmp_path / "here"), trap_folders(tmp_path / "path")
    places = {"cwd": str(here), "PYTHONPATH": str(path)}
    for script in SCRIPTS:
        assert "usage" in installation.run(script, "--help", **places).lower(), script
        assert installation.run(script, "--version", **places).startswith("penstock "), script


@pytest.mark.e2e
def test_a_run_and_a_kill_among_the_traps(installation: Installation, tmp_path: Path) -> None:
    """Traps in the working directory, on PYTHONPATH, and beside a reward that has its own common/."""
    fakes, children = tmp_path / "fakes", tmp_path / "children"
    children.mkdir()
    for name in FAKES:
        (fakes / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, fakes / "tests" / name)
    (fakes / "actor_with_child.py").write_text(ACTOR_WITH_CHILD)
    rewards = trap_folders(tmp_path / "rewards", *[name for name in NAMES if name != "common"])
    (rewards / "common").mkdir()
    (rewards / "common" / "__init__.py").touch()
    (rewards / "common" / "helper.py").write_text("VALUE = 0.25")
    (rewards / "own.py").write_text(
        "from common import helper\ndef own(completions): return [helper.VALUE for _ in completions]"
    )
    here, path = trap_folders(tmp_path / "here"), trap_folders(tmp_path / "path")
    site = Site(
        here, PROCFILE, LEARNER_MAX_STEPS="3", LEARNER_EVAL_DATASET="", FAKE_TOKEN_DELAY_S="0.3",
        LEARNER_REWARDS=f"{rewards / 'own.py'}:own", CHILDREN=str(children),
        PYTHONPATH=os.pathsep.join([str(path), str(fakes)]),
    )  # fmt: skip
    site.command, site.cwd = [str(installation.programs / "penstock")], here
    with site.start():
        site.wait_for(lambda: site.steps() >= 1, "the first step", 240)
        (child,) = (int(path.name) for path in children.iterdir())
        assert not is_dead(child)
        site.kill("actor.1")
        wait_until(lambda: is_dead(child), "the guard to kill the actor's child", 20)
        assert site.wait(240) == 0, "\n".join(site.lines[-40:])
    assert site.steps() == 3
    assert '"rewards/own/mean": 0.25' in (site.run_folder / "metrics.jsonl").read_text()
    assert "a trap was imported" not in "\n".join(site.lines)


def test_the_guard_works_beside_a_folder_named_penstock(tmp_path: Path) -> None:
    trap_folders(tmp_path, "penstock", *NAMES)
    (tmp_path / "psutil.py").write_text("raise ImportError('a trap was imported: psutil')")
    (tmp_path / "guarded.py").write_text(GUARDED)
    answer = subprocess.run(
        [sys.executable, "-P", "guarded.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert answer.stderr == ""
    wait_until(lambda: is_dead(int(answer.stdout)), "the guard to kill the child", 20)
