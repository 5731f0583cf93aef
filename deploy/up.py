"""`penstock up`: a whole run on this machine, queue server included, until the run's end."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from pydantic import Field
from pydantic_settings import CliToggleFlag
from rich.console import Console

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import (
    Listening,
    check_port,
    hash_password,
    prepare,
    remove_old_socket,
    started_server,
)
from penstock.common.broker.private_socket import answers
from penstock.common.broker.server_binary import find_binary
from penstock.common.config.command import Command, build, drop_output, escape_missing_characters
from penstock.common.config.redis_url import parse_host
from penstock.common.config.role_command import ActorCommand, LearnerCommand, RunCommand
from penstock.common.config.secret_file import read_secret
from penstock.common.config.variables import UP_ENV_FILE, EnvFile, read_environment
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.atomic import make_folder
from penstock.common.files.lock import hold_lock
from penstock.common.files.modes import umask
from penstock.common.files.reading import at_home
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.common.log import is_coloured, log_errors_alone
from penstock.common.monitor.sync_watch import SyncWatch
from penstock.common.monitor.watch import RunWatch
from penstock.common.role import ending_signals
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import Contract
from penstock.deploy.child import Report, Service
from penstock.deploy.devices import ACTOR, LEARNER, DevicePlan, find_gpus, threads_of_each
from penstock.deploy.earlier_run import began_from, begin_from, check_whole, find_checkpoint, move_away
from penstock.deploy.procfile import read_procfile
from penstock.deploy.scaling.link import ScaleLink
from penstock.deploy.showing.ending import (
    REPEAT,
    REPEAT_WITHOUT,
    LastWords,
    print_ending,
    steps_of_complete_run,
)
from penstock.deploy.showing.live import STOPPING, LiveScreen, ProgressPrinter, Show, is_live
from penstock.deploy.showing.logs import LogFiles
from penstock.deploy.supervisor import LEARNER_STAGE, SERVER_STAGE, WORKER_STAGE, Limits, Supervisor

_COLOURS = (36, 33, 32, 35, 34, 31)


_LOOK_S = 1.0
"""The time that a look at the run, for people, may wait for the queue server."""

_LINGER_S = 5.0
"""The time that processes of other machines have to see the run's end on the queue server."""


