"""A prompt that kills the engine with 64 others in flight: it alone dies, they are trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import started_server
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor.snapshot import read_consumers
from penstock.common.wire.ids import TicketId, Version
from penstock.learner.data.order import Question, Shuffled
from penstock.learner.data.tickets import TicketSource
from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE
from tests.judge import judge, read_records
from tests.tiny_tokenizer import LETTERS

pytestmark = pytest.mark.e2e

OTHERS = 64
PER_STEP = 33
"""Two steps' tickets are out at once: the 64 others, the poison, one more."""


def place_of(ticket: str, questions: int) -> int:
    """The row of the data set that a ticket asks."""
    blank = np.zeros(1, dtype="<i4")
    rows = [Question(blank, {"row": str(row)}) for row in range(questions)]
    source = TicketSource(
        Shuffled([rows], [], LearnerSettings().seed, shuffle=True), [], LearnerSettings(), "contract"
    )
    return int(source.train(TicketId(ticket), Version(0, 0)).columns["row"])


def poison(path: Path, ticket: str) -> None:
    """Put a letter that no other question has into the one that a ticket asks."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[place_of(ticket, len(rows))]["question"] += "a"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def most_held(site: ForkedSite) -> int:
    """Tickets that one actor holds."""
    connection = Connection(started_server(RunFolder(site.run_folder)), 10, 10)
    consumers = read_consumers(connection, Keys("e2e").tickets)
    connection.close()
    return max((consumer.held for consumer in consumers), default=0)


def test_a_prompt_that_kills_the_engine_takes_none_of_the_64_others_along(tmp_path: Path) -> None:
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS="2", LEARNER_GROUPS_PER_STEP=str(PER_STEP),
        LEARNER_NUM_GENERATIONS="2", LEARNER_EVAL_DATASET="", FAKE_TOKEN_DELAY_S="0.05",
        FAKE_POISON=str(LETTERS.index("a")), FAKE_MISBEHAVIOUR="exit",
    )  # fmt: skip
    poison(tmp_path / "train.jsonl", f"train:{OTHERS}")
    with site.start():
        site.wait_for(lambda: any("exit code 137" in line for line in site.lines), "the engine's end")
        assert most_held(site) > OTHERS  # nothing is reclaimed before a lease has run out
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    assert verdict["states"] == {"trained": 2 * PER_STEP, "dead": 1}
    ends = [record["ends"] for _, record in read_records(site.run_folder)]
    dead = {ticket: reason for end in ends for ticket, (state, reason) in end.items() if state == "dead"}
    assert dead == {f"train:{OTHERS}": "lost its lease while running alone"}
