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
    """The pool's end of a nursery, a new Python process that forks a keeper per sandbox process.

    The process gets the environment variables `environment` and no others. It imports `modules`, then
    calls the function `warm`, "package.module:function", or none for "". __init__ starts the process and
    does not wait for it; `close` ends it.
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
        """Return True if the nursery's process has not ended."""
        return self._process.poll() is None

    def start(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        """Ask the nursery to fork a keeper, and do not wait. Raise OSError if the nursery has ended.

        `asked` has the limits of the keeper's process, the code that it imports, and the other keys that
        `run_body` lists. The `descriptors` are the keeper's connection, and its process's control
        connection and output pipe, in this order. The nursery gets copies: the caller closes its own.
        """
        socket.send_fds(self._connection, [json.dumps(asked).encode()], descriptors)

    def close(self) -> None:
        """Kill the nursery and wait for its end. Keepers live on until their own connections close."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def main(number: int, modules: list[str], warm: str) -> None:
    """Be a nursery: import `modules`, call the function `warm` ("" for none), and fork keepers.

    `number` is the descriptor of the connection to the pool. Each request of the pool, with three
    descriptors, gives a keeper. Sources of the standard library and of imported packages that not
    everybody can read are stored in own_code.KEPT, by path, before. SIGTERM, SIGINT and SIGHUP are
    ignored, and this process's memory is hidden. Return when the pool has closed the connection.
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
    own = {name for name in sys.modules if name.startswith("penstock.") and name.count(".") == 1}
    keep_packages([*own, *(name for name in sys.modules if "." not in name)])  # in a clone, own folders
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
    """Be a keeper, without return: fork the process that runs foreign code, and serve the pool.

    `asked` is the pool's request: the limits of that process, and the code that it imports. `numbers`
    are the descriptors of the keeper's connection, and of the process's control connection and output
    pipe.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    commands, control, output = numbers

    def start(isolated: bool) -> None:
        """Be the process below the keeper, without return: import the code asked for, and serve calls.

        `isolated` says whether the process has namespaces of its own.
        """
        run_body(socket.socket(fileno=control), output, asked, isolated)

    keep(socket.socket(fileno=commands), asked["limits"]["memory_bytes"], start, [control, output])
