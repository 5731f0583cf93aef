"""The short forms of `python -m tests.soak` and `python -m tests.joiners`. Nothing asserts a time."""

from __future__ import annotations

import pytest

from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE
from tests.joiners import run_joiners
from tests.soak import Sample, compare, cpu_per_step, describe_cpu_growth, run_soak, variables

pytestmark = pytest.mark.e2e


def test_a_calm_run_is_measured_in_all_its_processes(tmp_path):
    found = run_soak(ForkedSite(tmp_path, FAKE_PROCFILE, **variables()), seconds=3.0, every_s=0.5)
    assert found.faults == []
    assert found.groups > 0
    seen = {(row.of, row.measure): row.last for row in found.rows}
    for name in (
        "penstock up",
        "queue.1",
        "learner.1",
        "actor.2",
        "rewarder.1",
        "rewarder.2 scoring process",
    ):
        for measure in ("memory", "descriptors", "threads"):
            assert seen[name, measure] > 0
    assert seen["server", "keys"] > 5
    assert seen["stream rollouts", "consumers"] >= 1
    assert all(value > 0 for value in found.cpu["learner"])


CALM = {"memory": 100.0, "descriptors": 9.0, "threads": 5.0, "consumers": 2.0}


def samples(**last: float) -> list[Sample]:
    """Twelve samples of a process, of which the last three have other values."""
    return [{"learner.1": CALM}] * 9 + [{"learner.1": CALM | last}] * 3


@pytest.mark.parametrize(
    ("last", "grown"),
    [
        ({}, []),
        ({"memory": 104.9}, []),
        ({"memory": 105.1}, ["memory"]),
        ({"descriptors": 11.0, "threads": 4.0}, []),
        ({"descriptors": 12.0}, ["descriptors"]),
        ({"threads": 8.0, "memory": 130.0}, ["memory", "threads"]),
        ({"consumers": 3.0}, ["consumers"]),
    ],
)
def test_what_grew_by_more_than_its_bound_is_named(last, grown):
    assert [row.measure for row in compare(samples(**last)) if row.grew] == grown


def test_a_thread_that_lives_for_a_moment_is_no_growth():
    seen = samples(threads=9.0)
    seen[-1] = seen[0]
    assert not [row for row in compare(seen) if row.grew]


def test_processor_time_is_the_mean_of_the_steps_without_waits():
    steps = [
        {
            "perf/learner/a_cpu_s": cpu,
            "perf/learner/waiting_for_groups_cpu_s": 9.0,
            "perf/actor/b_cpu_s": 1.0,
        }
        for cpu in (1.0, 1.0, 4.0, 2.0, 2.0, 0.5)
    ]
    found = cpu_per_step(steps)
    assert found == {"learner": (2.0, 1.5), "actor": (1.0, 1.0), "rewarder": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("learner", "actor", "said"),
    [
        ((4.0, 5.0), (1.0, 1.25), ""),  # the machine is slower
        ((4.0, 4.1), (1.0, 1.0), ""),
        ((4.0, 4.4), (1.0, 1.0), "the processor time of the learner: the learner's from 2.000 to 2.200"),
        ((4.0, 4.0), (1.0, 1.2), "the processor time of the actors and rewarders: "),
    ],
)
def test_a_role_whose_steps_take_longer_than_the_machine_explains_is_named(learner, actor, said):
    found = describe_cpu_growth({"learner": learner, "actor": actor, "rewarder": (1.0, actor[1])})
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_actors_that_come_and_go_lose_nothing_and_do_nothing_twice(tmp_path):
    found = run_joiners(
        tmp_path, seconds=3.0, actors=4, seed=1, lease_s=1.0, pause_s=0.5, warm_s=0, calm_s=1.0, steps=2,
        FAKE_TOKEN_DELAY_S="0.02", LEARNER_GROUPS_PER_STEP="4", LEARNER_MAX_STALENESS="2",
    )  # fmt: skip
    assert found.faults == []
    assert found.busy.groups > 0
    assert found.events["joined"] > 4 or found.events["stop"]
