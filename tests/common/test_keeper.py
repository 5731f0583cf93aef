"""What a keeper spares and what it kills."""

import os
import socket
import threading

import pytest
from structlog.testing import capture_logs

from penstock.common.sandbox import frames, keeper
from penstock.common.sandbox.handle import Handle
from penstock.common.sandbox.output import OutputLog

OWN, PARENT, ORPHAN = 10, 11, 12


class Processes:
    """A process whose child becomes the keeper's own while the list of processes is being made."""

    def __init__(self) -> None:
        self.living = {OWN, PARENT, ORPHAN}
        self.lists = [[OWN, PARENT], [OWN, PARENT]]
        """What is found while PARENT lives, and again while it ends: the orphan is in neither."""

    def below(self, pid: int) -> list[int]:
        return self.lists.pop(0) if self.lists else [OWN, PARENT, ORPHAN]

    def kill(self, pid: int, signal: int) -> None:
        self.living.discard(pid)


def test_an_orphan_that_two_lists_have_missed_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    monkeypatch.setattr(keeper, "below", processes.below)
    monkeypatch.setattr(keeper, "_is_zombie", lambda pid: pid not in processes.living)
    monkeypatch.setattr(os, "kill", processes.kill)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = threading.Thread(target=keeper.Keeper(theirs, OWN, -1).serve)
        serving.start()
        frames.send(ours, "sweep")
        assert frames.receive(ours) == {"clean": True}
        assert processes.living == {OWN}
        frames.send(ours, "end")
        serving.join(60)
    assert not serving.is_alive()


def test_no_call_begins_before_a_slow_keeper_knows_what_to_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_list, events = threading.Event(), list[str]()

    def below(pid: int) -> list[int]:
        assert may_list.wait(60)
        events.append("listed")
        return [OWN]

    monkeypatch.setattr(keeper, "below", below)
    ours, theirs = socket.socketpair()
    control, body = socket.socketpair()
    output, printed = os.pipe()
    with ours, theirs, control, body, open(output), open(printed, "w"):
        handle = Handle(ours, control, output, OutputLog(), calls=1, sweeps=True)

        def settle() -> None:
            handle.settled()
            events.append("may call")

        serving = threading.Thread(target=keeper.Keeper(theirs, OWN, -1).serve)
        settling = threading.Thread(target=settle)
        serving.start()
        settling.start()
        settling.join(0.3)
        may_list.set()
        settling.join(60)
        assert events == ["listed", "may call"]
        theirs.shutdown(socket.SHUT_RDWR)
        serving.join(60)
    assert not serving.is_alive()


class Meeting:
    """A lock that two threads come to before one of them gets it."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._both.wait(60)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_two_threads_that_print_too_much_are_warned_of_once() -> None:
    output = OutputLog()
    vars(output)["_lock"] = Meeting()
    threads = [threading.Thread(target=output.add, args=[b"line\n" * 61]) for _ in range(2)]
    with capture_logs() as logs:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [entry["log_level"] for entry in logs] == ["info"] * 60 + ["warning"]
