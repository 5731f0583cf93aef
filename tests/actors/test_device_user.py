"""An actor whose engine sleeps while the learner uses the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from penstock.common.shared_device import SharedDevice
from penstock.common.wire.codec import encode
from penstock.common.wire.messages import Version
from tests.actors.conftest import ActorThread, Run
from tests.fake_engine import FakeEngine
from tests.helpers import wait_until

StartActor = Callable[..., ActorThread]


@pytest.fixture
def learner(a_run: Run) -> Iterator[SharedDevice]:
    """The device as the learner of a run that shares it sees it; the learner uses it at first."""
    a_run.contract = replace(a_run.contract, share_device=True)
    a_run.queue.publish_contract(encode(a_run.contract))
    device = SharedDevice(a_run.run_folder.device_locks, alone=True)
    assert device.take(lambda: True)
    yield device
    device.release()


def take(learner: SharedDevice) -> None:
    """Take the device for the learner, which an actor leaves when asked to."""
    wait_until(lambda: learner.take(lambda: False), "the device")


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_samples_while_the_learner_lends_the_device_and_sleeps_meanwhile(
    a_run: Run, learner: SharedDevice, start_actor: StartActor, level: int
) -> None:
    engine = FakeEngine(device=str(next(a_run.run_folder.device_locks.glob("*.device"))))
    actor = start_actor(engine, sleep_level=level)
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(4)))
    wait_until(learner.is_wanted, "an actor that waits for the device")
    assert not engine.taken
    for step in range(1, 4):
        learner.release()
        wait_until(lambda: len(a_run.groups()) == 4 * step, "the groups of a step")  # noqa: B023
        take(learner)
        a_run.announce(step)
        tickets = [a_run.ticket(number, min_step=step) for number in range(4 * step, 4 * step + 4)]
        a_run.issue(*tickets)
    wait_until(learner.is_wanted, "an actor that waits for the device")
    assert engine.naps == [f"sleep {level}", "wake"] * 2 + [f"sleep {level}"]
    assert engine.taken == [Version(1, step) for step in range(3)]
    assert len(a_run.groups()) == 12
    assert actor.error is None


def test_what_runs_is_finished_before_the_learner_gets_the_device(
    a_run: Run, learner: SharedDevice, start_actor: StartActor
) -> None:
    engine = FakeEngine(token_delay_s=0.1)
    start_actor(engine)
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(2)))
    learner.release()
    wait_until(lambda: len(engine.requests) == 2, "two requests")
    a_run.issue(a_run.ticket(2))  # may come too late for this time
    take(learner)
    assert set(a_run.groups()) == {request.split("/")[0] for request in engine.requests}
    assert engine.naps == ["sleep 1"]
    learner.release()
    wait_until(lambda: len(a_run.groups()) == 3, "the third group")


def test_an_actor_that_is_stopped_does_not_wait_for_the_device(
    a_run: Run, learner: SharedDevice, start_actor: StartActor
) -> None:
    early = start_actor(FakeEngine())
    wait_until(learner.is_wanted, "an actor that waits for the device")
    early.stop()
    late = start_actor(FakeEngine())
    learner.release()
    a_run.announce(0)
    wait_until(lambda: late.engine.taken, "the first weights")
    take(learner)
    late.stop()
    assert (early.error, late.error) == (None, None)
    assert late.engine.naps == ["sleep 1"]


def test_an_actor_that_joins_again_leaves_the_device_to_the_learner(
    a_run: Run, learner: SharedDevice, start_actor: StartActor
) -> None:
    actor = start_actor(FakeEngine())
    learner.release()
    a_run.announce(0)
    wait_until(lambda: actor.engine.taken, "the first weights")
    a_run.connection.execute("DEL", a_run.keys.contract)
    take(learner)  # before the contract is published again
    assert actor.engine.naps == ["sleep 1"]
    a_run.queue.publish_contract(encode(a_run.contract))
    learner.release()
    a_run.issue(a_run.ticket(0))
    wait_until(lambda: len(a_run.groups()) == 1, "a group")
    assert actor.engine.naps == ["sleep 1", "wake"]
    assert actor.error is None
