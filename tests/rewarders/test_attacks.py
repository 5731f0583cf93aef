"""What docs/security.md says of attacks by a reward, cell by cell.

Three processes of different rights each make all the attacks that the page calls stopped, on one pool.
The page's other cells are not tested: an attack that may succeed would end this test's own processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import NIGHTLY
from tests.rewarders import attacks, rights
from tests.rewarders.attack_column import ATTACKS
from tests.rewarders.rights import COLUMNS

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
CELLS = {
    row: dict(zip(COLUMNS, map(str.strip, cells.split("|")), strict=True))
    for row, cells in re.findall(r"^\| ([^|]+?) \| ([^|]+\|[^|]+\|[^|]+?) \|$", PAGE, re.MULTILINE)
    if row in ATTACKS
}
RUN = "tests.rewarders.attack_column"
LIMIT_S = 300
LOGGED = 4 << 20
"""The most bytes that a rewarder may log of 50 attacks, of which one alone writes 30 MB."""
HONEST = """
import numpy
from beside_an_honest_reward import ONE

def honest(completions):
    return numpy.array([len(text) * ONE for text in completions])
"""
HOSTILE_IMPORT = """
import json
import hostile

with open({target!r}) as file:
    hostile.{function}(["a", "bcd"], [json.load(file)])
honest = hostile.honest
"""
HOSTILE_THREAD = """
import threading, time
from hostile import *

threading.Thread(target=time.sleep, args=[3600], daemon=True).start()
"""


def stopped(column: str) -> list[str]:
    """The attacks that the page calls stopped in a column."""
    return [ATTACKS[row] for row, cells in CELLS.items() if cells[column].startswith("stopped")]


def mode_of(column: str) -> int:
    """The mode of the folders with Python, Penstock and rewards: in root's columns for root alone."""
    return 0o755 if column == "ordinary user" else 0o700


def user_of(number: int) -> str:
    """A user for the processes of root's rewards: not that of the tests that run beside these."""
    known = {user.pw_name for user in pwd.getpwall()}
    return next(name for name in (("games", "news")[number], "nobody") if name in known)


