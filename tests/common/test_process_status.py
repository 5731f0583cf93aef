"""What processes tell of themselves on the queue server, and who may."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from penstock.common.broker.costs import CostReport
from penstock.common.broker.keys import Keys
from penstock.common.broker.process_status import (
    LearnerProgress,
    StatusWriter,
    WorkerStatus,
    read_progress,
    read_workers,
    server_time_ms,
    write_status,
)
from penstock.common.errors import MalformedMessage
from penstock.common.monitor.overview import GONE_S, read_overview
from penstock.common.wire.codec import encode
from penstock.learner.report.progress_writer import ProgressWriter
from tests.common.builders import Run
from tests.helpers import AclUsers


@pytest.fixture
def actor(run: Run) -> CostReport:
    """The report of an actor that has sampled 100 tokens more at each look."""
    done = iter(range(0, 10_000, 100))
    key = run.keys.processes
    status = StatusWriter(run.connection, key, "actor-1", "actor", lambda: ("1.4", next(done)))
    return CostReport(run.connection, run.keys.costs, "actor", status)


def test_a_process_is_seen_at_once_and_until_it_leaves(
    run: Run, run_name: str, actor: CostReport
) -> None:
    actor.note("generating")
    actor.send_if_due()
    now = read_overview(run.connection, run_name)
    status = now.workers["actor-1"]
    assert (status.role, status.version, status.phase) == ("actor", "1.4", "generating")
    assert status.rate > 0
    assert 0 <= status.busy <= 1
    assert now.age_s(status) < GONE_S
    assert set(now.running("actor")) == {"actor-1"}
    actor.leave()
    assert read_overview(run.connection, run_name).workers == {}


def test_a_process_that_was_killed_is_called_gone(run: Run, run_name: str) -> None:
    at_ms = server_time_ms(run.connection) - 14_000
    status = WorkerStatus("rewarder", "host", at_ms, "", "scoring", 1.0, 3.0)
    write_status(run.connection, run.keys.processes, "rewarder-1", status)
    now = read_overview(run.connection, run_name)
    assert now.running("rewarder") == {}
    assert now.gone("rewarder") == {"rewarder-1": status}
    assert now.gone("actor") == {}


def test_the_progress_has_the_newest_steps_and_goes_on_after_a_resume(run: Run) -> None:
    writer = ProgressWriter(run.learner, 0, 100, 4)
    for step in range(1, 71):
        metrics = {"reward": step / 100, "perf/step_s": 2.0, "perf/rollout_wait_s": 0.5}
        writer.made_step(step, 3, metrics)
    writer.evaluated(70, 0.5)
    ProgressWriter(run.learner, 70, 100, 4)
    progress = read_progress(run.connection, run.keys.processes)
    assert progress is not None
    assert progress.rewards == tuple(step / 100 for step in range(11, 71))
    assert (progress.evaluated, progress.heldout) == ((70,), (0.5,))
    assert (progress.step, progress.steps, progress.asked) == (70, 100, 4)


def test_the_first_steps_wait_for_the_engine_does_not_count(run: Run) -> None:
    writer = ProgressWriter(run.learner, 0, 100, 4)
    for step, wait_s in ((1, 75.0), (2, 0.2), (3, 0.4)):
        writer.made_step(step, 3, {"reward": 0.5, "perf/rollout_wait_s": wait_s})
    progress = read_progress(run.connection, run.keys.processes)
    assert progress is not None
    assert progress.wait_s == pytest.approx(0.3)


def test_a_resume_at_an_earlier_step_forgets_later_rewards(run: Run) -> None:
    ProgressWriter(run.learner, 5, 100, 4).made_step(6, 4, {"reward": 1.0})
    ProgressWriter(run.learner, 5, 100, 4)
    progress = read_progress(run.connection, run.keys.processes)
    assert progress is not None
    assert progress.rewards == ()


def test_old_signs_are_deleted(run: Run) -> None:
    now_ms = server_time_ms(run.connection)
    for name, age_s in (("old", 700), ("new", 300)):
        status = WorkerStatus("actor", "host", now_ms - 1000 * age_s, "", "generating", 1.0, 1.0)
        write_status(run.connection, run.keys.processes, name, status)
    ProgressWriter(run.learner, 0, 1, 1)
    workers, _ = read_workers(run.connection, run.keys.processes)
    assert set(workers) == {"new"}


WRONG_SIGNS = {
    "busy": {"busy": math.nan},
    "a rate": {"rate": 1e308},
    "a negative rate": {"rate": -1.0},
    "a time": {"at_ms": 2**62},
    "a phase": {"phase": "x" * 5000},
}


@pytest.mark.parametrize("name", WRONG_SIGNS)
def test_a_sign_that_no_process_writes_is_refused(name: str) -> None:
    right = WorkerStatus("actor", "host", 1, "1.4", "generating", 0.5, 1.0)
    with pytest.raises(MalformedMessage):
        replace(right, **WRONG_SIGNS[name])


@pytest.mark.parametrize(
    "wrong", [{"rewards": (1e308,)}, {"heldout": (1.0, 2.0)}, {"step": -1}, {"step_s": math.nan},
              {"rewards": (0.0,) * 2000}]
)  # fmt: skip
def test_progress_that_no_learner_writes_is_refused(wrong: dict[str, Any]) -> None:
    right = LearnerProgress(1, 1, 2, (math.nan, 0.5), (1,), (0.5,), 0.5, 1.0, 0.5, 10.0, 4, 4)
    with pytest.raises(MalformedMessage):
        replace(right, **wrong)


def test_what_other_clients_write_is_deleted_within_a_minute_and_bounded(
    run: Run, run_name: str
) -> None:
    for start in range(0, 6000, 1000):
        junk = [part for n in range(start, start + 1000) for part in (f"junk-{n}", b"x" * 100)]
        run.connection.execute("HSET", run.keys.processes, *junk)
    future = WorkerStatus(
        "actor", "h", server_time_ms(run.connection) + 10**9, "", "generating", 1.0, 1.0
    )
    write_status(run.connection, run.keys.processes, "actor-future", future)
    writer = ProgressWriter(run.learner, 0, 1, 1)
    now = read_overview(run.connection, run_name)
    assert now.running("actor") == {}
    assert len(now.workers) <= 2000
    for _ in range(20):
        writer._cleaned_ms = 0
        writer.made_step(1, 1, {})
    assert run.connection.execute("HLEN", run.keys.processes) == 1


@pytest.mark.parametrize("value", ["9" * 5000, "-1", "1e3", "\u0663", ""])
def test_numbers_that_no_learner_wrote_are_left_out(run: Run, run_name: str, value: str) -> None:
    """Python refuses a number of 5,000 digits by another error than ours: it would end every screen."""
    run.connection.execute("HSET", run.keys.ledger, "issued", value, "trained", 7)
    run.connection.execute("HSET", run.keys.fence, "seen", value)
    now = read_overview(run.connection, run_name)
    assert now.totals == {"trained": 7}
    assert now.heartbeat_s == 0


def test_an_old_sign_under_a_name_that_is_no_text_is_deleted(run: Run) -> None:
    status = WorkerStatus("actor", "host", 1, "", "generating", 1.0, 1.0)
    run.connection.execute("HSET", run.keys.processes, b"actor-\xff", encode(status))
    ProgressWriter(run.learner, 0, 1, 1)
    assert run.connection.execute("HLEN", run.keys.processes) == 1


def test_what_cannot_be_shown_ends_neither_the_learner_nor_an_actor(run: Run) -> None:
    ProgressWriter(run.learner, 0, 1, 1).made_step(
        1, 1, {"reward": math.inf, "perf/tokens_per_s": math.nan}
    )
    key = run.keys.processes
    backwards = iter((10, 0, 0))
    status = StatusWriter(run.connection, key, "actor-1", "actor", lambda: ("1.4", next(backwards)))
    CostReport(run.connection, run.keys.costs, "actor", status).send()  # its count fell: a negative rate


def test_a_damaged_sum_of_costs_does_not_hide_a_process(
    run: Run, run_name: str, actor: CostReport, capsys: pytest.CaptureFixture[str]
) -> None:
    run.connection.execute("HSET", run.keys.costs, "actor/waiting_for_tickets_s", "text")
    actor.send()
    actor.send()
    assert set(read_overview(run.connection, run_name).workers) == {"actor-1"}


def test_the_seconds_per_step_are_those_of_the_clock(run: Run) -> None:
    """What lies between two steps counts, such as an evaluation: the time left is made of it."""
    writer = ProgressWriter(run.learner, 0, 10, 1)
    for step in (1, 2):
        time.sleep(0.1)
        writer.made_step(step, 1, {"perf/step_s": 1e-6})
    progress = read_progress(run.connection, run.keys.processes)
    assert progress is not None
    assert progress.step_s >= 0.1


@pytest.mark.parametrize("value", [b"", b"text", b"\xff\x00", b"\x93\x01\x02\x03"])
def test_what_no_process_wrote_is_left_out(run: Run, run_name: str, value: bytes) -> None:
    run.connection.execute("HSET", run.keys.processes, "actor-1", value, "learner", value)
    now = read_overview(run.connection, run_name)
    assert (now.workers, now.progress) == ({}, None)


def test_a_key_of_another_type_ends_nothing(run: Run, run_name: str, actor: CostReport) -> None:
    run.connection.execute("SET", run.keys.processes, "text")
    actor.send()
    ProgressWriter(run.learner, 0, 1, 1)
    assert read_overview(run.connection, run_name).workers == {}
    run.learner.restore()
    actor.send()
    assert set(read_overview(run.connection, run_name).workers) == {"actor-1"}


def test_the_users_of_the_roles_may_tell_of_themselves(
    acl_users: AclUsers, keys: Keys, run_name: str
) -> None:
    Run(acl_users.learner, keys)
    for connection, role in ((acl_users.actor, "actor"), (acl_users.rewarder, "rewarder")):
        status = StatusWriter(connection, keys.processes, role, role, lambda: ("", 0))  # type: ignore[arg-type]
        status.write("working", 1.0)
    now = read_overview(acl_users.reader, run_name)
    assert set(now.workers) == {"actor", "rewarder"}


def test_a_sign_is_small(run: Run) -> None:
    """2,000 processes and the progress stay far below a megabyte."""
    status = WorkerStatus(
        "actor", "a-host-with-a-long-name.example", 1, "12.3456", "generating", 0.5, 1e5
    )
    write_status(run.connection, run.keys.processes, "x", status)
    values = tuple(float(step) for step in range(60))
    progress = LearnerProgress(1, 1, 1, values, tuple(range(60)), values, 1.0, 1.0, 1.0, 1.0, 1, 1)
    write_status(run.connection, run.keys.processes, "learner", progress)
    sizes = [len(value) for value in run.connection.execute("HVALS", run.keys.processes)]
    assert min(sizes) < 200
    assert max(sizes) < 2000
