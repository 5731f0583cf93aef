"""What the roles share: orderly shutdown, the connection to the queue server, the consumer's name."""

import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import started_server
from penstock.common.config.settings import RunSettings
from penstock.common.guard import guard_children


def begin_role() -> threading.Event:
    """Start a guard process, which kills this process's descendants once it has ended; return an event.

    The event is that of `stop_on_signals`. The environment gets PENSTOCK_GUARD, by which the guard knows
    the descendants. Raise ValueError outside of the main thread.
    """
    guard_children()
    return stop_on_signals()


def stop_on_signals() -> threading.Event:
    """Return an event that the first SIGINT, SIGTERM or SIGHUP sets: a loop finishes the work it holds.

    A later SIGINT, a person's second Ctrl-C, ends the process at once with exit code 130. Other signals
    that follow change nothing: who stops a machine often sends several (systemd SIGTERM and SIGHUP to a
    login's processes, or SIGTERM to `penstock up` and to the roles that it signals too), and the work is
    still to be handed over. The handlers replace those before. Raise ValueError outside of the main
    thread.
    """
    stopping = threading.Event()

    def stop(number: int, _frame: FrameType | None) -> None:
        """Set the event; if it is set already and `number` is SIGINT, end the process at once."""
        if stopping.is_set() and number == signal.SIGINT:
            os._exit(128 + number)
        stopping.set()

    for number in ending_signals():
        signal.signal(number, stop)
    return stopping


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a process in order; SIGHUP is not among them under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextmanager
def spared_processes() -> Iterator[list[BaseProcess]]:
    """Block the signals that end a role in the `multiprocessing` processes that start in this context.

    Slurm, or Ctrl-C in a terminal, signals a role and all of its processes. Those would end before the
    role has handed over its work. The role has to kill the processes in the yielded list. What these
    start inherits the block.
    """
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def start_spared(process: BaseProcess) -> None:
        """Start `process` with the signals blocked, as they then stay for it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
        try:
            start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        started.append(process)

    resource_tracker.ensure_running()  # its own start, at the first spawn, would unblock the signals
    BaseProcess.start = start_spared  # type: ignore[method-assign, assignment]
    try:
        yield started
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]


def connect(redis_url: str, run: RunSettings, stopping: threading.Event) -> Connection:
    """Return a connection to `redis_url` or, if that is "", to the server that `penstock up` started.

    Of `run` count RUN_CONNECT_TIMEOUT_S, RUN_SERVER_TIMEOUT_S, RUN_ALLOW_OPEN_SERVER, and the run's
    folder, where `penstock up` wrote its server's address. Later a lost server is waited for, for
    RUN_SERVER_TIMEOUT_S or until `stopping` is set.

    Raise ConfigError if no server is known or it cannot be used, also if it lets in everybody in the
    network and RUN_ALLOW_OPEN_SERVER is not set. Raise ServerUnavailable if `penstock up` has ended, or
    no server answers within RUN_CONNECT_TIMEOUT_S or before `stopping` is set.
    """
    url = redis_url or started_server(run.folder)
    return Connection(url, run.connect_timeout_s, run.server_timeout_s, stopping, run.allow_open_server)


def consumer_name(role: str) -> str:
    """Return a name that no other process has, such as "actor-host12-4711-a3f09c" for `role` "actor".

    The parts are the role, the host's name, the process id and a random number; each call's is another.
    """
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