class Up(Command):
    """Run learner, actors, rewarders and a queue server (unless REDIS_URL is set) until the run ends.

    Processes that die are started again. Settings are variables: see --env-file and `learner --help`.
    """

    procfile: Path | None = Field(None, description="processes to run; by default ./Procfile")
    env_file: EnvFile | None = Field(None, description="variables of all processes; this one's win")
    actors: int | None = Field(None, ge=0, description="actors to run; by default 1")
    rewarders: int | None = Field(None, ge=0, description="rewarders to run; by default 1")
    plain: CliToggleFlag[bool] = Field(
        False, description="print all lines of the processes, also in a terminal"
    )
    listen: str = Field(
        "", description="HOST:PORT where the queue server also takes other machines' connections"
    )
    only: str = Field(
        "", description="roles to run here, as actor,rewarder, for a run whose server is REDIS_URL"
    )
    devices: str = Field(
        "",
        description="GPUs by process: learner=0-5,actor.1=6,actor.2=7; else actors take what they need",
    )
    dry_run: CliToggleFlag[bool] = Field(
        False, description="print which process would get which GPUs and threads, and end"
    )

    def execute(self) -> int:
        """Run until the run's end, show it, return the exit code. Raise what `run` raises.

        In a terminal there is a live screen, else all lines and one on the run every 30 s. All lines are
        in logs/ of the run's folder. At the end the result is printed, or what failed. With --dry-run
        only print a line for each process, and return 0.
        """
        if self.dry_run:
            plan, threads = self._plan()
            print(plan.describe(threads))
            return 0
        log_errors_alone()
        return self.run()

    def run(
        self,
        report: Callable[[Report], None] | None = None,
        beside: Callable[[Report], None] | None = None,
    ) -> int:
        """Run to the run's end, in any thread; return the exit code of learner or failed process.

        `report` takes every line and event; None: see `execute`. With `beside`, which takes them too,
        nothing is printed at the end. In the main thread the first SIGINT, SIGTERM or SIGHUP ends the
        run in order, a later SIGINT at once. Meanwhile the run is locked against another `penstock up`,
        and its processes end with this one. Unless REDIS_URL is set, files of the run's own queue server
        are written to its folder; at the end its socket is deleted. Raise ConfigError if a setting or
        the Procfile is wrong, RunTaken if another `penstock up` of the run goes on.
        """
        settings = build(RunCommand, {"env_file": self.env_file})  # checks the names of all variables
        plan, threads = self._plan()
        services = role_services(plan.commands, threads)
        self._check_only(settings)
        listening = self._listening(settings)
        limits = self._limits(settings, plan, _LINGER_S if listening else 0.0)
        asked = "" if self.only else self._move_away_if_asked(settings, listening)
        folder = settings.run.folder
        made = steps_of_complete_run(folder)
        with umask(settings.run.umask), self._locks(folder, plan):
            if not settings.redis_url:
                services = [queue_service(folder, listening, Keys(settings.run.name)), *services]
            guard_children()  # children end with `up`, even when it is killed with -9
            environment = self._environment(bool(asked), listening)  # with the guard's mark
            make_folder(logs_folder := self._logs(folder))
            show = self._show(settings) if report is None else nullcontext(report)
            try:
                with closing(LogFiles(logs_folder)) as logs, show as take, _synced(settings):
                    reports = LastWords(logs, take, *([beside] if beside else []))
                    supervisor = Supervisor(services, environment, reports, plan.counts, limits, plan)
                    if threading.current_thread() is threading.main_thread():
                        for number in ending_signals():
                            signal.signal(number, partial(_stop, supervisor, show))
                    with self._link(settings, supervisor, reports):
                        code = supervisor.run()
            finally:
                if not settings.redis_url:
                    remove_old_socket(folder)
            if report is None and beside is None:
                repeat = REPEAT_WITHOUT if asked == "new" else REPEAT
                failure = reports.describe(logs_folder, repeat)
                print_ending(folder, failure, repeat, self.trains(), made)
            return code

    def trains(self) -> bool:
        """Return whether steps are expected here: not with --only, nor where the run only evaluates."""
        only = read_environment(self.env_file).get("LEARNER_EVALUATE_ONLY", "").lower()
        return not self.only and only in ("", "false", "0", "no", "off", "n", "f")

    def _plan(self) -> tuple[DevicePlan, int]:
        """Return the processes with their devices, and the threads of each; see `threads_of_each`.

        Raise ConfigError for a wrong Procfile, flag or setting, or too few devices.
        """
        commands = self._commands()
        counts = self._counts(commands)
        gpus = find_gpus(self.env_file, commands)
        plan = DevicePlan(commands, counts, gpus, self.devices)
        computing = sum(counts.get(role, 1) for role in (LEARNER, ACTOR) if role in commands)
        return plan, threads_of_each(read_environment(self.env_file), computing, gpus.names)

    def _limits(self, settings: RunCommand, plan: DevicePlan, linger_s: float) -> Limits:
        """Return the supervisor's limits. Actors have ACTOR_GRACE_S to end, if that is over 30 s.

        Raise ConfigError if a setting of actors is wrong.
        """
        limits = Limits(ready_s=settings.run.progress_timeout_s, linger_s=linger_s)
        if ACTOR not in plan.commands:
            return limits
        grace_s = build(ActorCommand, {"env_file": self.env_file}).actor.grace_s
        return replace(limits, terminate_s=max(limits.terminate_s, grace_s))

    def _commands(self) -> dict[str, str]:
        """Return the Procfile's commands by name, with --only those that it names.

        Raise ConfigError for a wrong Procfile, and for a name that is not in it.
        """
        commands = read_procfile(self.procfile)
        names = [name.strip() for name in self.only.split(",")] if self.only else [*commands]
        for name in names:
            if name not in commands:
                there = ", ".join(commands)
                raise ConfigError(f"--only {self.only}: the Procfile has no {name}; it has {there}")
        return {name: commands[name] for name in names}

    def _check_only(self, settings: RunCommand) -> None:
        """Raise ConfigError if --only is given without REDIS_URL, or with --listen."""
        if self.only and (self.listen or not settings.redis_url):
            found = (
                "--listen is for the machine with the server" if self.listen else "no REDIS_URL is set"
            )
            raise ConfigError(
                f"--only {self.only}: {found}, expected the address of the run's queue server, such as "
                "REDIS_URL=redis://:PASSWORD@HOST:6379/0: set it, as `penstock up --listen` started it"
            )

    @contextmanager
    def _locks(self, folder: RunFolder, plan: DevicePlan) -> Iterator[None]:
        """Hold the run's lock during the block; with --only one for each role on this host instead.

        Raise RunTaken if another `penstock up` holds it.
        """
        only = {folder.only_lock(role): role for role in plan.commands} if self.only else {}
        with ExitStack() as locks:
            for path in only or [folder.up_lock]:
                what = f"`penstock up --only {only[path]}`" if only else "`penstock up`"
                locks.enter_context(hold_lock(path, what))
            yield

    def _logs(self, folder: RunFolder) -> Path:
        """Return the folder of log files: with --only one of this host, as the run's may be shared."""
        return folder.logs / socket.gethostname() if self.only else folder.logs

    def _link(
        self, settings: RunCommand, supervisor: Supervisor, report: Callable[[Report], None]
    ) -> ScaleLink:
        """Return what makes `queues scale` reach the supervisor, and with --only the run's end too."""
        connect = partial(_connect, settings)
        return ScaleLink(supervisor, connect, settings.run.name, report, guest=bool(self.only))

    def _environment(self, anew: bool, listening: Listening | None) -> dict[str, str]:
        """Return the children's variables, for a run that begins `anew` or not.

        With a server that is `listening` other machines get the run's files where they reach the server.
        torchrun gives its learners as long to write a checkpoint as the supervisor gives torchrun.
        Raise ConfigError if --env-file cannot be read.
        """
        environment = child_environment(self.env_file)
        environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{Limits().save_s:.0f}")
        if anew:
            environment["LEARNER_RESUME"] = "auto"  # a learner that is started again goes on
        if listening:
            shown = f"[{listening.host}]" if ":" in listening.host else listening.host
            environment.setdefault("LEARNER_FILES_ADDRESS", f"{shown}:0")
        return environment

    def _move_away_if_asked(self, settings: RunCommand, listening: Listening | None) -> str:
        """Move the run of these `settings` away if LEARNER_RESUME is new or a path; return it, else "".

        With the path of a checkpoint the run's folder is then made as of it. If that was done before,
        the run goes on. Raise ConfigError with REDIS_URL, for wrong settings of the learner, no
        checkpoint, or a queue server that cannot start or be `listening`, before anything is moved, or
        if the folder cannot be moved, RunTaken if the run is in use.
        """
        asked: str = at_home(read_environment(self.env_file).get("LEARNER_RESUME", "auto"))
        if asked in ("", "auto", "must"):
            return ""
        if settings.redis_url:
            raise ConfigError(
                f"LEARNER_RESUME={asked} moves the run's folder away with its queue server's data, but "
                "REDIS_URL names another server: choose another RUN_NAME for a new run"
            )
        build(LearnerCommand, {"env_file": self.env_file})
        find_binary()
        if listening:
            check_port(listening.host, listening.port)
        if asked != "new" and began_from(settings.run.folder, Path(asked)):
            return asked
        checkpoint = None if asked == "new" else find_checkpoint(Path(asked))
        if checkpoint:
            check_whole(checkpoint)  # before anything is moved
        old, folder = settings.run.folder.path.resolve(), settings.run.folder
        moved = move_away(folder)
        if checkpoint:
            is_own = checkpoint.is_relative_to(old)
            now = moved / checkpoint.relative_to(old) if is_own else checkpoint
            with umask(settings.run.umask):
                begin_from(now, folder, checkpoint)
        return asked

    def _show(self, settings: RunCommand) -> Show:
        """Return what shows the run of these `settings`: a live screen, or all lines as they come."""
        watch = RunWatch(partial(_connect, settings), settings.run.name, str(settings.run.folder.path))
        console = Console(file=sys.stdout)
        if is_live(console, self.plain or settings.run.log_format == "json"):
            return LiveScreen(watch, console)
        return ProgressPrinter(watch, Printer(sys.stdout))

    def _counts(self, commands: Mapping[str, str]) -> dict[str, int]:
        """Return how many processes --actors and --rewarders ask for, by name; no entry without a flag.

        `commands` are the Procfile's, by name. Raise ConfigError if "actor" or "rewarder" is asked for
        and not among them.
        """
        asked = {"actor": self.actors, "rewarder": self.rewarders}
        counts = {name: wanted for name, wanted in asked.items() if wanted is not None}
        for name in sorted(counts.keys() - commands.keys()):
            raise ConfigError(f"--{name}s: the Procfile has no {name}; add to it `{name}: command`")
        return counts

    def _listening(self, settings: RunCommand) -> Listening | None:
        """Return where the server listens beside its socket, None without --listen.

        `settings` are the run's. Raise ConfigError for a malformed --listen, without a readable
        RUN_QUEUE_PASSWORD_FILE, or with REDIS_URL, as no server would be started.
        """
        if not self.listen:
            return None
        host, port = parse_host(self.listen, "--listen")
        if settings.redis_url:
            raise ConfigError(
                f"--listen {self.listen}: REDIS_URL is set, so no queue server is started; leave one out"
            )
        if not settings.run.queue_password_file:
            raise ConfigError(
                f"--listen {self.listen}: RUN_QUEUE_PASSWORD_FILE is not set, expected a file with the "
                "password of the other machines, made by `(umask 077; openssl rand -hex 24 > FILE)`"
            )
        password = read_secret(Path(settings.run.queue_password_file), "RUN_QUEUE_PASSWORD_FILE")
        return Listening(host, port, hash_password(password))


