"""What a process does, and where its time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.common import phases as module
from penstock.common.phases import PhaseCost, Phases
from tests.helpers import Clock


class CpuClock(Clock):
    """A clock with processor time; the test moves both."""

    cpu_s = 7.0

    def process_time(self) -> float:
        return self.cpu_s

    def spend(self, seconds: float, cpu_s: float) -> None:
        self.now += seconds
        self.cpu_s += cpu_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CpuClock:
    clock = CpuClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_every_moment_counts_for_the_innermost_phase(clock: CpuClock) -> None:
    phases = Phases()
    clock.spend(1.0, 0.5)
    with phases.enter("outer"):
        clock.spend(2.0, 0.25)
        with phases.enter("inner"):
            clock.spend(4.0, 8.0)
        with phases.enter("outer"):
            clock.spend(8.0, 0.25)
    assert phases.take_profile() == {
        "starting": PhaseCost(1.0, 0.5), "outer": PhaseCost(10.0, 0.5), "inner": PhaseCost(4.0, 8.0)
    }  # fmt: skip
    assert phases.seconds("outer") == 14.0


def test_a_phase_is_timed_traced_and_progress_all_at_once(clock: CpuClock) -> None:
    traced: list[str] = []

    @contextmanager
    def trace(name: str) -> Iterator[None]:
        traced.append(name)
        yield

    phases = Phases(trace)
    for seconds in (2.0, 1.0):
        with phases.enter("making an Update"), phases.enter("making an Update"):
            clock.spend(seconds, 0.0)
    clock.spend(4.0, 0.0)
    assert (phases.seconds("making an Update"), phases.seconds("writing weights")) == (3.0, 0.0)
    assert (phases.step_s, phases.progress, phases.name) == (7.0, 6, "starting")
    assert traced == ["making an Update"] * 2
    phases.begin_step()
    assert (phases.seconds("making an Update"), phases.step_s) == (0.0, 0.0)


def test_a_phase_goes_on_after_its_profile_was_taken(clock: CpuClock) -> None:
    phases = Phases()
    with phases.enter("first"):
        clock.spend(1.0, 1.0)
        assert phases.take_profile()["first"] == PhaseCost(1.0, 1.0)
        clock.spend(0.5, 0.25)
    assert phases.take_profile()["first"] == PhaseCost(0.5, 0.25)


def test_a_phase_that_an_error_ends_is_counted(clock: CpuClock) -> None:
    phases = Phases()
    with pytest.raises(ZeroDivisionError), phases.enter("failing"):
        clock.spend(1.0, 1 / 0)
    clock.spend(2.0, 0.0)
    assert phases.name == "starting"
    assert phases.take_profile() == {"starting": PhaseCost(2.0, 0.0), "failing": PhaseCost(0.0, 0.0)}
