"""The pages hold what they promise: links lead somewhere, the site builds, the commands work."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_settings import get_subcommand

from penstock.actors.__main__ import Actor
from penstock.common.config.command import Command, CommandGroup, load
from penstock.common.errors import ConfigError
from penstock.common.queues import Queues
from penstock.deploy.__main__ import Penstock
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.task import write_task
from penstock.learner.__main__ import Learner
from penstock.rewarders.__main__ import Rewarder
from tests.helpers import nightly, wait_until
from tests.packaging.pages import BESIDE_THE_TEST, DOCS, ROOT, Block, blocks, faults_of, links, pages

EXECUTED = [ROOT / "README.md", DOCS / "tutorial.md"]
COMMANDS: dict[str, type[Command]] = {
    "penstock": Penstock,
    "queues": Queues,
    "learner": Learner,
    "actor": Actor,
    "rewarder": Rewarder,
}
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
OF_THE_SHELL = {"cat", ".", "ls", "tail", "head", "wc", "printf", "python"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    assert faults_of(page, page.read_text()) == []


def test_links_that_lead_nowhere_are_found():
    text = "# A b: `c`\n[1](#a-b-c) [2](#a-b) [3](gone.md) [4](../README.md) ![5](images/gone.png)\n"
    found = [fault.split(": ", 1)[1] for fault in faults_of(DOCS / "index.md", text)]
    assert found == [
        "#a-b: no such heading",
        "gone.md: no such file",
        "../README.md: is not in docs/: write its name as code",
        "images/gone.png: no such file",
    ]


def test_every_page_is_reached_from_the_first_one():
    linked = {target.partition("#")[0] for target in links((DOCS / "index.md").read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*build, "-f", "deploy/mkdocs.yml", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "tutorial.html").is_file()
    fetched = ('src="http', 'rel="stylesheet" href="http', 'rel="preconnect"', "@import url(http")
    for page in tmp_path.glob("*.html"):
        assert not [mark for mark in fetched if mark in page.read_text()], page.name


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_every_command_flag_and_variable_exists(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = 0
    for block in blocks(page):
        for name, text in block.files.items():
            Path(name).write_text(text)
        for words in block.commands:
            checked += is_of_penstock(words, monkeypatch)
    assert checked > 5


def is_of_penstock(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the command is one of Penstock's, whose flags and variables are then checked."""
    assigned = list(itertools.takewhile(_ASSIGNMENT.match, words))
    name, *arguments = words[len(assigned) :]
    if name in OF_THE_SHELL or " ".join([*words, ""]).startswith(BESIDE_THE_TEST):
        return False
    with monkeypatch.context() as variables:
        for word in assigned:
            variables.setenv(*word.split("=", 1))
        command = load(COMMANDS[name], name, arguments)
        if isinstance(command, CommandGroup):
            assert isinstance(get_subcommand(command), Command)
        if file := next(
            (arguments[i + 1] for i, word in enumerate(arguments) if word == "--env-file"), ""
        ):
            for role in (Learner, Actor, Rewarder):
                load(role, role.role, ["--env-file", file])
    return True


def test_a_flag_that_does_not_exist_is_found():
    (words,) = Block("penstock samples runs/mine --wurst\n", beside=False).commands
    with pytest.raises(ConfigError, match="wurst"):
        is_of_penstock(words, pytest.MonkeyPatch())


def test_a_variable_that_does_not_exist_is_found(tmp_path, monkeypatch):
    file = tmp_path / "mine.env"
    file.write_text("LEARNER_MODEL=m\nLEARNER_DATASET=d\nLEARNER_STEPS=3\n")
    with pytest.raises(ConfigError, match="LEARNER_STEPS"):
        is_of_penstock(["penstock", "up", "--env-file", str(file)], monkeypatch)


def test_a_block_is_read_as_a_shell_reads_it():
    text = "cat > a.env <<'END'\nX=1 # a\nEND\npenstock up \\\n    --plain  # runs\ngit pull\n"
    block = Block(text, beside=False)
    assert block.commands == [
        ["cat", ">", "a.env", "<<END"], ["penstock", "up", "--plain"], ["git", "pull"],
    ]  # fmt: skip
    assert block.files == {"a.env": "X=1 # a\n"}
    assert block.to_execute == text.removesuffix("git pull\n")


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder with what a clone has after `make demo`: deploy/, the environment, the demo's files."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    task = write_task(tmp_path / "runs/demo-task-1", seed=1)
    make_base_model(tmp_path / "runs/demo-base-1", task, seed=1, report=print)
    return tmp_path


@nightly
@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_every_block_works_in_the_order_of_the_page(page, clone):
    found = blocks(page)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if not block.beside:
            execute(block, after if after and after.beside else None, clone)


def execute(block: Block, beside: Block | None, folder: Path) -> None:
    """Execute a block in `folder`, with the one of the second terminal once a queue server runs."""
    with (folder / "output.txt").open("w+") as output:
        first = start(block, folder, output)
        try:
            if beside:
                wait_until(
                    lambda: first.poll() is not None or served(folder), "a queue server", timeout_s=300
                )
                second = start(beside, folder, output)
                assert second.wait(timeout=900) == 0, said(output)
            assert first.wait(timeout=900) == 0, said(output)
        finally:
            first.kill()


def start(block: Block, folder: Path, output) -> subprocess.Popen[bytes]:
    """Start a block's commands in a shell that ends at the first error."""
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block.to_execute],
        cwd=folder,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | path,
    )


def served(folder: Path) -> bool:
    """Whether a run has published weights and has not ended."""
    runs = [versions.parent for versions in folder.glob("runs/*/versions") if any(versions.iterdir())]
    return any(not (run / "final").exists() for run in runs)


def said(output) -> str:
    """The end of what the commands printed."""
    output.seek(0)
    return output.read()[-4000:]
