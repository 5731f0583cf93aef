"""A queue server for one run: Redis or Valkey on this machine, with its data in the run's folder.

    <run folder>/queue/url           the server's address, password included (mode 0600)
    <run folder>/queue/server.conf   the configuration (mode 0600)
    <run folder>/queue/users.acl     the users with the hashes of their passwords (mode 0600)
    <run folder>/queue/appendonlydir the append-only file

The server listens on a unix socket in a private folder (private_socket.py), and on TCP only if asked to.
Socket and password are new for each `prepare`. A server that was killed is started again by the same
plan, with the same socket, password and data.
"""

import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.common.broker.private_socket import answers, listens, make_socket_path, remove_socket
from penstock.common.broker.server_binary import find_binary
from penstock.common.broker.server_checks import is_loopback
from penstock.common.config.redis_url import ServerAddress, parse_url, unix_url
from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError, ServerUnavailable
from penstock.common.files.atomic import make_folder, write_whole
from penstock.common.files.lock import hold_lock
from penstock.common.files.run_folder import RunFolder

_START_TIMEOUT_S = 30.0
_LEAVE_TIMEOUT_S = 5.0
_POLL_S = 0.01

_CONFIGURATION = """\
{listen}
unixsocket {socket}
unixsocketperm 700
aclfile {users}
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
class Listening:
    """Where the server listens beside its socket. `password_hash` is that of the password over TCP.

    The socket has a random password of its own, so that no file of the run holds the user's password.
    """

    host: str
    port: int
    password_hash: str


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The command that runs the server in the foreground, and the server's URL."""

    command: tuple[str, ...]
    url: str


def prepare(run_folder: RunFolder, listening: Listening | None = None) -> ServerPlan:
    """Write the files of a new queue server in the run's folder; return how to start it. Start nothing.

    Delete the last server's socket (after a wait of up to 5 s for its end), make a folder for a new one,
    and draw a new password. Keep users that `queues acl` wrote. `listening` has a TCP address beside the
    socket and the hash of one more password; None: the socket alone. The plan that is returned has the
    server's command and its URL, which is also stored in the folder. Raise ConfigError if no program is
    found, a folder cannot be made, the last server still runs, or the TCP address cannot be used,
    OSError if a file cannot be written, and subprocess.TimeoutExpired if a program does not state its
    version within 10 s.
    """
    binary = find_binary()
    run_folder = RunFolder(run_folder.path.resolve())
    make_folder(run_folder.path)
    make_folder(run_folder.server)
    run_folder.server.chmod(0o700)  # whoever writes there decides what the server does at its next start
    remove_old_socket(run_folder)
    if listening:
        check_port(listening.host, listening.port)
    password = secrets.token_hex(24)
    url = unix_url(str(path := make_socket_path()), password, os.geteuid())
    hashes = [hash_password(password), *([listening.password_hash] if listening else [])]
    text = _CONFIGURATION.format(
        listen=f"bind {listening.host}\nport {listening.port}" if listening else "port 0",
        socket=_quoted(path),
        users=_quoted(run_folder.server_users),
        folder=_quoted(run_folder.server),
    )
    write_whole(run_folder.server_users, _users(run_folder.server_users, hashes), mode=0o600)
    write_whole(run_folder.server_configuration, text.encode(), mode=0o600)
    write_whole(run_folder.server_url, f"{url}\n".encode(), mode=0o600)
    return ServerPlan((binary, str(run_folder.server_configuration)), url)


def started_server(run_folder: RunFolder) -> str:
    """Return the URL, password included, of the queue server that was started in the run's folder.

    Raise ConfigError if the folder holds no address, or the file is not readable, holds no socket's URL
    with owner and password, or belongs to another user (unless this one is root). Raise
    ServerUnavailable if the socket's folder is gone. The server itself is not asked.
    """
    path = run_folder.server_url
    if not path.is_file():
        raise ConfigError(
            f"no queue server is known: REDIS_URL is not set and {path} does not exist; set REDIS_URL, "
            "start everything with `penstock up`, or name the run (RUN_NAME, RUN_DIR, or --env-file)"
        )
    try:
        url, user = path.read_text().strip(), path.stat().st_uid
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: the queue server's address cannot be read ({type(error).__name__}): it is for the "
            "user alone who started the run; be that user, or set REDIS_URL"
        ) from error
    address = _own_address(url)
    if address is None or os.geteuid() not in (0, user):
        raise ConfigError(
            f"{path}: expected the address of a unix socket, written by this user, found another text "
            "or owner; start `penstock up` again, or set REDIS_URL"
        )
    if not Path(address.path).parent.exists():
        raise ServerUnavailable(
            f"{path}: the socket {address.path} of the queue server does not exist on this machine: its "
            "`penstock up` has ended, or runs on another machine. Start `penstock up`, on another "
            "machine with --listen HOST:PORT, and set REDIS_URL here"
        )
    return url


