"""The learner's sign of life follows its main loop."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from penstock.common.broker.run_view import RunView
from penstock.common.errors import RunTaken
from penstock.common.phases import Phases
from penstock.learner.policy.collective import AllRanksPolicy
from penstock.learner.streams.heartbeat import Heartbeat
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.helpers import wait_until


@pytest.fixture
def queue(connection, keys) -> LearnerQueue:
    queue = LearnerQueue(connection, keys, 1)
    queue.claim("nonce", "test", lease_s=3600.0)
    return queue


def test_the_phase_is_told_and_the_lease_renewed_again_and_again(queue, connection, keys):
    view = RunView(connection, keys)
    phases = Phases()
    with Heartbeat(queue, phases, 0.1, stall_timeout_s=60.0), phases.enter("making an Update"):
        first = wait_until(
            lambda: view.learner() if view.learner().phase == "making an Update" else None, "a beat"
        )
        wait_until(lambda: view.learner().seen != first.seen, "another one")


def test_a_long_lease_makes_no_sign_of_life_rare(queue, connection, keys):
    view = RunView(connection, keys)
    with Heartbeat(queue, Phases(), lease_s=3600.0, stall_timeout_s=60.0):
        wait_until(lambda: view.learner().phase == "starting", "a sign of life")
        first = view.learner()
        wait_until(lambda: view.learner().seen != first.seen, "another one")


def test_a_phase_that_lasts_too_long_ends_the_signs_of_life_and_says_which(queue, connection, keys):
    said = []
    phases = Phases()
    heartbeat = Heartbeat(queue, phases, 0.05, stall_timeout_s=1.0, on_stall=said.append)
    with heartbeat, phases.enter("making an Update"):
        wait_until(lambda: said, "the stall")
        assert re.search(r"has been making an Update for \d+ s \(LEARNER_STALL_TIMEOUT_S\)", said[0])
        last = RunView(connection, keys).learner()
        heartbeat._thread.stop()
        assert RunView(connection, keys).learner() == last


def test_a_learner_that_leaves_lets_its_lease_go(queue, connection, keys):
    with Heartbeat(queue, Phases(), lease_s=3600.0, stall_timeout_s=60.0), pytest.raises(RunTaken):
        LearnerQueue(connection, keys, 2).claim("nonce", "next", 1.0)
    LearnerQueue(connection, keys, 2).claim("nonce", "next", 1.0)


def test_a_superseded_learner_leaves_its_successors_lease_alone(queue, connection, keys):
    successor = LearnerQueue(connection, keys, 2)
    with Heartbeat(queue, Phases(), lease_s=3600.0, stall_timeout_s=60.0):
        successor.claim("nonce", "next", 3600.0, ["test"])
    threading.Timer(0.5, successor.beat, [3600.0, "working"]).start()
    with pytest.raises(RunTaken, match="next"):
        LearnerQueue(connection, keys, 3).claim("nonce", "third", 1.0)


def test_a_superseded_learner_renews_no_lease_and_is_watched_on(queue, connection, keys):
    said = []
    with Heartbeat(queue, Phases(), lease_s=0.1, stall_timeout_s=0.5, on_stall=said.append):
        LearnerQueue(connection, keys, 2).claim("nonce", "next", 3600.0, ["test"])
        before = connection.execute("HGETALL", keys.fence)
        wait_until(lambda: said, "the stall of its main loop")
        assert connection.execute("HGETALL", keys.fence) == before


def test_a_heartbeat_goes_on_once_a_mistake_in_the_fence_is_undone(queue, connection, keys, monkeypatch):
    refused, view = threading.Event(), RunView(connection, keys)

    def beat(*args, beat=queue.beat):
        try:
            beat(*args)
        except RunTaken:
            refused.set()
            raise

    monkeypatch.setattr(queue, "beat", beat)
    with Heartbeat(queue, Phases(), lease_s=0.1, stall_timeout_s=600.0):
        connection.execute("HINCRBY", keys.fence, "incarnation", 1)
        assert refused.wait(60)
        connection.execute("HINCRBY", keys.fence, "incarnation", -1)
        seen = view.learner().seen
        wait_until(lambda: view.learner().seen != seen, "the next heartbeat")


def test_a_hanging_main_loop_does_not_keep_the_process():
    code = "from penstock.learner.streams.heartbeat import end_process; end_process('it hangs')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 81
    assert done.stderr == "learner: DeadlineExceeded: it hangs\n"


def test_a_call_of_the_policy_is_a_phase_and_the_phase_before_goes_on_after_it():
    phases = Phases()

    class FakePolicy:
        def update(self, batch: str, step: int) -> str:
            return f"{batch} trained as {step} while {phases.name}"

    policy = AllRanksPolicy(FakePolicy(), phases)
    with phases.enter("working"):
        assert policy.update("batch", 7) == "batch trained as 7 while making an Update"
        assert phases.name == "working"
