"""A whole run whose roles reach the queue server over faulty networks, and whose disks can fail."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.deploy.child import Child, Report
from penstock.deploy.supervisor import Limits, Supervisor
from penstock.deploy.up import child_environment, role_services
from tests.e2e.site import FAKE_PROCFILE, Site
from tests.faults.host import FaultyHost, build_faulty_host
from tests.faults.proxy import FaultProxy

LEARNER, ACTOR, REWARDER, SERVER = "learner", "actor", "rewarder", "server"
ROLES = (LEARNER, ACTOR, REWARDER)
COUNTS = {LEARNER: 1, ACTOR: 2, REWARDER: 2}
_COMMANDS = dict(line.split(": ") for line in FAKE_PROCFILE.splitlines())
_LIMITS = Limits(first_backoff_s=0.2, longest_backoff_s=0.5, settled_s=0.0, leave_s=60.0, failures=10**6)
_ENDLESS = "1000000"
_LAST_STEPS = 3


class Server(LocalServer):
    """A queue server with libraries of the test; `pid` is that of its process."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        super().__init__(folder)
        words = [f"{name}={value}" for name, value in variables.items()]
        self._command = ("/usr/bin/env", *words, *self._command)
        self._data = RunFolder(folder).server / "appendonlydir"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def empty(self) -> None:
        """Delete the data of a server that was killed."""
        shutil.rmtree(self._data)


class World:
    """A run in a folder; its processes' lines are in `roles.log`.

    `lease_s` is RUN_LEASE_S. `ends` lists each unplanned end of a process: time, process, how.
    `exits` lists the exit codes of runs that ended before they were to.
    """

    def __init__(self, folder: Path, seed: int, lease_s: float) -> None:
        self.folder = folder
        self.lease_s = lease_s
        self.random = random.Random(seed)
        self.site = Site(
            folder, FAKE_PROCFILE, RUN_LEASE_S=f"{lease_s:g}", RUN_CONNECT_TIMEOUT_S="240",
            RUN_SERVER_TIMEOUT_S="240", RUN_PROGRESS_TIMEOUT_S="300", RUN_DISK_TIMEOUT_S="300",
            OMP_NUM_THREADS="1", FAKE_TOKEN_DELAY_S="0.05", LEARNER_EVAL_STEPS="40",
            LEARNER_SAVE_STEPS="10", LEARNER_SEED=str(seed),
        )  # fmt: skip
        self.run_folder = self.site.run_folder
        self.ends: list[tuple[float, str, str]] = []
        self.exits: list[int] = []
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.hosts: dict[str, FaultyHost] = {}
        self._writing = threading.Lock()
        self._supervisor: Supervisor | None = None
        if library := build_faulty_host(folder):
            places = dict.fromkeys(ROLES, self.run_folder) | {SERVER: folder / "queue-server"}
            self.hosts = {name: FaultyHost(library, name, place) for name, place in places.items()}

    @property
    def children(self) -> Sequence[Child]:
        """The supervised processes."""
        return self._supervisor.children if self._supervisor else ()

    def pid_of(self, role: str) -> int | None:
        """The process id of the server, or of one process of a role, None if none runs."""
        if role == SERVER:
            return self.server.pid
        pids = [child.pid for child in self.children if child.service.name == role and child.pid]
        return self.random.choice(pids) if pids else None

    def step(self) -> int:
        """The newest step in metrics.jsonl, or 0."""
        path = self.run_folder / "metrics.jsonl"
        if not path.is_file():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = [line for line in file.read().splitlines()[-2:] if line.startswith(b"{")]
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue
        return 0

    def run(self, trial: Callable[[], None]) -> int:
        """Run with `trial` in a thread, then to the end; return the last exit code. In the main thread.

        A run that ends while the trial goes on is noted in `exits`, and started again.
        """
        guard_children()
        with ExitStack() as stack:
            self._log = stack.enter_context((self.folder / "roles.log").open("w"))
            self.server = stack.enter_context(
                Server(self.folder / "queue-server", self._variables(SERVER))
            )
            self.admin = Connection(self.server.url, 30, 30)
            self.proxies = {
                role: stack.enter_context(FaultProxy(self.server.url, number))
                for number, role in enumerate(ROLES)
            }
            thread = threading.Thread(target=self._try, args=(trial,), name="trial", daemon=True)
            thread.start()
            while not self.over.is_set():
                code = self._supervise(_ENDLESS)
                if not self.over.is_set():
                    self.exits.append(code)
                    self.say(f"the run ended with exit code {code}")
            thread.join()
            if self.error is not None:
                raise self.error
            return self._supervise(str(self.step() + _LAST_STEPS))

    def _try(self, trial: Callable[[], None]) -> None:
        try:
            trial()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.over.set()
            if self._supervisor:
                self._supervisor.stop()

    def _supervise(self, steps: str) -> int:
        environment = child_environment(None) | self.site.variables
        environment |= {"LEARNER_MAX_STEPS": steps, "PYTHONDONTWRITEBYTECODE": ""}
        roles = role_services({role: self._command(role) for role in ROLES})
        self._supervisor = Supervisor(roles, environment, self._report, COUNTS, _LIMITS)
        if steps == _ENDLESS and self.over.is_set():
            return 0
        return self._supervisor.run()

    def _command(self, role: str) -> str:
        variables = {"REDIS_URL": self.proxies[role].url} | self._variables(role)
        return " ".join([*(f"{name}={value}" for name, value in variables.items()), _COMMANDS[role]])

    def _variables(self, name: str) -> dict[str, str]:
        return self.hosts[name].variables if name in self.hosts else {}

    def _report(self, report: Report) -> None:
        if report.kind == "ended" and not self.over.is_set():
            self.ends.append((time.monotonic(), report.child, report.text))
        mark = "" if report.kind == "output" else "-- "
        self.say(f"{report.child:<12}| {mark}{report.text}")

    def say(self, text: str) -> None:
        """Write a line to roles.log."""
        with self._writing:
            if not self._log.closed:
                self._log.write(f"{time.strftime('%H:%M:%S')}.{time.time() % 1 * 100:02.0f} {text}\n")
                self._log.flush()