def _connect(settings: RunCommand, stopping: threading.Event | None = None) -> Connection:
    """Return a connection to the run's queue server, which waits 1 s, and not once `stopping` is set.

    Its address may have changed, in REDIS_URL_FILE. Raise ConfigError before the server is started.
    """
    present = build(RunCommand, {"env_file": settings.env_file})
    url = present.redis_url or started_server(settings.run.folder)
    return Connection(url, _LOOK_S, _LOOK_S, stopping, settings.run.allow_open_server)


def _synced(settings: RunCommand) -> AbstractContextManager[object]:
    """Return the watch of the run's own queue server; of another one nothing is watched."""
    return nullcontext() if settings.redis_url else SyncWatch(settings.run.folder)


def _stop(supervisor: Supervisor, show: object, number: int, *_: object) -> None:
    """Make `supervisor` end the run, and say so where `show` shows the run. A handler of signals.

    A second Ctrl-C ends it at once, another signal's repetition does not (see `stop_on_signals`).
    """
    supervisor.stop(at_once=number == signal.SIGINT)
    if isinstance(show, Show):
        show.notice = STOPPING


def role_services(commands: Mapping[str, str], threads: int = 0) -> list[Service]:
    """Return a service for each of `commands`, a Procfile's by name, in order. The learner is essential.

    The queue server stops after them. `exec env` replaces the shell with the command, so that signals
    reach the command alone. Learner and actors compute with `threads` threads, if not 0.
    """
    limit = f"OMP_NUM_THREADS={threads} " if threads else ""
    return [
        Service(
            name,
            ("/bin/sh", "-c", f"exec env {limit if name in (LEARNER, ACTOR) else ''}{command}"),
            stage=LEARNER_STAGE if name == LEARNER else WORKER_STAGE,
            essential=name == LEARNER,
        )
        for name, command in commands.items()
    ]


