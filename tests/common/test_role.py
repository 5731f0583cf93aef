"""What the signals do that end a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WORKER = """
import sys
from penstock.common.role import stop_on_signals
stopping = stop_on_signals()
print("working", flush=True)
stopping.wait()
print("stopping", flush=True)
for line in sys.stdin:  # its work is handed over meanwhile
    print(line, end="", flush=True)
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_ctrl_c_hurries_a_process_that_is_stopping(first: signal.Signals) -> None:
    """A machine that ends sends several signals, of which each is to leave time for the work."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "working\n"
        process.send_signal(first)
        assert process.stdout.readline() == "stopping\n"
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
            process.stdin.write(f"after {number.name}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"after {number.name}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
