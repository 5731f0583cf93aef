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

    The folder, of mode 0700, lies in the first of these that gives a short enough path: $XDG_RUNTIME_DIR
    if that is this user's alone, the folder for temporary files, /tmp. Raise OSError if it cannot be
    made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [runtime] if runtime and _is_private(Path(runtime), os.geteuid()) else []
    for parent in (*candidates, tempfile.gettempdir()):
        longest = len(os.fsencode(os.path.abspath(parent))) + len(f"/{_PREFIX}{'x' * 8}/{_NAME}")
        if longest <= LONGEST_SOCKET_PATH:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.path.abspath(parent))) / _NAME
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")) / _NAME


def remove_socket(path: Path) -> None:
    """Delete the socket `path` and its folder if `make_socket_path` made them for this user.

    This is told by their names, the owner and the mode; else do nothing. Errors of deleting are ignored.
    """
    folder = path.parent
    made_here = path.name == _NAME and folder.name.startswith(_PREFIX)
    if made_here and _is_private(folder, os.geteuid()):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            folder.rmdir()


def check_listener(client: socket.socket, address: ServerAddress) -> None:
    """Raise ConfigError unless the owner that `address` names is the one who listens at its unix socket.

    `client` is connected to that socket. The socket's folder must be the owner's and closed to all
    others, and on Linux the process that listens must be the owner's. Without an owner in `address`
    nothing is checked. Nothing is sent: the caller sends the password afterwards.
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
    """Return whether a server answers at the unix socket of `url`, takes the password and has its data.

    `url` has a password and no user: the login is that of the server's default user. False if nobody
    listens, a step takes over 1 s, or the server refuses or still loads its data. Raise ConfigError,
    before the password is sent, if the socket is another user's, others may enter its folder, or `url`
    is malformed.
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
    """Return whether the owner of `address` (with none, anybody) listens at its unix socket.

    The socket is connected to, for at most 1 s; nothing is sent. False too if another user listens, or
    others may enter the folder of an owner's socket. No error is raised.
    """
    try:
        with _connected(address) as client:
            check_listener(client, address)
            return True
    except (OSError, ConfigError):
        return False


def _connected(address: ServerAddress) -> socket.socket:
    """Return a client connected to the unix socket of `address`; each of its calls may take 1 s.

    Raise OSError, such as ConnectionRefusedError, if nobody listens there.
    """
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(1.0)
    try:
        client.connect(address.path)
    except OSError:
        client.close()
        raise
    return client


def _is_private(folder: Path, owner: int) -> bool:
    """Return whether `folder` is a folder of the user with the id `owner` that all others cannot enter.

    False for a link, for a missing path, and for a mode that gives others any right.
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077
