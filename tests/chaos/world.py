"""A whole run under a supervisor in this process: real learner, rewarders and server, fake engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from penstock.common.broker.local_server import started_server
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.deploy.child import Child, Report, Service
from penstock.deploy.procfile import read_procfile
from penstock.deploy.supervisor import LEARNER, Limits, Supervisor
from penstock.deploy.up import child_environment, queue_service, role_services
from tests.e2e.site import FAKE_PROCFILE, Site
from tests.helpers import LossyProxy

COUNTS = {"learner": 1, "actor": 4, "rewarder": 2}
_LIMITS = Limits(first_backoff_s=0.2, longest_backoff_s=0.5, settled_s=0.0, leave_s=30.0, failures=10**6)


class World:
    """A run in a folder, its processes' lines in `roles.log`.

    `preload` is a library for the server alone; with `lose_every` the roles speak to it through a
    network that loses each reply of that number. `talks` is that of Site.
    """

    def __init__(
        self,
        folder: Path,
        *,
        preload: Path | None = None,
        lose_every: int = 0,
        talks: bool = False,
        **variables: str,
    ) -> None:
        self.site = Site(
            folder, FAKE_PROCFILE, talks=talks,
            RUN_MAX_ATTEMPTS="8", RUN_CONNECT_TIMEOUT_S="60", RUN_PROGRESS_TIMEOUT_S="120",
            OMP_NUM_THREADS="1", **{"RUN_LEASE_S": "3", "FAKE_TOKEN_DELAY_S": "0.2"} | variables,
        )  # fmt: skip
        self.run_folder = self.site.run_folder
        self.exit_code: int | None = None
        self.network: LossyProxy | None = None
        self._preload = preload
        self._lose_every = lose_every
        self._writing = threading.Lock()
        self._log: TextIO | None = None
        self._supervisor: Supervisor | None = None

    @property
    def children(self) -> Sequence[Child]:
        """The supervised processes."""
        return self._supervisor.children if self._supervisor else ()

    @property
    def training(self) -> bool:
        """Whether the learner is still wanted."""
        return any(child.wanted for child in self.children if child.service.name == LEARNER)

    def run(self, beside: Callable[[], None], limit_s: float) -> float:
        """Run to the end, or for `limit_s`, with `beside` in a thread; returns the seconds it took.

        Must be called in the main thread, once.
        """
        guard_children()
        began = time.monotonic()
        with ExitStack() as stack:
            self._log = stack.enter_context((self.site.folder / "roles.log").open("w"))
            server = queue_service(RunFolder(self.run_folder))
            if self._lose_every:
                url = started_server(RunFolder(self.run_folder))
                self.network = stack.enter_context(LossyProxy(url, self._lose_every))
            self._supervisor = self._make_supervisor(server)
            limit = threading.Timer(limit_s, self._supervisor.stop)
            thread = threading.Thread(target=beside, name="killer", daemon=True)
            limit.start()
            thread.start()
            try:
                self.exit_code = self._supervisor.run()
            finally:
                limit.cancel()
                for child in self.children:
                    child.wanted = False
                thread.join(30)
        return time.monotonic() - began

    def _make_supervisor(self, server: Service) -> Supervisor:
        if self._preload:
            command = ("/usr/bin/env", f"LD_PRELOAD={self._preload}", *server.command)
            server = replace(server, command=command)
        roles = role_services(read_procfile(self.site.folder / "Procfile"))
        # A role starts more often here than anywhere: let Python keep what it compiled.
        environment = child_environment(None) | self.site.variables | {"PYTHONDONTWRITEBYTECODE": ""}
        if self.network:
            environment["REDIS_URL"] = self.network.url
        return Supervisor([server, *roles], environment, self._write, COUNTS, _LIMITS)

    def _write(self, report: Report) -> None:
        with self._writing:
            if self._log is not None and not self._log.closed:
                mark = "" if report.kind == "output" else "-- "
                self._log.write(f"{time.time():.2f} {report.child:<12}| {mark}{report.text}\n")
