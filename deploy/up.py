"""`penstock up`: a whole run on this machine, queue server included, alive until it is over."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dotenv import dotenv_values

from penstock.common.broker.local_server import answers, prepare
from penstock.common.config.command import RunCommand, load
from penstock.common.errors import ConfigError
from penstock.common.files.lock import hold_lock
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.deploy.child import Report, Service
from penstock.deploy.procfile import read_procfile
from penstock.deploy.supervisor import (
    LEARNER,
    LEARNER_STAGE,
    SERVER_STAGE,
    WORKER_STAGE,
    Limits,
    Supervisor,
)

_COLOURS = (36, 33, 32, 35, 34, 31)


def main(arguments: list[str]) -> int:
    """Run until the run is over; returns the learner's exit code. Raises ConfigError."""
    return run_up(arguments)


def run_up(arguments: list[str], report: Callable[[Report], None] | None = None) -> int:
    """`penstock up` for callers that read the reports themselves, in any thread.

    In the main thread the first SIGINT or SIGTERM ends the run in order, the second one at once.
    """
    options = parse_arguments(arguments)
    commands = read_procfile(options.procfile)
    counts = _counts(options, commands)
    services = role_services(commands)
    # Checks the names of all variables too, before anything starts.
    settings = load(
        RunCommand, "penstock up", ["--env-file", options.env_file] if options.env_file else []
    )
    with hold_lock(settings.run.folder.up_lock, "`penstock up`"):
        if not settings.redis_url:
            services = [queue_service(settings.run.folder), *services]
        report = report or Printer([*counts, "queue"])
        limits = Limits(ready_s=settings.run.progress_timeout_s)
        guard_children()  # `up` killed with -9 takes its children along
        supervisor = Supervisor(services, child_environment(options.env_file), report, counts, limits)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: supervisor.stop())
        return supervisor.run()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line of `penstock up`; what roles need comes from variables."""
    parser = argparse.ArgumentParser(
        prog="penstock up",
        description="Run learner, actors and rewarders of one run, and a queue server unless "
        "REDIS_URL is set. What dies is started again. Settings are variables: see --env-file "
        "and `learner --help`.",
    )
    parser.add_argument("--procfile", type=Path, help="processes to run (default: ./Procfile)")
    parser.add_argument("--env-file", help="variables for all; the process environment wins")
    parser.add_argument("--actors", type=int, metavar="N", help="actors to run (default: 1)")
    parser.add_argument("--rewarders", type=int, metavar="N", help="rewarders to run (default: 1)")
    return parser.parse_args(arguments)


def role_services(commands: Mapping[str, str]) -> list[Service]:
    """Services for a Procfile's commands.

    `exec env` puts the command in the shell's place, so that signals reach it and nothing else.
    """
    return [
        Service(
            name,
            ("/bin/sh", "-c", f"exec env {command}"),
            stage=LEARNER_STAGE if name == LEARNER else WORKER_STAGE,
            essential=name == LEARNER,
        )
        for name, command in commands.items()
    ]


def queue_service(run_folder: RunFolder) -> Service:
    """The run's own queue server; raises ConfigError."""
    plan = prepare(run_folder)
    return Service("queue", plan.command, SERVER_STAGE, True, partial(answers, plan.url))


def child_environment(env_file: str | None) -> dict[str, str]:
    """Variables of the file, then of this process; the commands of this installation in PATH."""
    from_file = dotenv_values(env_file) if env_file else {}
    found = {name: value for name, value in from_file.items() if value is not None}
    found |= os.environ
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    found["PYTHONUNBUFFERED"] = "1"
    return found


def _counts(options: argparse.Namespace, commands: Mapping[str, str]) -> dict[str, int]:
    counts = dict.fromkeys(commands, 1)
    for flag, name in (("actors", "actor"), ("rewarders", "rewarder")):
        wanted = getattr(options, flag)
        if wanted is None:
            continue
        if wanted < 0:
            raise ConfigError(f"--{flag} {wanted}: expected 0 or more")
        if name not in commands:
            raise ConfigError(f"--{flag} {wanted}: the Procfile has no line `{name}: command`")
        counts[name] = wanted
    return counts


class Printer:
    """Prints reports as `actor.1 | line`, one colour per service on a terminal."""

    def __init__(self, names: list[str]) -> None:
        self._colours = {name: _COLOURS[position % len(_COLOURS)] for position, name in enumerate(names)}
        self._width = max(map(len, names)) + 2
        self._lock = threading.Lock()
        self._broken = False

    def __call__(self, report: Report) -> None:
        """Print one report; a reader of ours that went away must not stop the run."""
        prefix = f"{report.child:<{self._width}} | "
        if sys.stdout.isatty():
            prefix = f"\x1b[{self._colours[report.child.rpartition('.')[0]]}m{prefix}\x1b[0m"
        mark = "" if report.kind == "output" else "-- "
        with self._lock:
            try:
                if not self._broken:
                    print(f"{prefix}{mark}{report.text}", flush=True)
            except OSError:
                self._broken = True
