"""A whole run over a network that loses every 20th reply: the server did it, nobody hears."""

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
        site.start()
        try:
            assert site.wait(600) == 0, "\n".join(site.lines[-40:])
        finally:
            site.stop()
    assert network.lost >= 50
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert (verdict["steps"], verdict["states"]["trained"]) == (20, 80)
    assert "dead" not in verdict["states"]