def queue_service(
    run_folder: RunFolder, listening: Listening | None = None, keys: Keys | None = None
) -> Service:
    """Return the service "queue" of the run's own queue server, which is ready once the server answers.

    Then, the first time, the state and the contract that an earlier start of the run left under `keys`
    are deleted: the learner writes its own, and nobody is to work by the old ones before. The contract
    stays if actors of other machines (`listening`) may work by it, or if the learner refuses to go on
    from it, as from another release's.

    The server is not started, but its configuration, users and address, with a new password, are written
    to the run's folder. The socket of the last server is deleted, once that has ended, and a folder for
    the new one is made. `listening` is a TCP address beside the socket, if not None. Raise ConfigError
    if no server can start.
    """
    plan = prepare(run_folder, listening)
    old = [keys] if keys else []

    def is_ready() -> bool:
        """Return whether the server answers; then, once, try to delete what is old."""
        if not answers(plan.url):
            return False
        if old:
            of_run = old.pop()
            with contextlib.suppress(PenstockError):  # such as a full disk
                _forget(Connection(plan.url, _LOOK_S, _LOOK_S), of_run, bool(listening))
        return True

    return Service("queue", plan.command, SERVER_STAGE, True, is_ready)


def _forget(connection: Connection, keys: Keys, listening: bool) -> None:
    """Delete what `queue_service` says. Raise MalformedMessage if the contract cannot be read."""
    connection.execute("DEL", keys.state)
    if not listening and (contract := connection.execute("GET", keys.contract)):
        decode(contract, Contract)
        connection.execute("DEL", keys.contract)


def child_environment(env_file: Path | None) -> dict[str, str]:
    """Return the children's variables: those of `env_file`, if given, and this process's, which win.

    PATH begins with the folder of this installation's commands; PYTHONUNBUFFERED is 1. A missing file
    gives no variable. Raise ConfigError if the file cannot be read.
    """
    found = read_environment(env_file)
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    found["PYTHONUNBUFFERED"] = "1"
    found[UP_ENV_FILE] = str(env_file or "")
    return found


class Printer:
    """Printer of reports to `file`, as `actor.1 | line`, with one colour per service on a terminal."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        escape_missing_characters(file)
        self._colours: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, report: Report) -> None:
        """Print `report` as `actor.1 | line`, with `-- ` before the text of all but output. Thread-safe.

        When the reader of the output is gone, the run goes on without printing.
        """
        service = report.child.rpartition(".")[0]
        mark = "" if report.kind == "output" else "-- "
        with self._lock:
            colour = self._colours.setdefault(service, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = f"{report.child:<10} | "
            if is_coloured(self._file):
                prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
            try:
                print(f"{prefix}{mark}{report.line}", file=self._file, flush=True)
            except OSError:
                drop_output(self._file)
