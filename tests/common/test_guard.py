"""How a guard finds the processes below another one, and outlives a signal to all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.common.guard import below
from tests.helpers import is_dead, wait_until

PROGRAM = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def grandchild() -> Iterator[psutil.Process]:
    """A process below a child of this process. The thread that started the child has ended."""
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(
        target=lambda: started.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE)
        )
    )
    thread.start()
    thread.join()
    child = psutil.Process(started[0].pid)
    wait_until(lambda: bool(child.children()), "the grandchild")
    yield child.children()[0]
    started[0].communicate(b"\n", timeout=60)


@pytest.mark.parametrize("listed", [True, False], ids=["children listed by the kernel", "not listed"])
def test_all_processes_below_are_found(listed, grandchild, monkeypatch):
    if listed and not os.path.exists("/proc/thread-self/children"):
        pytest.skip("this kernel does not list a thread's children")
    monkeypatch.setattr(os.path, "exists", lambda path: listed)
    assert {grandchild.pid, grandchild.ppid()} <= set(below(os.getpid()))
    assert set(below(grandchild.ppid())) == {grandchild.pid}
    assert below(grandchild.pid) == []


ROLE = """
import subprocess, sys
from penstock.common.guard import guard_children
guard_children()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
input()
"""


def test_a_signal_to_all_processes_leaves_the_guard_at_work():
    role = subprocess.Popen(
        [sys.executable, "-c", ROLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert role.stdout
    left = psutil.Process(int(role.stdout.readline()))
    (guard,) = [one for one in psutil.Process(role.pid).children() if one.pid != left.pid]
    wait_until(lambda: int(ignored(guard), 16) >> (signal.SIGTERM - 1) & 1, "the guard to be ready")
    guard.terminate()
    role.kill()
    role.communicate()
    wait_until(lambda: is_dead(left.pid), "what the role left to be killed")


def ignored(process: psutil.Process) -> str:
    """The signals that a process ignores, as the kernel shows them."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("SigIgn"))
