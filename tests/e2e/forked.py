"""Runs whose processes are forked from one that has imported everything: `penstock up` and the roles.

A learner's start costs six seconds of processor time for its imports alone. A process that is forked in
its place differs in nothing that these tests are about: it is a child of `penstock up` in a session of
its own, with its own pipe, environment, guard and exit code.
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import Pipe, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from tests.e2e.site import ROOT, Site

_ROLES = {
    "learner": "penstock.learner",
    "rewarder": "penstock.rewarders",
    "python -m tests.actors.fake_actor": "tests.actors.fake_actor",
}
"""The module of each command of a Procfile that is forked."""

_START = re.compile("^exec env (OMP_NUM_THREADS=[0-9]+ )?")

_IMPORTED = (
    __name__, "penstock.deploy.up", "penstock.learner.start", "penstock.learner.replay", "datasets",
    "penstock.actors.loop", "penstock.rewarders.loop", "encodings.idna", "stringprep",
)  # fmt: skip
"""With all modules that a thread of `penstock up` would import first: a fork during an import leaves
the module locked for good in the child. Host names are encoded by encodings.idna."""

_SERVER = forkserver.ForkServer()  # another than that of the sandboxes, which imports less
_SERVER.set_forkserver_preload(list(_IMPORTED))


class ForkingPopen(subprocess.Popen[Any]):
    """In place of Popen: a child that would run a role, or `python -m module`, is forked only."""

    def __init__(self, command: Sequence[Any], **options: Any) -> None:
        words = list(map(str, command))
        if words[0] == "/bin/sh" and (module := _ROLES.get(_START.sub("", words[-1]))):
            options["preexec_fn"] = partial(become, module, [], options.get("env"))
        elif words[:2] == [sys.executable, "-m"]:
            options["preexec_fn"] = partial(become, words[2], words[3:], options.get("env"))
        super().__init__(command, **options)


def become(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None) -> NoReturn:
    """Be `python -m module` for the rest of this process."""
    code: Any = 1
    try:
        # An exec would close all files but three. The parent's guard must not be kept waiting by a copy
        # of its pipe; and no object may later close one of the numbers, which then is another file's.
        gc.freeze()  # a collection would copy all objects of the parent
        subprocess._active.clear()  # type: ignore[attr-defined]
        os.closerange(3, 4096)
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout, sys.stderr = (os.fdopen(file, "w", buffering=1, closefd=False) for file in (1, 2))
        sys.argv = [module, *arguments]
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:  # whatever it is, a forked process must not return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _begin(
    module: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Connection
) -> None:
    """Be `python -m module`, in a session of its own."""
    os.setsid()
    os.chdir(cwd)
    os.dup2(output.fileno(), 1)
    os.dup2(1, 2)
    become(module, arguments, environment)


class Forked:
    """A forked `python -m module`, with as much of a Popen as the tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        output: Connection | None = None,
    ) -> None:
        reader, writer = Pipe(duplex=False)
        writer = output or writer
        given = (module, arguments, cwd, dict(environment), writer)
        self._process = get_context("forkserver").Process(target=_begin, args=given)
        with patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
            self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reader.fileno()))  # with standard error

    def read(self, timeout: float) -> str:
        """All output to the end; a process that does not end in time is killed."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            return self.stdout.read()
        finally:
            timer.cancel()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code; raises TimeoutExpired if there is none in time."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


class ForkedSite(Site):
    """A site whose processes are forked."""

    def launch(self, arguments: list[str]) -> Forked:
        return Forked("penstock.deploy", arguments, self.cwd, os.environ | self.variables)

    def replay(self, *arguments: str) -> dict[str, Any]:
        command = ["replay", "--json", str(self.run_folder), *arguments]
        process = Forked("penstock.deploy", command, ROOT, os.environ | {"OMP_NUM_THREADS": "1"})
        output = process.read(600)
        assert process.wait(60) == 0, output
        return json.loads(output.splitlines()[-1])
