"""A run whose learner and actors use one device by turns."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.e2e.site import Site
from tests.judge import judge

PROCFILE = "learner: learner\nactor: python -m tests.actors.fake_actor\nrewarder: rewarder\n"
STEPS = 8


@pytest.mark.e2e
def test_nothing_is_sampled_while_the_learner_uses_the_device_also_after_kills(tmp_path: Path) -> None:
    site = Site(
        tmp_path, PROCFILE, LEARNER_MAX_STEPS=str(STEPS), LEARNER_SHARE_DEVICE="true",
        LEARNER_EVAL_STEPS="3", FAKE_TOKEN_DELAY_S="0.02",
        FAKE_DEVICE=str(tmp_path / "runs/e2e/device" / f"{socket.gethostname()}.device"),
    )  # fmt: skip
    with site.start("--actors", "2"):
        for child, step in (("actor.1", 1), ("learner", 3), ("actor.2", 5)):
            site.wait_for(lambda: site.steps() >= step, f"step {step}")  # noqa: B023
            site.kill(child)
        assert site.wait(240) == 0, site.lines[-20:]
    assert judge(site.run_folder)["faults"] == []
    assert site.steps() == STEPS
    assert not re.search("EngineFailed|BlockingIOError", "\n".join(site.lines))
    rows = [json.loads(line) for line in (site.run_folder / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if "perf/update_s" in row]  # others were trained again from the journal
    assert timed
    assert all("perf/learner/coming_back_to_the_device_s" in row for row in timed)
