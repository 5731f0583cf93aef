"""Help screens fit the terminal, and every console script has the same flags and exit codes."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from penstock.actors.__main__ import Actor
from penstock.common.config import help as help_module
from penstock.common.config.command import Command, CommandGroup, execute_command
from penstock.common.config.role_command import RoleCommand
from penstock.common.queues import Queues
from penstock.deploy.__main__ import Penstock
from penstock.learner.__main__ import Learner
from penstock.rewarders.__main__ import Rewarder

ROOT = Path(__file__).parents[2]
SCRIPTS: dict[str, type[Command]] = {
    "learner": Learner,
    "actor": Actor,
    "rewarder": Rewarder,
    "queues": Queues,
    "penstock": Penstock,
}
ROLES: dict[str, type[RoleCommand]] = {"learner": Learner, "actor": Actor, "rewarder": Rewarder}
COLUMNS, LINES = 100, 45
SCREENS = [
    (name, arguments)
    for name, kind in SCRIPTS.items()
    for arguments in [["--help"]]
    + [
        [field.replace("_", "-"), "--help"]
        for field in (kind.model_fields if issubclass(kind, CommandGroup) else ())
    ]
]


def printed(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> list[str]:
    assert execute_command(SCRIPTS[name], name, arguments) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    assert execute_command(SCRIPTS[name], name, arguments) == 78
    return capsys.readouterr().err


def test_every_console_script_is_tested_here() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == SCRIPTS.keys()
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(("name", "arguments"), SCREENS, ids=str)
def test_a_help_screen_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], name: str, arguments: list[str]
) -> None:
    lines = printed(capsys, name, *arguments)
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) <= LINES
    assert lines[0].startswith("usage: ")


@pytest.mark.parametrize(
    ("name", "section"), [(name, section) for name, kind in ROLES.items() for section in kind.sections()]
)
def test_a_section_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], name: str, section: str
) -> None:
    lines = printed(capsys, name, "help", section)
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) <= LINES
    prefix, kind = ROLES[name].sections()[section]
    flags = re.findall(r"^  (--[a-z0-9.-]+)", "\n".join(lines), flags=re.MULTILINE)
    assert flags == [f"--{prefix}.{field.replace('_', '-')}" for field in kind.model_fields]
    assert any(line.startswith(f"  {section} ") for line in printed(capsys, name, "--help"))
    assert set(lines) <= set(printed(capsys, name, "help", "all"))


def test_help_without_a_section_is_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "learner", "help") == printed(capsys, "learner", "--help")


def test_help_is_printed_though_a_variable_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEARNER_MAX_STEPS", "many")
    assert printed(capsys, "learner", "help", "training")
    assert "LEARNER_MAX_STEPS" in refused(capsys, "learner", "--dry-run")


def test_an_unknown_section_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "learner", "help", "dat")
    assert "help dat: no such section; expected one of run, training, data, sampling" in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_version_is_that_of_the_installed_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(help_module, "version", lambda package: f"{package}-1.2.3")
    assert printed(capsys, name, "--version") == ["penstock penstock-1.2.3"]

    def not_installed(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(help_module, "version", not_installed)
    assert printed(capsys, name, "--version") == ["penstock unknown"]


@pytest.mark.parametrize("name", ["queues", "penstock"])
def test_a_group_without_a_command_prints_its_help(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert printed(capsys, name) == printed(capsys, name, "--help")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("learner", ["--learner.max-step", "3"], "unrecognized arguments: --learner.max-step"),
        ("learner", ["train"], "unexpected argument: train"),
        ("learner", ["help", "data", "loss"], "unexpected argument: help data loss"),
        ("learner", ["--learner.max-steps", "-1"], "LEARNER_MAX_STEPS: Input should be greater"),
        ("actor", ["--actor.dtype", "int3"], "ACTOR_DTYPE: Input should be"),
        ("rewarder", ["--rewarder.workers", "0"], "REWARDER_WORKERS: Input should be"),
        ("queues", ["status", "--run.name", "a b"], "RUN_NAME: "),
        ("queues", ["status", "--yes"], "unrecognized arguments: --yes"),
        ("queues", ["nothing"], "invalid choice: 'nothing'"),
        ("penstock", ["nothing"], "invalid choice: 'nothing'"),
        ("penstock", ["up", "--actors", "-1"], "--actors: Input should be greater"),
        ("penstock", ["up", "--actors", "many"], "--actors: Input should be a valid integer"),
        ("penstock", ["demo", "--seed", "-1"], "--seed: Input should be greater"),
        ("penstock", ["evaluate", "--temperature", "hot"], "--temperature: Input should be"),
        ("penstock", ["samples"], "the following arguments are required: RUN"),
        (
            "penstock",
            ["samples", "runs/x", "--best", "--worst"],
            "--best and --worst exclude each other",
        ),
        ("penstock", ["samples", "runs/x", "--compare", "1"], "--compare: List should have at least 2"),
        ("penstock", ["replay", "runs/x", "EPSILON=1"], "EPSILON=1: expected LEARNER_NAME=VALUE"),
        (
            "penstock",
            ["replay", "runs/x", "LEARNER_BETA=1", "LEARNER_SEED=3", "LEARNER_BETA=2"],
            "LEARNER_BETA is given twice, '1' and '2': leave one out",
        ),
    ],
)
def test_a_mistake_in_a_command_line_ends_with_78_and_is_named(
    capsys: pytest.CaptureFixture[str], name: str, arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, name, *arguments)
