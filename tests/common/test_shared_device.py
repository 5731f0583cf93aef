"""A device that the learner and the actors of a host use by turns."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.common.errors import ConfigError
from penstock.common.shared_device import SharedDevice
from tests.helpers import wait_until

HOLDER = """
import sys, time
from pathlib import Path
from penstock.common.shared_device import SharedDevice
assert SharedDevice(Path(sys.argv[1]), alone=True).take(lambda: True)
print("taken", flush=True)
time.sleep(600)
"""


def learner_of(folder: Path) -> SharedDevice:
    return SharedDevice(folder, alone=True)


def actor_of(folder: Path) -> SharedDevice:
    return SharedDevice(folder, alone=False)


def take_aside(device: SharedDevice) -> threading.Thread:
    """Take the device in a thread, and return once that one waits or has it."""
    polled = threading.Event()
    thread = threading.Thread(target=device.take, args=(lambda: bool(polled.set()),), daemon=True)
    thread.start()
    wait_until(lambda: polled.is_set() or device.in_use, "the wait for the device")
    return thread


def test_actors_use_the_device_together_and_the_learner_alone(tmp_path: Path) -> None:
    learner, first, second = learner_of(tmp_path), actor_of(tmp_path), actor_of(tmp_path)
    assert first.take(lambda: True)
    assert second.take(lambda: True)
    assert not learner.take(lambda: True)
    first.release()
    assert not learner.take(lambda: True)
    second.release()
    assert learner.take(lambda: True)
    assert learner.in_use
    assert not first.take(lambda: True)
    assert not first.in_use


def test_it_is_wanted_while_somebody_waits_and_a_later_one_comes_after(tmp_path: Path) -> None:
    learner, first, later = learner_of(tmp_path), actor_of(tmp_path), actor_of(tmp_path)
    assert first.take(lambda: True)
    assert not first.is_wanted()
    waiting = take_aside(learner)
    assert first.is_wanted()
    assert not later.take(lambda: True)  # although actors use the device together
    first.release()
    waiting.join(30)
    assert learner.in_use
    assert not learner.is_wanted()


def test_who_gives_up_is_not_waited_for(tmp_path: Path) -> None:
    learner, actor = learner_of(tmp_path), actor_of(tmp_path)
    assert learner.take(lambda: True)
    assert not actor.take(lambda: True)
    assert not learner.is_wanted()
    with pytest.raises(KeyError):
        actor.take(lambda: {}["an error"])
    assert not learner.is_wanted()


def test_a_killed_process_leaves_the_device(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "taken\n"
    actor = actor_of(tmp_path)
    assert not actor.take(lambda: True)
    holder.kill()
    holder.wait()
    assert actor.take(lambda: True)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        learner_of(tmp_path / "file")
