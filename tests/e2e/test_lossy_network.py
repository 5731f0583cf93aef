"""A whole run over a network that loses replies, and with a server that refuses what it is asked."""

from __future__ import annotations

import pytest

from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE
from tests.helpers import LossyProxy
from tests.judge import judge

pytestmark = pytest.mark.e2e


def test_a_run_that_loses_every_20th_reply_ends_as_any_other(tmp_path, private_server):
    with LossyProxy(private_server.url, every=20) as network:
        site = ForkedSite(
            tmp_path, FAKE_PROCFILE, REDIS_URL=network.url, LEARNER_MAX_STEPS="20",
            RUN_MAX_ATTEMPTS="8", FAKE_TOKEN_DELAY_S="0.01",
        )  # fmt: skip
        with site.start():
            assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    assert network.lost >= 50
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], verdict["states"]["trained"]) == (20, 80)
    assert "dead" not in verdict["states"]


REFUSALS = (
    b"-READONLY You can't write against a read only replica.\r\n",
    b"-NOREPLICAS Not enough good replicas to write.\r\n",
    b"-BUSY Redis is busy running a script.\r\n",
)
STRANGE = b"-STRANGE words of a server\r\n"
SLOW = """import time

def slow(completions, **_):
    time.sleep(1.5)
    return [1.0] * len(completions)
"""
THREADS = (
    (b"penstock_4_beat",),
    (b"penstock_4_renew", b":tickets"),
    (b"penstock_4_renew", b":rollouts"),
)
LOOPS = (
    (b"penstock_4_outcomes",), (b"penstock_4_issue",), (b"penstock_4_close",), (b"penstock_4_put",),
    (b"XREADGROUP", b":tickets"), (b"XREADGROUP", b":rollouts"), (b"penstock_4_handoff", b":scored"),
)  # fmt: skip


def test_a_run_whose_server_refuses_for_a_while_ends_as_any_other(tmp_path, private_server):
    """Each thread of each role meets each refusal, and one that nobody knows."""
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW)
    with LossyProxy(private_server.url) as network:
        site = ForkedSite(
            tmp_path, FAKE_PROCFILE, REDIS_URL=network.url, LEARNER_MAX_STEPS="6", RUN_LEASE_S="2",
            RUN_MAX_ATTEMPTS="9", FAKE_TOKEN_DELAY_S="0.05", LEARNER_REWARDS=f"{reward}:slow",
            LEARNER_EVAL_DATASET="", REWARDER_WORKERS="4",
        )  # fmt: skip
        with site.start():
            site.wait_for(lambda: site.steps() >= 1, "a first step")
            for patterns in THREADS + LOOPS:
                for refusal in REFUSALS:
                    network.answer(*patterns, reply=refusal)
            for patterns in THREADS:
                network.answer(*patterns, reply=STRANGE)
            site.wait_for(lambda: not network.unanswered, "all refusals to be met")
            assert not any("exit code" in line for line in site.lines)
            network.answer(b"penstock_4_outcomes", reply=STRANGE)
            assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    assert network.unanswered == []
    assert sum("STRANGE" in line for line in site.lines) >= 4
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], verdict["states"]["trained"]) == (6, 24)
    assert "dead" not in verdict["states"]
