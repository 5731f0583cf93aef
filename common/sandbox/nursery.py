"""The first process of a sandbox: a fresh interpreter that imports trusted modules and forks keepers.

A fork of the role itself would copy its secrets and its threads. This process inherits few variables,
imports what the pool names, and runs no foreign code. The keepers and their processes are forked from
it.

Waits for: requests of the pool, each with three connections. Ends when: the pool closes its connection.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any, NoReturn

from penstock.common.heavy_imports import heavy_imports
from penstock.common.sandbox.body import CLOSE_ON_EXEC, find_function, run_body
from penstock.common.sandbox.keeper import keep
from penstock.common.sandbox.limits import ignore_polite_signals
from penstock.common.sandbox.packages import keep_packages, keep_standard_library
from penstock.common.sandbox.user import hide_memory

_BEGIN = (
    "import sys, json; number, sys.path[:], modules, warm = json.loads(sys.argv[1]); "
    "from penstock.common.sandbox.nursery import main; main(number, modules, warm)"
)
_LONGEST_REQUEST = 2**16


class Nursery:
    """The pool's end of a nursery: imports `modules`, calls `warm`, forks keepers until `close`.

    `environment` holds all environment variables of the process. `warm` is "package.module:function", or
    "" to call nothing.
    """

    def __init__(self, environment: dict[str, str], modules: tuple[str, ...], warm: str) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = json.dumps([theirs.fileno(), sys.path, modules, warm])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN, arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    @property
    def runs(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def start(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        """Ask the nursery to fork a keeper. Raise OSError if the nursery has ended.

        `asked` is what `run_body` is given, as JSON. The `descriptors` are the keeper's connection, and
        the control connection and output pipe of its process.
        """
        socket.send_fds(self._connection, [json.dumps(asked).encode()], descriptors)

    def close(self) -> None:
        """Kill the nursery and wait for its end. The keepers end when their own connections close."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def main(number: int, modules: list[str], warm: str) -> None:
    """Import modules, call the function `warm` unless empty, and fork keepers until the pool closes.

    `number` is the descriptor of the connection to the pool. Sources that not everybody can read are
    stored in own_code.KEPT. Return when the pool has closed the connection.
    """
    connection = socket.socket(fileno=number)
    connection.set_inheritable(False)
    ignore_polite_signals()
    hide_memory()
    with heavy_imports():
        for module in modules:
            importlib.import_module(module)
        if warm:
            find_function(warm)()
    keep_standard_library()
    keep_packages([name for name in sys.modules if "." not in name])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects ended keepers
    while True:
        text, numbers, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, 3, CLOSE_ON_EXEC)
        if not text:
            return
        if os.fork() == 0:
            connection.close()
            _begin_keeper(json.loads(text), numbers)
        for descriptor in numbers:
            os.close(descriptor)


def _begin_keeper(asked: dict[str, Any], numbers: list[int]) -> NoReturn:
    """Be a keeper, without return. `asked` is the pool's request, as `run_body` takes it.

    `numbers` are the descriptors of the keeper's connection, and of its process's control and output.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    commands, control, output = numbers

    def start(isolated: bool) -> None:
        """Be the process below the keeper, without return. `isolated`: it has namespaces of its own."""
        run_body(socket.socket(fileno=control), output, asked, isolated)

    keep(socket.socket(fileno=commands), asked["limits"]["memory_bytes"], start, [control, output])
