from __future__ import annotations

import sys
from collections import Counter

from penstock.deploy.child import Child, Service
from tests.chaos.victims import FORK_SERVER, GUARD, REWARDER, SCORER, TRACKER, find_victims
from tests.helpers import wait_until

ROLE = """
import multiprocessing, time
from penstock.common.guard import guard_children
if __name__ == "__main__":
    guard_children()
    context = multiprocessing.get_context("forkserver")
    for _ in range(2):
        context.Process(target=time.sleep, args=(60,)).start()
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

    expected = {REWARDER: 1, GUARD: 1, FORK_SERVER: 1, TRACKER: 1, SCORER: 2}
    try:
        wait_until(lambda: counts() == expected, "all processes")
        scorer = next(victim for victim in find_victims([child]) if victim.kind == SCORER)
        assert scorer.child == "rewarder.1"
        assert scorer.kill()
        wait_until(lambda: counts()[SCORER] == 1, "the killed process to be gone")
    finally:
        child.kill()
        wait_until(lambda: child.reap() is not None, "the role to end")