def remove_old_socket(run_folder: RunFolder) -> None:
    """Delete the socket, and its folder, of the last server in a run's folder, after its end.

    Wait up to 5 s for that end; raise ConfigError if the server listens longer. This is found by
    connecting, and nothing is sent. Do nothing if the folder names no socket, or another user's.
    """
    path = run_folder.server_url
    address = _own_address(path.read_bytes().decode(errors="replace").strip() if path.is_file() else "")
    if address is None or address.owner != os.geteuid():
        return
    deadline = Deadline(_LEAVE_TIMEOUT_S)
    while listens(address):  # a killed `penstock up` takes its server along within a second or two
        if deadline.expired():
            raise ConfigError(
                f"a queue server already runs in {path.parent}: end the `penstock up` that started it, "
                "or choose another RUN_NAME"
            )
        time.sleep(0.1)
    remove_socket(Path(address.path))


def delete_data(run_folder: RunFolder) -> Path:
    """Delete what the queue server of a run's folder has stored, after its end; return where it was.

    Raise RunTaken if a `penstock up` of the run goes on, ConfigError if the server still runs or the
    folder never had one, and OSError if a file cannot be deleted.
    """
    if not run_folder.server.is_dir():
        raise ConfigError(
            f"{run_folder.server} is not there, expected a run's queue server: see RUN_NAME"
        )
    with hold_lock(run_folder.up_lock, "`penstock up`"):
        remove_old_socket(run_folder)
        data = run_folder.server / "appendonlydir"
        if data.exists():
            shutil.rmtree(data)
    return data


def hash_password(password: str) -> str:
    """Return the SHA-256 of a password in hexadecimal, as a file of users holds it after `#`."""
    return hashlib.sha256(password.encode()).hexdigest()


class LocalServer:
    """A queue server as a child of this process, for tests and small tools; `with` or `start` starts it.

    Creating a LocalServer writes its files to `folder`, the run's folder, and makes its socket's folder,
    but starts nothing. Attributes: `url` is the server's, with a new password. Raise ConfigError if no
    server can run there, or one does already, OSError if a file cannot be written.

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
        """Start the server; return this object. Raise ServerUnavailable without an answer in 30 s."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server, wait up to 30 s for its end, and delete its socket and the socket's folder.

        Raise subprocess.TimeoutExpired if it has not ended then. Errors of the block pass through.
        """
        self.stop()
        remove_socket(Path(parse_url(self.url).path))

    def start(self) -> None:
        """Start the server and wait until it answers. Its output goes to server.log of the folder.

        If it ends or has not answered after 30 s, kill it and raise ServerUnavailable. Raise ConfigError
        if another user listens at its socket.
        """
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
                    f"the queue server did not answer within {_START_TIMEOUT_S:g} s, or ended (exit "
                    f"code {ended}): {' '.join(self._command)}; see {self._log}"
                )
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End the server by SIGKILL and wait for its end. Do nothing if it was never started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End the server, if it was started, by SIGTERM and wait for its end: its data are on disk.

        Raise subprocess.TimeoutExpired if it has not ended after 30 s.
        """
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=_START_TIMEOUT_S)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen at this host's TCP port, as when another program does.

    Raise it too if the host's name means loopback, which no other machine reaches. The port is opened
    for a moment to find out.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as server:
            address: str = server.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"--listen: no server can listen at {host}, port {port}: {error.strerror}; end the program "
            "that does, or choose another port, or an address of this machine"
        ) from error
    if is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            f"--listen: {host} is {address} here (see /etc/hosts), which no other machine reaches: name "
            f"this machine's address (learner.sbatch: PENSTOCK_HOST), or {address} if none is to come"
        )


def _own_address(url: str) -> ServerAddress | None:
    """Return the parts of `url` if it is that of a unix socket with owner and password, else None."""
    try:
        address = parse_url(url)
    except ConfigError:
        return None
    return address if address.owner is not None and address.password is not None else None


def _users(path: Path, hashes: list[str]) -> bytes:
    """Return the new text of a file of users: the default user, then other users in the file `path`.

    The default user may do everything, with each password whose hash is in `hashes`. A missing file has
    no users.
    """
    old = path.read_text().splitlines() if path.is_file() else []
    kept = [line for line in old if line.startswith("user ") and not line.startswith("user default ")]
    passwords = " ".join(f"#{value}" for value in hashes)
    return "\n".join([f"user default on {passwords} ~* &* +@all", *kept, ""]).encode()


def _quoted(path: Path) -> str:
    """Return a path as a value in the server's configuration: in double quotes, with escapes inside."""
    return json.dumps(str(path), ensure_ascii=False)
