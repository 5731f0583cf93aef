"""Values that the queue server does not take. The server's limit is lowered to 1 MiB, its least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.errors import DataError, ValueTooLarge
from penstock.common.wire.codec import decode_outcome
from penstock.common.wire.messages import Verdict
from tests.common.builders import Run
from tests.learner.test_flow import Bench

LIMIT = 1 << 20


@pytest.fixture
def strict(private_server: LocalServer) -> Iterator[Connection]:
    """A connection to a server with low limits, that gives up on a lost server at once."""
    connection = Connection(private_server.url, 10, 0.5)
    connection.execute("CONFIG", "SET", "proto-max-bulk-len", LIMIT)
    yield connection
    connection.close()


def test_a_value_that_is_too_large_is_refused_before_it_is_sent(strict):
    with pytest.raises(ValueTooLarge, match=r"argument 2 of SET has 41,943,040 bytes") as caught:
        strict.execute("SET", "key", b"x" * (40 << 20))
    assert "takes at most 1,048,576 bytes" in str(caught.value)
    assert caught.value.exit_code == DataError.exit_code == 65
    assert strict.execute("GET", "key") is None
    assert strict.restarts == 0


def test_letters_count_by_their_bytes(strict):
    strict.execute("SET", "key", "ü" * (LIMIT // 2))
    with pytest.raises(ValueTooLarge):
        strict.execute("SET", "key", "ü" * (LIMIT // 2 + 1))


@pytest.mark.parametrize("setting", ["proto-max-bulk-len", "client-query-buffer-limit"])
def test_the_largest_value_that_passes_is_taken(private_server, setting):
    connection = Connection(private_server.url, 10, 0.5)
    connection.execute("CONFIG", "SET", setting, LIMIT)
    limit = LIMIT - (4096 if setting == "client-query-buffer-limit" else 0)
    assert connection.execute("SET", "key", b"x" * limit)
    with pytest.raises(ValueTooLarge):
        connection.execute("SET", "key", b"x" * (limit + 1))
    for _ in range(3):  # each value counts alone
        connection.execute("RPUSH", "list", *[b"x" * (LIMIT // 2)] * 5)
    connection.close()


def test_a_user_who_may_not_ask_has_the_usual_limit(private_server, monkeypatch):
    admin = Connection(private_server.url, 10, 0.5)
    admin.execute("ACL", "SETUSER", "worker", "on", ">word", "~*", "+@all", "-config")
    address = private_server.url.rpartition("@")[2]
    worker = Connection(f"unix://worker:word@{address}", 10, 0.5)
    assert worker.execute("SET", "key", b"x" * (3 << 20))
    with monkeypatch.context() as patched:
        patched.setattr("penstock.common.broker.connection._USUAL_LIMIT", 2 << 20)
        with pytest.raises(ValueTooLarge, match="at most 2,097,152"):
            worker.execute("SET", "key", b"x" * (3 << 20))


def test_a_group_that_is_too_large_ends_dead_beside_those_that_are_not(strict):
    run = Run(strict, Keys("large"))
    run.issue(1, 2, 3)
    actor = run.actor()
    small, large, other = actor.take(3)
    groups = [(small, b"group"), (large, b"x" * (LIMIT + 1)), (other, b"group")]
    assert actor.handoff_all(groups, run.keys.rollouts) == [True, False, True]
    assert [ticket for ticket, _ in run.entries(run.keys.rollouts)] == [b"train:1", b"train:3"]
    ((ticket, payload),) = run.entries(run.keys.scored)
    verdict = decode_outcome(payload)
    assert isinstance(verdict, Verdict)
    assert (ticket, verdict.state) == (b"train:2", "dead")
    for words in ("the group of ticket train:2 has 1,048,577 bytes", "lower LEARNER_NUM_GENERATIONS"):
        assert words in verdict.reason
    assert [ticket for ticket, _ in run.entries(run.keys.dead)] == [b"train:2"]


def test_a_group_over_the_bound_of_the_contract_ends_dead(connection, keys):
    run = Run(connection, keys)
    run.issue(1, 2)
    actor = run.actor(largest=1000)
    entries = actor.take(2)
    groups = [(entries[0], b"x" * 1000), (entries[1], b"x" * 1001)]
    assert actor.handoff_all(groups, run.keys.rollouts) == [True, False]
    ((ticket, payload),) = run.entries(run.keys.scored)
    verdict = decode_outcome(payload)
    assert isinstance(verdict, Verdict)
    assert (ticket, verdict.state) == (b"train:2", "dead")
    assert "has 1,001 bytes, but the run takes at most 1,000 (LEARNER_MAX_GROUP_MIB)" in verdict.reason


def test_a_scored_group_that_is_too_large_ends_dead(strict):
    run = Run(strict, Keys("large"))
    run.issue(1)
    (entry,) = run.actor().take(1)
    run.actor().handoff(entry, run.keys.rollouts, b"group")
    (entry,) = run.rewarder().take(1)
    assert not run.rewarder().handoff(entry, run.keys.scored, b"x" * (LIMIT + 1))
    assert [ticket for ticket, _ in run.entries(run.keys.scored)] == [b"train:1"]
    assert run.entries(run.keys.rollouts) == []


def test_a_ticket_that_is_too_large_names_its_row_and_column(strict, tmp_path):
    bench = Bench(tmp_path, strict, Keys("large"))
    questions = bench.plan.source.questions
    question = questions.at(2)
    question.columns["context"] = "x" * LIMIT
    bench.publish(0)
    with pytest.raises(DataError) as caught:
        bench.flow.issue_tickets(0)
    for words in (question.where, "train:2", "column 'context'", "at most 1,048,576 bytes"):
        assert words in str(caught.value)


def test_a_held_out_question_that_is_too_large_names_its_row(strict, tmp_path):
    bench = Bench(tmp_path, strict, Keys("large"))
    source = bench.plan.source
    large = replace(
        source.eval_questions[1], columns={"context": "x" * LIMIT}, where="eval.jsonl, row 9"
    )
    source.eval_questions[1] = large
    with pytest.raises(DataError, match=r"eval\.jsonl, row 9: the ticket eval:1\.0:1 is too large"):
        bench.publish(0, evaluate=True)
