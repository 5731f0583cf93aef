"""One supervised process, in a session of its own. Its output is passed on line by line."""

import contextlib
import errno
import math
import os
import re
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.common.text import one_line

_LONGEST_LINE = 65_536
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Report:
    """An event of a run: a line of a child's output, its start, its end, or a delay (`run`)."""

    child: str
    kind: Literal["output", "started", "ended", "run"]
    text: str

    @property
    def line(self) -> str:
        """The text as one line that a terminal shows and does not execute."""
        return one_line(self.text)


@dataclass(frozen=True, slots=True)
class Service:
    """A command of a run. The run ends when an essential service cannot be kept running.

    The server's stage is stopped last. Later services in the list start only while `ready` returns True.
    """

    name: str
    command: tuple[str, ...]
    stage: int
    essential: bool = False
    ready: Callable[[], bool] | None = None


class Child:
    """One process of a service, which may be started many times. `wanted`: start it again when it ends.

    The name is that of `service` and `number`, such as "actor.2". `report` is called with each start and
    line of output. The process gets `variables` beside those of all processes. The supervisor sets
    `wanted`, `failures` (in a row), `due_at` (time of the next start) and `end_by` (time from which on
    it is killed, if it is not wanted); `lived_s` has the last process's seconds from start to end.
    Creating one starts nothing.
    """

    def __init__(
        self,
        service: Service,
        number: int,
        report: Callable[[Report], None],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.service = service
        self.name = f"{service.name}.{number}"
        self.wanted = True
        self.failures = 0
        self.due_at = 0.0
        self.end_by = math.inf
        self.lived_s = 0.0
        self._report, self._variables = report, dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._started_at, self._told = 0.0, False

    @property
    def running(self) -> bool:
        """Whether a process was started whose end `reap` has not returned yet."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id, or None unless `running`. Safe in any thread."""
        process = self._process
        return process.pid if process is not None else None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process in a session of its own with the variables `environment`; report its start.

        Its own variables win; it has no standard input. A thread reports each line of its output and
        errors. Raise OSError if the start fails, such as BlockingIOError without room for that thread.
        """
        self._process = subprocess.Popen(
            self.service.command, env={**environment, **self._variables}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started_at, self._told = time.monotonic(), False
        self._report(Report(self.name, "started", f"Started as process {self._process.pid}."))
        self._reader = threading.Thread(target=self._report_output, args=(self._process,), daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # a thread counts as a process for the machine's limit
            self.kill()
            self._process.wait()
            self._process = self._reader = None
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    def reap(self) -> int | None:
        """Return the exit code (-9: killed by signal 9) once the process has ended, else None.

        The code is returned one time, later calls return None, as without a process. When it is
        returned, the rest of the process's group is killed, `lived_s` is set, and the output's end is
        waited for, up to 0.5 s.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self.kill()
        if self._reader is not None:
            self._reader.join(timeout=0.5)  # a process in another session may keep the pipe open
        self.lived_s = time.monotonic() - self._started_at
        self._process = None
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it ends its own children. Without a process, do nothing.

        Each process gets it once: torchrun would not wait for its ranks after a second one. The end is
        not waited for.
        A process stopped by SIGSTOP is continued, because it would not handle SIGTERM.
        """
        if self._process is not None:
            if not self._told:
                self._process.terminate()
            self._told = True
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the process and its group. Do nothing if there is none, or no right to it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _report_output(self, process: subprocess.Popen[bytes]) -> None:
        """Report each line of the output of `process`, as kind "output", until the output ends.

        A line over 64 KiB is reported in parts. Then close the pipe. This runs in a thread of its own.
        An error of a receiver is printed, and the reading goes on: a process whose output nobody reads
        would end by SIGPIPE.
        """
        assert process.stdout is not None
        with process.stdout:
            while line := process.stdout.readline(_LONGEST_LINE):
                try:
                    self._report(Report(self.name, "output", _shown(line)))
                except Exception:  # of a receiver: this thread must read on
                    traceback.print_exc()


def _shown(line: bytes) -> str:
    """Return a line for a terminal: without line end and colours, unprintable characters escaped.

    Bytes that are no UTF-8 are replaced by U+FFFD.
    """
    text = line.decode(errors="replace").rstrip("\r\n")
    return one_line(_COLOUR.sub("", text))


def describe_end(code: int) -> str:
    """Return how a process with this exit code ended; a negative one is the number of a signal.

    Examples: `Ended with exit code 70`, `Killed by SIGKILL` for -9, `Killed by signal 99` for an unknown
    one.
    """
    names = {number.value: number.name for number in signal.Signals}
    return (
        f"Ended with exit code {code}"
        if code >= 0
        else f"Killed by {names.get(-code, f'signal {-code}')}"
    )
