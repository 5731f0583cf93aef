from __future__ import annotations

import sys
from collections import Counter

from penstock.deploy.child import Child, Service
from tests.chaos.victims import GUARD, KEEPER, NURSERY, REWARDER, SCORER, find_victims
from tests.helpers import wait_until

ROLE = """
import time
from penstock.common.config.settings import RewarderSettings
from penstock.common.guard import guard_children
from penstock.rewarders.scoring_pool import ScoringPool
guard_children()
with ScoringPool(RewarderSettings(workers=2)):
    time.sleep(60)
"""


def test_a_role_and_all_its_helpers_are_found_and_can_be_killed(tmp_path):
    script = tmp_path / "role.py"
    script.write_text(ROLE)
    child = Child(Service("rewarder", (sys.executable, str(script)), 1), 1, lambda report: None)
    assert find_victims([child]) == []
    child.start({"PYTHONPATH": ":".join(sys.path)})

    def counts() -> Counter[str]:
        return Counter(victim.kind for victim in find_victims([child]))

    expected = {REWARDER: 1, GUARD: 1, NURSERY: 1, KEEPER: 2, SCORER: 2}
    try:
        wait_until(lambda: counts() == expected, "all processes")
        scorer = next(victim for victim in find_victims([child]) if victim.kind == SCORER)
        assert scorer.child == "rewarder.1"
        assert scorer.kill()
        wait_until(lambda: counts()[SCORER] == 1, "the killed process to be gone")
    finally:
        child.kill()
        wait_until(lambda: child.reap() is not None, "the role to end")
