"""The learner lends its device while it waits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.common.errors import DeadlineExceeded
from penstock.common.phases import Phases
from penstock.common.shared_device import SharedDevice
from penstock.learner.lending import DeviceLender
from penstock.learner.policy.collective import TrainablePolicy


class Moving(TrainablePolicy):
    """Lists its moves, each with whether the learner uses the device then."""

    def __init__(self, device: SharedDevice) -> None:
        self.device = device
        self.moves: list[tuple[str, bool]] = []

    def offload(self) -> None:
        self.moves.append(("offload", self.device.in_use))

    def reload(self) -> None:
        self.moves.append(("reload", self.device.in_use))


def test_the_policy_leaves_before_the_device_is_lent_and_comes_back_after(tmp_path: Path) -> None:
    device, actor = SharedDevice(tmp_path, alone=True), SharedDevice(tmp_path, alone=False)
    phases = Phases()
    lender, policy = DeviceLender(device, phases, 10.0), Moving(device)
    lender.take()
    assert not actor.take(lambda: True)
    with lender.lending(policy):
        assert actor.take(lambda: True)
        actor.release()
    assert not actor.take(lambda: True)
    assert policy.moves == [("offload", True), ("reload", True)]
    assert phases.seconds("waiting for the device") > 0


def test_actors_that_do_not_leave_the_device_are_a_reason_to_end(tmp_path: Path) -> None:
    device, actor = SharedDevice(tmp_path, alone=True), SharedDevice(tmp_path, alone=False)
    lender = DeviceLender(device, Phases(), 0.1)
    assert actor.take(lambda: True)
    with pytest.raises(DeadlineExceeded, match=re.escape("for 0.1 s (RUN_PROGRESS_TIMEOUT_S)")):
        lender.take()
    assert not actor.is_wanted()


def test_an_error_in_a_wait_is_not_held_up_by_the_device(tmp_path: Path) -> None:
    device, actor = SharedDevice(tmp_path, alone=True), SharedDevice(tmp_path, alone=False)
    policy = Moving(device)
    lender = DeviceLender(device, Phases(), 600.0)
    lender.take()
    with pytest.raises(ZeroDivisionError), lender.lending(policy):
        1 / actor.take(lambda: True) - 1 / 0
    assert policy.moves == [("offload", True)]


def test_without_a_shared_device_nothing_moves(tmp_path: Path) -> None:
    device = SharedDevice(tmp_path, alone=True)
    policy = Moving(device)
    lender = DeviceLender(None, Phases(), 10.0)
    lender.take()
    with lender.lending(policy):
        pass
    assert policy.moves == []
