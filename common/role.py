"""The skeleton of every role: settings, logs, orderly shutdown, exit codes.

    main -> load settings (nothing heavy imported) -> run(settings, stopping) -> exit code

SIGINT and SIGTERM set `stopping`: the loop finishes what it holds and returns. A second signal ends
the process at once.
"""

import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import started_server
from penstock.common.config.command import Command, environment_of, load
from penstock.common.config.settings import RunSettings
from penstock.common.errors import PenstockError
from penstock.common.guard import guard_children
from penstock.common.log import configure_logs, get_logger
from penstock.common.text import printable

log = get_logger(__name__)


def run_role(
    kind: type[Command],
    role: str,
    run: Callable[[Any, threading.Event], None],
    describe: Callable[[Any], dict[str, Any]] | None = None,
) -> int:
    """Run a role until it ends or is told to stop; returns the exit code.

    `describe` adds what --dry-run prints beside the resolved settings.
    """
    try:
        settings = load(kind, role)
        configure_logs(role, settings.run.log_format)
        if settings.dry_run:
            print_settings(settings, describe(settings) if describe else {})
            return 0
        guard_children()
        run(settings, stop_on_signals())
    except PenstockError as error:
        print(printable(f"{role}: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def stop_on_signals() -> threading.Event:
    """An event that the first SIGINT or SIGTERM sets; the second one kills."""
    stopping = threading.Event()

    def stop(number: int, _frame: Any) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping


def print_settings(settings: Any, extra: dict[str, Any]) -> None:
    """Print the resolved settings as an environment, then what was derived from them."""
    for name, value in environment_of(settings).items():
        print(f"{name}={value}")
    for name, value in extra.items():
        print(f"# {name}: {value}")


def connect(redis_url: str, run: RunSettings, stopping: threading.Event) -> Connection:
    """Connect to REDIS_URL or to the server that `penstock up` started for the run.

    A lost server is waited for until RUN_SERVER_TIMEOUT_S is over or `stopping` is set.
    """
    url = redis_url or started_server(run.folder)
    return Connection(url, run.connect_timeout_s, run.server_timeout_s, stopping)


def consumer_name(role: str) -> str:
    """A name no other process start has: role, host, process id and a random part."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
