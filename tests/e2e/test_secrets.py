"""Marked secrets occur in no file but their own, and in no log, process list, journal, error or report.

The run under `penstock up` loses its server once. NIGHTLY=1 also kills the learner, and starts the run's
processes by exec as users do, for the sake of the process list.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import psutil
import pytest
from pyarrow import parquet

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import LearnerCommand, RewarderCommand
from penstock.common.queues import Queues
from penstock.deploy.__main__ import Penstock
from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE, Site
from tests.helpers import NIGHTLY, free_port
from tests.judge import read_records

pytestmark = pytest.mark.e2e

REWARD = """
import hashlib, os

def judged(completions):
    if "WANDB_API_KEY" in os.environ or "REDIS_URL" in os.environ:
        raise RuntimeError("a secret that is none of a reward's business")
    key = os.environ["JUDGE_API_KEY"]
    return [float(hashlib.sha256(key.encode()).hexdigest() == DIGEST) for _ in completions]
"""


@dataclass
class Watched:
    """A run that has ended, its secrets by name, and what was seen of it."""

    site: Site
    marks: dict[str, str]
    command_lines: set[str] = field(default_factory=set)
    said: dict[str, str] = field(default_factory=dict)


def watch_processes(seen: set[str], ended: threading.Event) -> None:
    """Collect the command lines of all processes until the run has ended."""
    while not ended.wait(0.2):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                seen.add(" ".join(process.cmdline()))


def say(
    capfd: pytest.CaptureFixture[str], kind: type, *arguments: str, codes: Iterable[int] = (69, 78)
) -> str:
    """What a command prints, errors included, which ends with one of the exit `codes`."""
    code = execute_command(kind, "command", arguments)
    said = "".join(capfd.readouterr())
    assert said
    assert code in codes, said
    return said


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("secrets")
    marks = {name: f"mark{name}{secrets.token_hex(8)}" for name in ("tcp", "wandb", "judge")}
    password_file = folder / "password"
    password_file.touch(0o600)
    password_file.write_text(marks["tcp"])
    digest = hashlib.sha256(marks["judge"].encode()).hexdigest()
    (folder / "own.py").write_text(REWARD.replace("DIGEST", repr(digest)))
    kind = Site if NIGHTLY else ForkedSite
    site = kind(
        folder, FAKE_PROCFILE, LEARNER_MAX_STEPS="3", LEARNER_EVAL_DATASET="", FAKE_TOKEN_DELAY_S="0.01",
        LEARNER_REWARDS=f"{folder}/own.py:judged", REWARDER_ENVIRONMENT="JUDGE_API_KEY",
        LEARNER_REPORT_TO="wandb", WANDB_MODE="offline", WANDB_SILENT="true",
        WANDB_API_KEY=marks["wandb"], JUDGE_API_KEY=marks["judge"],
        RUN_QUEUE_PASSWORD_FILE=str(password_file),
    )  # fmt: skip
    found = Watched(site, marks)
    ended = threading.Event()
    watcher = threading.Thread(target=watch_processes, args=(found.command_lines, ended))
    watcher.start()
    site.start("--listen", f"127.0.0.1:{free_port()}")
    try:
        for step, victim in [(1, "queue.1"), *([(2, "learner.1")] if NIGHTLY else [])]:
            site.wait_for(lambda step=step: site.steps() >= step, f"step {step}")
            marks["socket"] = password_of(site.run_folder)
            site.kill(victim)
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    finally:
        site.stop()
        ended.set()
        watcher.join()
    return found


def password_of(run_folder: Path) -> str:
    """The password that `penstock up` has chosen for its server."""
    url = (run_folder / "queue" / "url").read_text()
    (password,) = re.findall(r"://[^:/]*:([^@]+)@", url)
    return unquote(password)


def test_no_file_but_its_own_holds_a_secret(run: Watched) -> None:
    own = {run.site.folder / "password", run.site.run_folder / "queue" / "url"}
    files = [path for path in run.site.folder.rglob("*") if path.is_file() and path not in own]
    assert any(path.suffix == ".wandb" for path in files)
    assert any(path.suffix == ".aof" for path in files)
    for path in files:
        data = path.read_bytes()
        assert [name for name, mark in run.marks.items() if mark.encode() in data] == [], path


def test_what_is_stored_in_compressed_form_holds_no_secret(run: Watched) -> None:
    tables = list((run.site.run_folder / "completions").iterdir())
    assert tables
    texts = [str(parquet.read_table(path).to_pylist()) for path in tables]
    assert all("judged" in text for text in texts)
    records = read_records(run.site.run_folder)
    assert records
    texts.append(repr(records))
    for text in texts:
        assert [name for name, mark in run.marks.items() if mark in text] == []


def test_no_line_of_the_run_and_no_process_list_holds_a_secret(run: Watched) -> None:
    said = "\n".join(run.site.lines)
    assert "Killed by SIGKILL" in said
    lines = "\n".join(run.command_lines)
    assert "server.conf" in lines
    for mark in run.marks.values():
        assert mark not in said
        assert mark not in lines


@pytest.mark.parametrize(
    ("kind", "arguments", "codes"),
    [
        (LearnerCommand, ("--dry-run",), (0, 0, 0)),
        (RewarderCommand, ("--dry-run",), (0, 0, 0)),
        (Queues, ("status", "--json"), (69, 69, 69)),
        (Queues, ("audit",), (0, 0, 0)),
        (Queues, ("dead",), (0, 0, 0)),
        (Queues, ("discard",), (78, 69, 69)),
        (Penstock, ("samples", "runs/e2e"), (0, 0, 78)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else " ".join(map(str, value)),
)
def test_no_report_and_no_error_after_the_run_holds_a_secret(
    run: Watched, kind: type, arguments: tuple[str, ...], codes: tuple[int, ...], monkeypatch, capfd
) -> None:
    for name, value in run.site.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RUN_CONNECT_TIMEOUT_S", "0.1")
    monkeypatch.chdir(run.site.folder)
    said = say(capfd, kind, *arguments, codes=codes[:1])
    url = f"redis://:{run.marks['tcp']}@127.0.0.1:1/0"
    monkeypatch.setenv("REDIS_URL", url)
    said += say(capfd, kind, *arguments, codes=codes[1:2])
    monkeypatch.delenv("REDIS_URL")
    said += say(capfd, kind, *arguments, "--redis-url", url, codes=codes[2:])
    assert [name for name, mark in run.marks.items() if mark in said] == []


MARK = "s3cr3t-m4rk"
WRONG_URLS = [
    f"{MARK}@127.0.0.1:6379",
    f":{MARK}@127.0.0.1:6379/0",
    f"user:{MARK}@127.0.0.1",
    f"http://:{MARK}@127.0.0.1:6379",
    f"redis:/:{MARK}@127.0.0.1:6379",
    f"redis://:{MARK}@127.0.0.1:6379/zero",
    f"redis://:{MARK}@127.0.0.1:6379/{MARK}",
    f"redis://:{MARK}@127.0.0.1:port/0",
    f"redis://:{MARK}@127.0.0.1:99999/0",
    f"redis://:{MARK}@[::1/0",
    f"redis://:{MARK}@[{MARK}]:1/0",
    f"redis://:{MARK}@/0",
    f"redis://:{MARK}:{MARK}@127.0.0.1:1",
    f"redis://:{MARK}@{MARK}@127.0.0.1:1",
    f"redis://:{MARK}/x@127.0.0.1:1/0",
    f"redis://:{MARK}?x@127.0.0.1:1/0",
    f"redis://:{MARK}#x@127.0.0.1:1/0",
    f"redis://:{MARK}%zz@127.0.0.1:1/0",
    f"redis://:{MARK} @127.0.0.1:1/0",
    f"redis://127.0.0.1:1/0?password={MARK}",
    f"redis://127.0.0.1:1/0?foo={MARK}",
    f"redis://127.0.0.1:1/0?{MARK}=1",
    f"redis://127.0.0.1:1/0#{MARK}",
    f"redis://:{MARK}@127.0.0.1:1/0?protocol=9",
    f"redis://:{MARK}@127.0.0.1:1/0?db={MARK}",
    f"redis://:{MARK}@127.0.0.1:1/0",
    f"unix://:{MARK}@/nowhere/queue.sock",
    f"unix://:{MARK}@/nowhere/{'x' * 200}",
    f"unix://{MARK}@",
    f"redis://{quote(MARK, safe='')}:{MARK}@127.0.0.1:1",
    f"redis://\u00e9{MARK}:{MARK}@127.0.0.1:1",
    f"redis://:\x1b[2J{MARK}@127.0.0.1:1",
    f"{MARK}",
]


@pytest.mark.parametrize("url", WRONG_URLS)
def test_no_error_about_a_url_holds_a_part_of_it_that_may_be_a_password(
    url: str, monkeypatch, capfd, tmp_path: Path
) -> None:
    for name, value in {"RUN_DIR": str(tmp_path), "RUN_CONNECT_TIMEOUT_S": "0.05"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REDIS_URL", url)
    said = say(capfd, Queues, "status")
    monkeypatch.delenv("REDIS_URL")
    said += say(capfd, Queues, "status", "--redis-url", url)
    (tmp_path / "variables").write_text(f"REDIS_URL={json.dumps(url)}\n")
    said += say(capfd, Queues, "status", "--env-file", str(tmp_path / "variables"))
    (tmp_path / "url").write_text(url)
    monkeypatch.setenv("REDIS_URL_FILE", str(tmp_path / "url"))
    said += say(capfd, Queues, "status")
    monkeypatch.delenv("REDIS_URL_FILE")
    said += say(capfd, Queues, "status", "--dry-run", "--redis-url", url, codes=(0, 78))
    assert MARK not in said
    assert "\x1b" not in said


def test_a_server_that_refuses_the_password_is_named_without_it(
    queue_server, monkeypatch, capfd, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    wrong = re.sub(r":[^:@/]+@", f":{MARK}@", queue_server.url)
    monkeypatch.setenv("REDIS_URL", wrong)
    assert MARK not in say(capfd, Queues, "status", codes=(78,))