class Site:
    """The folder of a column: rewards, and what the attacks look for."""

    def __init__(self, top: Path, column: str, python: Path) -> None:
        self.folder = top / column.replace(" ", "-").replace("'", "")
        self.folder.mkdir()
        self.column = column
        self.owner = rights.ORDINARY if column == "ordinary user" else 0
        self.python = python
        honest = self.folder / "own" / "honest.py"
        honest.parent.mkdir(mode=mode_of(column))
        honest.write_text(HONEST)
        self._write_attacks(honest.parent)
        (honest.parent / "beside_an_honest_reward.py").write_text("ONE = 1.0")
        number = COLUMNS.index(column)
        half, secret = os.urandom(8).hex(), os.urandom(8).hex()
        self.secret = half + secret
        user = user_of(number) if mode_of(column) == 0o700 else ""
        self.target = {
            "folder": str(self.folder),
            "drop": str(self._make("drop", 0o777)),
            "private": str(self._make("private", 0o700)),
            "url": str(self._write("run/queue/url", 0o600)),
            "token": str(self._write("private/token", 0o644)),
            "socket": str(self.folder / "private" / "queue.sock"),
            "trap": str(self._make("trap", 0o777) / "sprung"),
            "suid": str(self._suid()),
            "honest": str(honest),
            "hostile": str(honest.with_name("hostile.py")),
            "every": 1 if number == 0 or NIGHTLY else 7,
            "mark": f"evil{number}-{os.getpid() % 10**6}",
            "key": int.from_bytes(os.urandom(3)) + 1,
            "user": user,
            "half": half,
            "length": len(self.secret),
            "digest": hashlib.sha256(self.secret.encode()).hexdigest(),
        }
        (self.folder / "target.json").write_text(json.dumps(self.target))

    def _write_attacks(self, folder: Path) -> None:
        """Write attacks.py as hostile.py, and the files that attack on import or start a thread."""
        shutil.copy(attacks.__file__, folder / "hostile.py")
        target = str(self.folder / "drop" / "target.json")
        for kind, _, function in (name.rpartition(":") for name in ATTACKS.values()):
            if kind:
                text = HOSTILE_IMPORT if kind == "import" else HOSTILE_THREAD
                text = text.format(target=target, function=function)
                (folder / f"{kind}_{function}.py").write_text(text)

    def _make(self, name: str, mode: int) -> Path:
        path = self.folder / name
        path.mkdir(parents=True)
        path.chmod(mode)
        self._give(path)
        return path

    def _write(self, name: str, mode: int) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a secret")
        path.chmod(mode)
        self._give(path)
        return path

    def _suid(self) -> Path:
        path = Path(shutil.copy(shutil.which("id") or "id", self.folder / "suid-id"))
        path.chmod(0o4755)
        return path

    def _give(self, path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, self.owner, self.owner)

    def clean(self) -> None:
        """Remove what the attacks may have left outside of the folder."""
        for path in Path("/dev/shm").glob(f"{self.target['mark']}*"):
            path.unlink()
        key = str(self.target["key"])
        remove = ["ipcrm", "-M", key, "-S", key, "-Q", key]
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)

    def start(self) -> subprocess.Popen[str]:
        """Start the column's attacks."""
        with open(self.folder / "errors", "w") as errors:
            return rights.start(
                self.column,
                [str(self.python), "-m", RUN, str(self.folder), *stopped(self.column)],
                env=rights.environment(self.python, WANDB_API_KEY=self.secret),
                cwd=self.folder, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def result(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait for the column's end and return the faults of each attack."""
        family = [psutil.Process(process.pid)]
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            family += family[0].children(recursive=True)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
        errors = (self.folder / "errors").read_text(errors="replace")
        assert process.returncode == 0, f"{output[-3000:]}\n{errors[-6000:]}"
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found | {"log": errors, "output": output}


@pytest.fixture(scope="module")
def columns() -> Iterator[dict[str, dict[str, Any]]]:
    """Make all attacks; by column and attack, the faults. The columns run side by side."""
    top = Path(tempfile.mkdtemp(prefix="penstock-attacks-"))
    top.chmod(0o755)
    sites: list[Site] = []
    try:
        pythons: dict[int, Path] = {}
        for column in COLUMNS:
            if not rights.why_not(column):
                mode = mode_of(column)
                if mode not in pythons:
                    pythons[mode] = rights.install(top / f"install-{mode:o}", mode)
                sites.append(Site(top, column, pythons[mode]))
        processes = [site.start() for site in sites]
        yield {site.column: site.result(process) for site, process in zip(sites, processes, strict=True)}
    finally:
        for site in sites:
            site.clean()
        shutil.rmtree(top, ignore_errors=True)


def column_of(columns: dict[str, dict[str, Any]], column: str) -> dict[str, Any]:
    """A column's result; skips where this machine cannot start the column."""
    if reason := rights.why_not(column):
        pytest.skip(reason)
    return columns[column]


def test_the_page_has_a_row_for_each_attack() -> None:
    assert list(CELLS) == list(ATTACKS)
    assert all(cell for cells in CELLS.values() for cell in cells.values())


@pytest.mark.parametrize("column", COLUMNS)
def test_rewards_work_from_a_folder_that_only_the_rewarder_may_need_to_read(columns, column) -> None:
    """For root the interpreter, the clone, the reward and a module beside it lie in a folder of 0700."""
    assert column_of(columns, column)["before"] == []


@pytest.mark.parametrize(
    ("column", "attack"), [(column, attack) for column in COLUMNS for attack in stopped(column)]
)
def test_a_stopped_attack_changes_nothing(columns, column, attack) -> None:
    assert column_of(columns, column)[attack] == []


@pytest.mark.parametrize("column", COLUMNS)
def test_nothing_is_left_when_the_rewarder_ends(columns, column) -> None:
    assert column_of(columns, column)["after"] == []


@pytest.mark.parametrize("column", COLUMNS)
def test_the_rewarders_log_is_bounded_and_holds_no_escape(columns, column) -> None:
    log = column_of(columns, column)["log"]
    assert len(log) < LOGGED
    assert "\x1b[2J" not in log
    assert "\nTraceback" not in log
