"""The systemd units: verified by systemd, and their exit codes are Penstock's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from penstock.common.errors import FLEET_NEVER_RESTARTED
from tests.platforms.checks import BIN, DEPLOY, program, run

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ROLES = [path for path in UNITS if "queue" not in path.name]


def verify(folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """What systemd finds in the units, with this environment's commands; `changes`: old text to new."""
    for path in UNITS:
        text = path.read_text().replace("/opt/penstock/bin/queue-server", f"{DEPLOY}/queue-server.sh")
        text = text.replace("ExecStart=/opt/penstock/bin", f"ExecStart={BIN}")
        for old, new in changes.items():
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    names = [path.name.replace("@.", "@0.") for path in UNITS]
    return run(program("systemd-analyze"), "verify", "--man=no", *names, folder=folder)


def test_systemd_finds_nothing_in_the_units(tmp_path):
    found = verify(tmp_path)
    assert [line for line in found.stderr.splitlines() if "penstock" in line] == []
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("KillMode=mixed", "KillMode=some", "some"),
        ("Restart=on-failure", "Restart=on-failures", "on-failures"),
        ("TasksMax=512", "TaskMax=512", "TaskMax"),
        (f"ExecStart={BIN}/actor", f"ExecStart={BIN}/actress", "actress"),
        ("RestartPreventExitStatus=65", "RestartPreventExitStatus=650", "650"),
    ],
)
def test_systemd_catches_a_planted_error(tmp_path, old, new, text):
    found = verify(tmp_path, **{old: new})
    assert text in found.stderr


@pytest.mark.parametrize("path", ROLES, ids=lambda path: path.stem)
def test_a_role_is_not_restarted_after_the_exit_codes_that_say_so(path):
    text = path.read_text()
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert set(map(int, codes.split())) == FLEET_NEVER_RESTARTED
    assert "\nRestart=on-failure\n" in text
    assert "\nStartLimitIntervalSec=0\n" in text, "a server that is away uses up no starts"


def test_each_role_has_its_own_users_url_and_only_the_rewarder_is_root():
    assert len(ROLES) == 3
    for path in ROLES:
        role = re.fullmatch(r"penstock-(\w+)@?", path.stem)[1]
        assert f"LoadCredential=url:/etc/penstock/{role}.url\n" in path.read_text()
        assert ("\nUser=penstock\n" in path.read_text()) == (role != "rewarder")
