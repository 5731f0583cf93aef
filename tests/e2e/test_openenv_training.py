"""A run whose environment is a server made with openenv-core itself.

`make nightly` installs openenv-core in an environment of its own. PENSTOCK_OPENENV names its Python.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.site import FAKE_PROCFILE, Site
from tests.helpers import NIGHTLY, wait_until

PYTHON = os.environ.get("PENSTOCK_OPENENV", "")

pytestmark = pytest.mark.skipif(
    not NIGHTLY or not PYTHON,
    reason="needs a Python with openenv-core in PENSTOCK_OPENENV, and NIGHTLY=1",
)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, str(Path(__file__).with_name("openenv_echo.py")), str(port)]
    server = subprocess.Popen(command)
    try:
        wait_until(lambda: answers(port), "the OpenEnv server", 300)
        yield f"ws://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_an_openenv_server_trains(tmp_path: Path, address: str) -> None:
    tmp_path.chmod(0o755)
    words = tmp_path / "words.py"
    words.write_text(f'from penstock.openenv import OpenEnv\nWords = OpenEnv("{address}")\n')
    site = Site(
        tmp_path, FAKE_PROCFILE, talks=True,
        call='<tool_call>{"name": "step", "arguments": {"message": "1"}}</tool_call>',
        LEARNER_ENVIRONMENT=f"{words}:Words", LEARNER_REWARDS="environment", LEARNER_MAX_STEPS="4",
        LEARNER_MAX_PROMPT_LENGTH="60", LEARNER_MAX_COMPLETION_LENGTH="64",
    )  # fmt: skip
    with site.start():
        assert site.wait(600) == 0
    assert site.steps() == 4
    assert site.moved() > 0
    rows = [json.loads(line) for line in (site.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["tools/call_frequency"] == 2.0 for row in rows)
    assert all(row["tools/failure_frequency"] == row["environment/failed"] == 0 for row in rows)
    assert any(row["rewards/environment/std"] > 0 for row in rows)
