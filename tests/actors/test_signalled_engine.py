"""Real vLLM in an actor whose processes all get SIGTERM, as Slurm and Ctrl-C send signals."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.common.broker.costs import LOST_TOKENS
from penstock.common.broker.local_server import LocalServer
from penstock.common.guard import below
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import hash_tokenizer
from penstock.common.wire.messages import Version, Weights
from penstock.learner.state.versions import with_hashes
from tests.actors.conftest import Run
from tests.actors.live_engine import PROMPTS, SAMPLING
from tests.e2e.site import make_model
from tests.helpers import needs_vllm, wait_until

pytestmark = [pytest.mark.engine, needs_vllm]


def publish(a_run: Run, model: Path) -> None:
    """Let the run be one of this model, with a first version of it."""
    a_run.contract = replace(
        a_run.contract, model=str(model), tokenizer_hash=hash_tokenizer(model), tokens_per_sequence=384
    )
    a_run.queue.publish_contract(encode(a_run.contract))
    folder = a_run.run_folder.version(1, 0)
    shutil.copytree(model, folder)
    a_run.queue.announce(with_hashes(Weights(Version(1, 0), str(folder), "", "")))


def test_an_actor_whose_processes_get_its_signal_too_samples_on_in_its_grace_period(
    a_run: Run, queue_server: LocalServer, tmp_path: Path
) -> None:
    publish(a_run, make_model(tmp_path / "model", 512))
    for number in range(40):
        sampling = replace(SAMPLING, max_tokens=375, seed=number)
        a_run.issue(a_run.ticket(number, prompt_ids=PROMPTS[0], num_generations=16, sampling=sampling))
    variables = {
        "REDIS_URL": queue_server.url, "RUN_NAME": a_run.run_folder.path.name,
        "RUN_DIR": str(a_run.folder), "RUN_LEASE_S": "60", "ACTOR_GRACE_S": "120",
        "ACTOR_MAX_NUM_SEQS": "32", "ACTOR_KV_CACHE_GIB": "0.5",
    }  # fmt: skip
    log = tmp_path / "actor.log"
    with log.open("w") as file:
        actor = subprocess.Popen(
            [sys.executable, "-m", "penstock.actors"], env=os.environ | variables,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: a_run.groups() or actor.poll() is not None, "a group", 300)
        before = len(a_run.groups())
        pids = [actor.pid, *below(actor.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert actor.wait(150) == 0
    finally:
        actor.kill()
    running = re.search(r"Stopping: (\d+) tickets run", log.read_text())
    assert running
    assert len(a_run.groups()) >= before + int(running[1])
    assert a_run.pending() == 0
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "all its processes to be gone")
    assert a_run.connection.execute("HGET", a_run.keys.costs, LOST_TOKENS) is None
