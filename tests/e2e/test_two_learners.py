"""Two learners where no file lock reaches: the first is stopped, superseded, and continued."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from tests.e2e.forked import Forked, ForkedSite
from tests.e2e.site import FAKE_PROCFILE, ROOT
from tests.helpers import wait_until
from tests.judge import judge

pytestmark = pytest.mark.e2e

STEPS = 12


@contextmanager
def role(module: str, site: ForkedSite, url: str) -> Iterator[Forked]:
    """A role's process, killed at the end."""
    process = Forked(module, [], ROOT, os.environ | site.variables | {"REDIS_URL": url})
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def lease_lives(view: RunView, connection: Connection) -> bool:
    """Whether the learner's lease has not run out on the server's clock."""
    seen, lease = connection.execute("HMGET", view.keys.fence, "seen", "lease")
    seconds, microseconds = connection.execute("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000 - int(seen) < int(lease)


def test_nothing_of_a_superseded_learner_enters_the_run(tmp_path: Path) -> None:
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS=str(STEPS), LEARNER_SAVE_STEPS="2",
        LEARNER_EVAL_DATASET="", FAKE_TOKEN_DELAY_S="0.05",
    )  # fmt: skip
    with (
        LocalServer(tmp_path / "server") as server,
        role("tests.actors.fake_actor", site, server.url) as actor,
        role("penstock.rewarders", site, server.url) as rewarder,
        role("penstock.learner", site, server.url) as first,
    ):
        connection = Connection(server.url, 10, 10)
        view = RunView(connection, Keys("e2e"))
        wait_until(lambda: site.steps() >= 3, "the first learner's steps", 120)
        first.send_signal(signal.SIGSTOP)
        stopped_at = site.steps()
        (site.run_folder / "learner.lock").unlink()  # as on a file system whose locks do not reach
        wait_until(lambda: not lease_lives(view, connection), "the lease to run out", 30)
        with role("penstock.learner", site, server.url) as second:
            wait_until(lambda: site.steps() >= stopped_at + 2, "the second learner's steps", 120)
            first.send_signal(signal.SIGCONT)
            assert first.wait(60) == 73
            assert second.wait(120) == 0
        assert actor.wait(30) == rewarder.wait(30) == 0
        said = first.stdout.read()
        totals, places, _ = view.audit()
        connection.close()
    assert "of the learner holds the run" in said
    assert (totals["trained"], places) == (STEPS * 4, [])
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], len(verdict["resumed_at"])) == (STEPS, 1)
    newest = max((site.run_folder / "checkpoints").glob("[0-9]*"))
    assert newest.name == f"000002-{STEPS:08d}"
    assert site.moved() > 1e-3
    replayed = site.replay()
    assert replayed == {"steps": STEPS, "weights_difference": 0.0, "steps_with_other_metrics": []}
