"""The demo with a user per role, over TLS with client certificates. Nightly: a few minutes.

NIGHTLY=1 python -m pytest tests/e2e/test_secure_demo.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.common.broker.acl import ROLES
from penstock.common.broker.connection import Connection
from penstock.common.config.redis_url import parse_url
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.task import write_task
from tests.common.tls_server import make_certificates, tls_server, url_of
from tests.helpers import nightly
from tests.judge import judge

pytestmark = [pytest.mark.e2e, pytest.mark.engine, nightly]

SEED, STEPS = 5, 10
LIMIT_S = 1500
ROOT = Path(__file__).parents[2]
PROCFILE = "".join(
    f"{role}: REDIS_URL_FILE={{users}}/{role}.url {role}\n" for role in ("learner", "actor", "rewarder")
)


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Penstock in the folder and return what it printed."""
    program = Path(sys.executable).with_name(command[0])
    return subprocess.run(
        [program, *command[1:]], cwd=folder, env=os.environ | variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_the_demo_runs_under_a_user_per_role_over_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    users = tmp_path / "users"
    task = write_task(tmp_path / "task", SEED)
    make_base_model(tmp_path / "model", task, SEED, print)
    (tmp_path / "Procfile").write_text(PROCFILE.format(users=users))
    operator = tmp_path / "operator.url"
    settings = {
        "RUN_NAME": "secure", "RUN_DIR": "runs", "LEARNER_MODEL": str(tmp_path / "model"),
        "LEARNER_DATASET": str(task.train), "LEARNER_EVAL_DATASET": str(task.heldout),
        "LEARNER_SEED": str(SEED), "LEARNER_MAX_STEPS": str(STEPS),
    }  # fmt: skip
    recipe = ROOT / "deploy/recipes/demo.env"
    with tls_server(tmp_path, certificates, "operator-s3cr3t") as port:
        operator.write_text(url_of(port, certificates, ":operator-s3cr3t"))
        operator.chmod(0o600)
        Connection(operator.read_text(), 30, 10).close()
        said = [
            run(tmp_path, "queues", "acl", "--out", str(users), REDIS_URL_FILE=str(operator), **settings)
        ]
        reader = {"REDIS_URL_FILE": str(users / "reader.url"), **settings}
        said.append(run(tmp_path, "penstock", "up", "--env-file", str(recipe), **reader))
        said.append(run(tmp_path, "queues", "audit", "--json", **reader))
    for answer in said:
        assert answer.returncode == 0, answer.stdout[-6000:]
    audit = json.loads(said[-1].stdout.splitlines()[-1])
    assert audit["faults"] == []
    assert audit["issued"] == sum(audit["ended"].values())
    verdict = judge(tmp_path / "runs/secure")
    assert verdict["faults"] == []
    assert verdict["steps"] == STEPS
    secrets = [parse_url((users / f"{role}.url").read_text().strip()).password or "" for role in ROLES]
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    for secret in (*secrets, "operator-s3cr3t"):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
        assert not [answer.args for answer in said if secret in answer.stdout]
