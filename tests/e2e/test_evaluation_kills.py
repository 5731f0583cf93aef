"""kill -9 of the learner in a long evaluation: the answers that came before are kept."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from penstock.common.errors import RunNotReady
from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE, write_questions
from tests.judge import judge

pytestmark = pytest.mark.e2e

QUESTIONS, KILLS = 2000, (400, 900, 1400)


def answers_of(view: RunView) -> int:
    """How many held-out questions were answered."""
    try:
        return view.audit()[0].get("evaluated", 0)
    except RunNotReady:
        return 0


def test_each_question_of_an_evaluation_is_answered_once_whatever_kills_the_learner(
    tmp_path: Path, private_server: LocalServer
) -> None:
    questions = write_questions(tmp_path / "many.jsonl", QUESTIONS)
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, REDIS_URL=private_server.url, LEARNER_MAX_STEPS="1",
        LEARNER_EVAL_DATASET=str(questions), LEARNER_EVAL_STEPS="0", REWARDER_WORKERS="2",
        RUN_MAX_ATTEMPTS="9",
    )  # fmt: skip
    connection = Connection(private_server.url, 10, 60)
    view = RunView(connection, Keys("e2e"))
    site.start()
    try:
        for count in KILLS:
            site.wait_for(lambda count=count: answers_of(view) >= count, f"{count} answers")
            site.kill("learner")
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    finally:
        site.stop()
        connection.close()
    rows = [
        json.loads(line) for line in (site.run_folder / "evaluations.jsonl").read_text().splitlines()
    ]
    answered = Counter((row["step"], row["index"]) for row in rows)
    assert answered == {(step, index): 1 for step in (0, 1) for index in range(QUESTIONS)}
    assert all(row["completions"] for row in rows)
    verdict = judge(site.run_folder)
    assert verdict["faults"] == []
    # What was on its way at a kill is asked again; a new begin would ask 400, 900 and 1,400 more.
    assert verdict["states"]["evaluated"] < 2 * QUESTIONS + 3 * 200
    told = [line for line in site.lines if "were answered before the restart" in line]
    assert len(told) == len(KILLS)
