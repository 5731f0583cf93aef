from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.files.run_folder import LearnerFolder
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.chaos.__main__ import format_verdict
from tests.chaos.plan import Floors
from tests.chaos.verdict import BLAMED, Verdict, left_behind, missed, wrongly_dead
from tests.chaos.victims import LEARNER, SERVER
from tests.common.builders import V0
from tests.learner.builders import claim_next

SOUND = Verdict(
    faults=[], kills={SERVER: [1, 2], LEARNER: [3]}, entries_lost=0, updates=4, groups=8, states={},
    resumes=1, left={}, replayed={}, took_s=1.0,
)  # fmt: skip
FLOORS = Floors(kills=3, server=2, learner=1, groups=8, updates=4)


def test_a_run_that_reached_its_floors_missed_none():
    assert missed(SOUND, FLOORS) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kills": {SERVER: [1], LEARNER: [1, 2]}}, "1 kills of the server, expected at least 2"),
        ({"kills": {SERVER: [1, 2, 3], LEARNER: []}}, "0 kills of the learner, expected at least 1"),
        ({"groups": 7}, "7 groups trained, expected at least 8"),
        ({"updates": 3}, "3 Updates, expected at least 4"),
    ],
)
def test_what_a_run_did_not_reach_is_a_fault(change, fault):
    assert missed(replace(SOUND, **change), FLOORS) == [fault]


def test_a_ticket_may_die_of_a_kill_while_it_runs_alone_and_of_nothing_else(tmp_path):
    claim = claim_next(tmp_path)
    reasons = {
        "train:0": BLAMED[0],
        "train:1": "reward accuracy: killed its process",
        "train:2": BLAMED[1],
    }
    ends = {ticket: ["dead", reason] for ticket, reason in reasons.items()}
    Journal(LearnerFolder(tmp_path, claim.incarnation)).append(
        "end", ends=ends, ledger=Ledger().snapshot()
    )
    assert wrongly_dead(tmp_path) == ["train:1 died of kills alone: reward accuracy: killed its process"]


def test_what_is_left_on_the_server_is_a_fault(tmp_path):
    with LocalServer(tmp_path) as server:
        connection = Connection(server.url, 10, 10)
        queue = LearnerQueue(connection, Keys("left"), 1)
        queue.claim("nonce", "test")
        queue.issue("train", [("train:0", V0, b"ticket"), ("train:1", V0, b"ticket")])
        queue.close("train", {"train:0": "trained"})
        connection.close()
    left, faults = left_behind(tmp_path, "left")
    assert left["tickets"] == 1
    assert faults == ["1 entries are left on tickets", "train:1 is still in flight on tickets"]


def test_the_table_tells_kills_by_kind_and_step_and_every_fault():
    found = replace(SOUND, kills={SERVER: [3, 3, 5], LEARNER: [1]}, faults=["train:7 never ended"])
    lines = format_verdict(found).splitlines()
    assert lines[1].split() == ["server", "3", "3x2", "5"]
    assert lines[2].split() == ["learner", "1", "1"]
    assert lines[-2:] == ["FAULT: train:7 never ended", "verdict           1 faults"]
    assert format_verdict(SOUND).endswith("0 lost, 0 twice")
