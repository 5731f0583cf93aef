"""The unix socket of a run's own queue server, in a folder that its user alone can enter.

A password is sent to such a socket only after two checks: the folder is still private and the same
user's, and the process that listens belongs to that user. Another user who makes a removed folder again,
or who listens at the same path, gets no password.
"""

import contextlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from penstock.common.config.redis_url import LONGEST_SOCKET_PATH, ServerAddress, parse_url
from penstock.common.errors import ConfigError

_NAME = "queue.sock"
_PREFIX = "penstock-"


def make_socket_path() -> Path:
    """Make a private folder with a short path and return the path of the socket to make in it.

    The folder lies in $XDG_RUNTIME_DIR if that is this user's alone, else in the folder for temporary
    files, else in /tmp, whichever is short enough. Raise OSError if no folder can be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [runtime] if runtime and _is_private(Path(runtime), os.geteuid()) else []
    for parent in (*candidates, tempfile.gettempdir()):
        longest = len(os.fsencode(os.path.abspath(parent))) + len(f"/{_PREFIX}{'x' * 8}/{_NAME}")
        if longest <= LONGEST_SOCKET_PATH:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.path.abspath(parent))) / _NAME
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")) / _NAME


def remove_socket(path: Path) -> None:
    """Delete a socket and its folder if `make_socket_path` made them for this user; else do nothing."""
    folder = path.parent
    made_here = path.name == _NAME and folder.name.startswith(_PREFIX)
    if made_here and _is_private(folder, os.geteuid()):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            folder.rmdir()


def check_listener(client: socket.socket, address: ServerAddress) -> None:
    """Raise ConfigError if a socket's server, on Linux, or private folder is not the address's owner's.

    The check is made before a password is sent. Without an owner in the address nothing is checked.
    """
    if address.owner is None:
        return
    folder = Path(address.path).parent
    if not _is_private(folder, address.owner):
        raise ConfigError(
            f"found another owner or mode of the folder {folder} of the queue server's socket, expected "
            f"user {address.owner} and mode 0700. The password was not sent. Start `penstock up` again"
        )
    if hasattr(socket, "SO_PEERCRED"):  # Linux; elsewhere the folder's mode alone decides
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != address.owner:
            raise ConfigError(
                f"the process that listens at {address.path} belongs to user {user}, expected "
                f"user {address.owner}. The password was not sent. Start `penstock up` again"
            )


def answers(url: str) -> bool:
    """Return whether a server answers at the unix socket, accepts the password and has loaded its data.

    Raise ConfigError if the socket belongs to another user: the password is not sent then.
    """
    address = parse_url(url)
    try:
        with _connected(address) as client:
            check_listener(client, address)
            client.sendall(f"AUTH {address.password}\r\nPING\r\n".encode())
            replies = client.makefile("rb")
            return replies.readline() == b"+OK\r\n" and replies.readline() == b"+PONG\r\n"
    except OSError:
        return False


def listens(address: ServerAddress) -> bool:
    """Return whether the owner of the address listens at its socket."""
    try:
        with _connected(address) as client:
            check_listener(client, address)
            return True
    except (OSError, ConfigError):
        return False


def _connected(address: ServerAddress) -> socket.socket:
    """Return a connected socket with a timeout of 1 s. Raise OSError if nobody answers there."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(1.0)
    try:
        client.connect(address.path)
    except OSError:
        client.close()
        raise
    return client


def _is_private(folder: Path, owner: int) -> bool:
    """Return whether the path is a folder, no link, of this user, and closed to all others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077
