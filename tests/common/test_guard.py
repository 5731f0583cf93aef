"""How a guard finds the processes below another one. That it kills them is shown in deploy and e2e."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from penstock.common.guard import below
from tests.helpers import wait_until

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
