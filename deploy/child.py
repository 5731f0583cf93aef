"""One supervised process: started in a session of its own, its lines passed on, its end noticed."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Report:
    """Something that happened: a line of a child's output, or what the supervisor did about it."""

    child: str
    kind: Literal["output", "started", "ended", "run"]
    text: str


@dataclass(frozen=True, slots=True)
class Service:
    """What to run. Stages are stopped in their order; without an essential service the run ends.

    Services that come later are started only while `ready` holds.
    """

    name: str
    command: tuple[str, ...]
    stage: int
    essential: bool = False
    ready: Callable[[], bool] | None = None


class Child:
    """A service's process, again after it died. `wanted` says whether it is to be started again."""

    def __init__(self, service: Service, number: int, report: Callable[[Report], None]) -> None:
        self.service = service
        self.name = f"{service.name}.{number}"
        self.wanted = True
        self.failures = 0
        self.due_at = 0.0
        self.lived_s = 0.0
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._started_at = 0.0

    @property
    def running(self) -> bool:
        """Whether there is a process whose end has not been noticed."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id, or None while it does not run; safe in any thread."""
        process = self._process
        return process.pid if process is not None else None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process."""
        self._process = subprocess.Popen(
            self.service.command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started_at = time.monotonic()
        self._report(Report(self.name, "started", f"started, process {self._process.pid}"))
        self._reader = threading.Thread(target=self._pass_lines_on, args=(self._process,), daemon=True)
        self._reader.start()

    def reap(self) -> int | None:
        """Exit code (negative: the signal) if the process has ended since; kills what it left."""
        code = self._process.poll() if self._process is not None else None
        if self._process is None or code is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._reader is not None:
            self._reader.join(timeout=0.5)  # a guard in another session may hold the pipe longer
        self.lived_s = time.monotonic() - self._started_at
        self._process = None
        return code

    def terminate(self) -> None:
        """Ask the process to end; only itself, it knows what to do about its children.

        One that was stopped is continued, or it would not hear.
        """
        if self._process is not None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process and its group as kill -9 does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _pass_lines_on(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._report(Report(self.name, "output", line.decode(errors="replace").rstrip("\r\n")))


def describe_end(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
