"""The connection to the queue server, which retries each command while the server is away.

This is the only module that imports redis. redis-py's own retries are off: they would also repeat
commands that are not idempotent. Every command sent here is idempotent: a repeated function call changes
nothing, and a worker asks for entries whose delivery was lost.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from threading import Event
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.retry import Retry

from penstock.common.broker.private_socket import check_listener
from penstock.common.broker.replies import explain, raise_unless_passing
from penstock.common.broker.server_checks import check_files, check_handshake, check_not_open
from penstock.common.config.redis_url import ServerAddress, parse_url
from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError, NotPermitted, ServerUnavailable, ValueTooLarge, WrongType
from penstock.common.failpoint import failpoint
from penstock.common.log import get_logger, shorten

BLOCK_MS = 1000
"""The longest blocking read. It is far below the socket's timeout, which would end the read."""

_SOCKET_TIMEOUT_S = 10.0
_RETRY_EVERY_S = 0.2
_REPORT_EVERY_S = 10.0
OLDEST = (7, 0)
"""The oldest version, major and minor, of a server that has all that the protocol needs."""

_READ_ONLY = frozenset({"audit"})
"""Functions that a user without any right to write may call."""

_ALWAYS_TAKEN = (1 << 20) - 4096
"""Bytes of a value that every server takes: its limits cannot be set below 1 MiB."""

_USUAL_LIMIT = 512 << 20

_PIECE = 1 << 14
"""Bytes that must be sent within the socket's timeout, for a value of any size."""

_UNSENT = 1 << 16
"""The most bytes that wait in the system to be sent: what they take counts as the wait for the reply."""

_LARGE = 1 << 20  # bytes of a command that are named when it fails

Argument = bytes | str | int | float

log = get_logger(__name__)


class Connection:
    """A connection to a queue server that may stop and start again.

    `url` has a form of REDIS_URL. Creating a Connection connects at once, for at most
    `connect_timeout_s`. Raise ConfigError for a URL, TLS file, login, server version (below 7.0) or
    eviction policy (not noeviction) that cannot work, and if another user listens at the unix socket.
    Raise it too, unless `allow_open`, for a server beyond this machine that answers without a login.
    Raise ServerUnavailable if no server answers in time, or if `stopping` is set while this waits; None
    is never set.

    Later each command waits for a lost server, for up to `server_timeout_s` or until `stopping` is set.
    `server` is the parsed URL, and `address` the URL without user, password and options, for messages.
    `restarts` counts the changes of the server's process. A server that was killed may have lost
    acknowledged writes, so a caller that relies on such writes checks them after each restart.
    `server_id` is the id of that process, new at each start. `interruptions` counts the commands that
    were not answered, or refused for now: a reply may have been lost, and others may not have been able
    to renew their leases either. `stopping` is the event.
    """

    def __init__(
        self,
        url: str,
        connect_timeout_s: float,
        server_timeout_s: float,
        stopping: Event | None = None,
        allow_open: bool = False,
    ) -> None:
        self.server = parse_url(url)
        check_files(self.server)
        self.address = str(self.server)  # no password
        self.restarts = self.interruptions = 0
        self._server_timeout_s = server_timeout_s
        self._new_socket = Event()
        self.stopping = stopping or Event()
        self._client = redis.Redis(
            connection_pool=redis.ConnectionPool(
                **_pool_options(self.server),
                db=self.server.database,
                username=self.server.username,
                password=self.server.password,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=min(connect_timeout_s, _SOCKET_TIMEOUT_S),
                retry=Retry(NoBackoff(), 0),
                command_packer=_InPieces(),
                redis_connect_func=self._on_connect,
            )
        )
        self.server_id = ""
        info = self._retrying(lambda: self._client.info("server"), connect_timeout_s, first=True)
        self.server_id = info.get("run_id", "")
        self._new_socket.clear()
        self._check_version(info)
        self._check_eviction(connect_timeout_s)
        if not allow_open:
            check_not_open(self.server)

    def _on_connect(self, connection: redis.Connection) -> None:
        """Log in on a new socket of redis-py, and note that the server may have restarted.

        Before the password is sent, close `connection` and raise ConfigError if another user listens at
        the unix socket, or if others may enter its folder. Raise redis's errors if the login fails.
        """
        client: Any = connection._sock
        try:
            check_listener(client, self.server)
        except ConfigError:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        if self.server.scheme != "unix" and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        connection.on_connect()  # type: ignore[no-untyped-call]
        self._new_socket.set()

    def execute(self, name: str, *arguments: Argument) -> Any:
        """Send the Redis command `name` with its `arguments`. Return redis-py's reply, texts as bytes.

        While the server is away, busy or full, the command is sent again every 0.2 s, so it must be
        idempotent. Raise ServerUnavailable after the server's timeout, if told to stop meanwhile, or for
        another refusal. Raise RunNotReady before a learner's setup, RunTaken if another learner holds
        the run, NotPermitted without the right, WrongType for a key of another type, ConfigError for a
        wrong login or server, and, before sending, ValueTooLarge for a too large argument.
        """
        self._check_sizes(name, arguments)
        failpoint(f"{name}.before")
        send = partial(self._client.execute_command, name, *arguments, **_options(name, arguments))
        try:
            reply = self._retrying(send, self._server_timeout_s, size=_size_of(arguments))
        except WrongType as error:  # unlike a function's, this reply does not name the key
            keys = [str(part) for part in arguments if str(part).startswith("penstock:")]
            command = " ".join([name, *keys])
            raise WrongType(f"`{command}`: start `learner` to restore the key: {error}") from error
        failpoint(f"{name}.after")
        return reply

    def call(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Call a function of functions.lua on the server, such as "bury", and return its reply.

        Its name on the server is "penstock_4_bury". `keys` (at least one) and `args` are the function's
        two lists of arguments. The call is sent again while the server is away, busy or full, so it must
        be idempotent. Raise the errors of `Connection.execute`, such as ServerUnavailable and
        RunNotReady.
        """
        return self.call_each(function, keys, [args])[0]

    def call_each(
        self, function: str, keys: Sequence[str], calls: Sequence[Sequence[Argument]]
    ) -> list[Any]:
        """Call a function of functions.lua once per item of `calls`, in one round trip.

        Each item has one call's arguments; all have the same `keys`, at least one. Return the replies in
        order. All are sent again while the server is away, busy or full, so they must be idempotent. The
        first refused call raises an error of `Connection.execute`, such as RunNotReady; others had their
        effect. Raise ValueTooLarge, before sending, for a too large argument.
        """
        for args in calls:
            self._check_sizes(f"`{function}` of {keys[-1]}", args)
        command = "FCALL_RO" if function in _READ_ONLY else "FCALL"
        head: tuple[Argument, ...] = (command, f"penstock_4_{function}", len(keys), *keys)
        failpoint(f"{function}.before")
        send, size = (
            partial(self._send_all, [(*head, *args) for args in calls]),
            sum(map(_size_of, calls)),
        )
        replies: list[Any] = self._retrying(send, self._server_timeout_s, size=size)
        failpoint(f"{function}.after")
        return replies

    def check_size(self, value: bytes | str, what: str) -> None:
        """Raise ValueTooLarge, naming `what`, if `value` has more bytes than the server takes at once.

        The caller must not send this value: the server would close the connection, which looks like a
        lost server. A text counts in UTF-8. For a value over 1 MiB less 4 KiB the server is asked for
        its limit, and retried while away: raise ServerUnavailable if it does not answer in time.
        """
        size = len(value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass"))
        if size <= _ALWAYS_TAKEN:
            return
        limit = self._retrying(self._largest_value, self._server_timeout_s)
        if size > limit:
            raise ValueTooLarge(
                f"{what} has {size:,} bytes, but the queue server at {self.address} takes at most "
                f"{limit:,} bytes in one value: raise its proto-max-bulk-len and "
                "client-query-buffer-limit, or make the rows or completions shorter"
            )

    def _check_sizes(self, what: str, arguments: Sequence[Argument]) -> None:
        """Raise ValueTooLarge if an argument has more bytes than the server takes, as `check_size` does.

        `what` names the command in the error. Numbers are not checked. Raise ServerUnavailable if the
        server must be asked for its limit and does not answer.
        """
        for place, value in enumerate(arguments, 1):
            if isinstance(value, bytes | str) and len(value) > _ALWAYS_TAKEN // 4:
                self.check_size(value, f"argument {place} of {what}")

    def _largest_value(self) -> int:
        """Ask the server how many bytes a value may have, and return this number.

        The number is the lesser of proto-max-bulk-len and client-query-buffer-limit less 4096; 512 MiB
        if the server refuses the question, which most users may not ask. Raise redis's errors if the
        connection is lost.
        """
        try:
            found: Any = self._client.config_get("proto-max-bulk-len", "client-query-buffer-limit")
        except redis.exceptions.ResponseError:
            return _USUAL_LIMIT
        buffer = int(found.get("client-query-buffer-limit", 2 * _USUAL_LIMIT)) - 4096  # holds more
        return min(int(found.get("proto-max-bulk-len", _USUAL_LIMIT)), buffer)

    def _send_all(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        """Send commands, each a name with its arguments, as one pipeline. Return the replies in order.

        All replies are read; then the first one that is an error is raised, of redis's class. The other
        commands had their effect. Raise redis's errors if the connection is lost.
        """
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        # With raise_on_error redis-py puts the command before the error's text, which is read here.
        replies = pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def load_functions(self) -> None:
        """Load functions.lua into the server, in place of functions that an older release loaded.

        If this user may not load functions, check that the server has the same ones, and raise
        ConfigError if not, NotPermitted if the user may not list them either. Raise ServerUnavailable if
        the server does not answer.
        """
        source = files("penstock.common.broker").joinpath("functions.lua").read_text()
        try:
            self.execute("FUNCTION", "LOAD", "REPLACE", source)
        except NotPermitted as error:
            library = self.execute("FUNCTION", "LIST", "LIBRARYNAME", "penstock_4", "WITHCODE")
            if source.encode() not in _leaves(library):
                raise ConfigError(
                    f"the queue server {self.address} lacks this release's functions, and this user may "
                    "not load any: let an operator run `queues acl` with this release"
                ) from error

    def check_eviction(self) -> None:
        """Raise ConfigError if the server may delete keys when its memory is full (maxmemory-policy).

        Raise ServerUnavailable if the server does not answer within the server's timeout.
        """
        self._check_eviction(self._server_timeout_s)

    def close(self) -> None:
        """Close all sockets to the server, in use or not. A later command opens a new one."""
        self._client.connection_pool.disconnect()

    def _retrying(
        self, send: Callable[[], Any], timeout_s: float, first: bool = False, size: int = 0
    ) -> Any:
        """Return what `send` returns. Call `send` every 0.2 s while the server is away, busy or full.

        The wait is logged every 10 s, and its end, with the command's `size` in bytes if it is large.
        After success on a new socket, count and log a restart of the server. `first`, for the first
        command of a connection: no log lines, no check for a restart. Raise ServerUnavailable after
        `timeout_s` of failures, if the caller asked to stop during the wait, or for an unknown refusal.
        Raise ConfigError for a wrong login, TLS, version or owner, and RunTaken, RunNotReady,
        NotPermitted or WrongType by the server's reply.
        """
        lost: Deadline | None = None
        while True:
            try:
                reply = send()
                if self._new_socket.is_set() and not first:
                    self._notice_restart()
                if lost is not None and not first:
                    log.info(f"The queue server answers again after {lost.waited_s:.1f} s.")
                return reply
            except (redis.exceptions.RedisError, OSError, ValueError) as error:
                self._raise_unless_passing(error)
                cause = error
            self.interruptions += 1
            # Also after a refusal: another server may have this address by now.
            self._client.connection_pool.disconnect(inuse_connections=False)
            report = not first and (lost is None or lost.report_due(_REPORT_EVERY_S))
            lost = lost or Deadline(timeout_s, longest_gap_s=2 * _SOCKET_TIMEOUT_S)
            self._wait(lost, cause, size, report)

    def _raise_unless_passing(self, error: Exception) -> None:
        """Raise one of Penstock's errors for an `error` of redis-py that no wait can help; else return.

        Return also for what is no reply of a server: the rest of it on this socket cannot be read.
        Errors of the arguments are raised as they are. Raise ConfigError for a wrong login.
        """
        if isinstance(error, redis.exceptions.AuthenticationError):
            raise ConfigError(
                f"the queue server {self.address} refused the login: {error}. Correct the user and "
                "password in REDIS_URL, or in the file of REDIS_URL_FILE"
            ) from error
        if isinstance(error, redis.exceptions.ResponseError):
            raise_unless_passing(error, self.address)
        elif isinstance(
            error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError | OSError
        ):
            check_handshake(error, self.server)
        elif isinstance(error, UnicodeError | redis.exceptions.DataError):
            raise error

    def _wait(self, lost: Deadline, cause: Exception, size: int, report: bool) -> None:
        """Wait 0.2 s for a server that is `lost` for `cause`, and log the wait if it is to be reported.

        `size` is the command's. Raise ServerUnavailable if the time is over, or if told to stop.
        """
        why = explain(cause)
        if lost.remaining_s == 0:
            raise ServerUnavailable(
                f"the queue server at {self.address} did not answer for {lost.limit_s:g} s ({why})"
                f"{_told_size(size)}; start it, or set REDIS_URL to one that runs"
            ) from cause
        if self.stopping.is_set():
            raise ServerUnavailable(
                f"told to stop while the queue server at {self.address} did not answer ({why}): "
                "start the server, then this process again"
            ) from cause
        if report:
            wait = f"Waiting for the queue server at {self.address} for {lost.remaining_s:.0f} s more"
            log.warning(shorten(f"{wait}: {why}{_told_size(size)}"))
        time.sleep(_RETRY_EVERY_S)

    def _notice_restart(self) -> None:
        """Ask the server for its process's id. If that has changed, count and log a restart.

        The event that `_on_connect` set is cleared first. Raise ConfigError if the new server is older
        than 7.0, redis's errors if it does not answer.
        """
        self._new_socket.clear()
        info = self._client.info("server")
        if info.get("run_id", "") != self.server_id:
            self.server_id = info.get("run_id", "")
            self._check_version(info)
            self.restarts += 1
            self.interruptions += 1
            log.warning(f"The queue server at {self.address} was restarted.")

    def _check_version(self, info: dict[str, Any]) -> None:
        """Raise ConfigError if the server is older than 7.0. `info` is its reply to INFO server."""
        found = str(info.get("redis_version", "0.0"))
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
            raise ConfigError(
                f"the queue server at {self.address} is version {found}; penstock needs Redis or Valkey "
                f"{OLDEST[0]}.{OLDEST[1]} or newer: upgrade it, or set REDIS_URL to another server"
            )

    def _check_eviction(self, timeout_s: float) -> None:
        """Raise ConfigError if the server may delete keys when its memory is full (maxmemory-policy).

        Raise ServerUnavailable if the server does not answer for `timeout_s`.
        """
        info = self._retrying(lambda: self._client.info("memory"), timeout_s)
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"maxmemory-policy {policy} lets the queue server at {self.address} evict keys, and so "
                "lose work: set maxmemory-policy noeviction in its configuration"
            )


class _InPieces:
    """Packs commands as redis-py does, but large ones in pieces, each of which is sent by a call.

    The timeout of a socket is that of a whole call. In one piece, 100 MB over 8 MB/s would never pass.
    """

    def __init__(self) -> None:
        self._packer = HiredisRespSerializer()

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        """Return the bytes of a command, in parts. Raise redis's DataError for another type."""
        return [piece for part in self._packer.pack(*args) for piece in _pieces(part)]


def _pieces(data: bytes) -> list[bytes] | list[memoryview]:
    """Return `data`, whole if it is short."""
    if len(data) <= _PIECE:
        return [data]
    return [memoryview(data)[start : start + _PIECE] for start in range(0, len(data), _PIECE)]


def _size_of(arguments: Sequence[Argument]) -> int:
    """Return about how many bytes the arguments have: texts count in letters, numbers not at all."""
    return sum(len(one) for one in arguments if isinstance(one, bytes | str))


def _told_size(size: int) -> str:
    """Return a clause on the size of a large command, for an error; "" if it is not large."""
    return f" to a command of {size / 1e6:.1f} MB" if size > _LARGE else ""


def _pool_options(address: ServerAddress) -> dict[str, Any]:
    """Return redis-py's options for a pool of connections to `address`: place and TLS, without login.

    A unix socket has connection_class and path; redis:// has host and port. For rediss:// there are also
    connection_class, the options of the URL, and ssl_check_hostname: True unless the URL says "false".
    """
    if address.scheme == "unix":
        return {"connection_class": redis.UnixDomainSocketConnection, "path": address.path}
    options: dict[str, Any] = {"host": address.host, "port": address.port}
    if address.scheme == "rediss":
        check_name = address.tls.get("ssl_check_hostname") != "false"
        options |= {
            "connection_class": redis.SSLConnection, **address.tls, "ssl_check_hostname": check_name
        }  # fmt: skip
    return options


def _options(name: str, arguments: Sequence[Argument]) -> dict[str, bool]:
    """Return what redis-py needs to read the reply of a command: XPENDING has two forms of replies."""
    return {"parse_detail": True} if name == "XPENDING" and len(arguments) > 2 else {}


def _leaves(reply: Any) -> Iterator[Any]:
    """Yield all values in a nested reply, in order. A reply that is not nested is yielded itself.

    Of a dictionary (a map in RESP3) only the values are yielded; in RESP2 a map is a list with names
    too.
    """
    if isinstance(reply, list | dict):
        for part in reply.values() if isinstance(reply, dict) else reply:
            yield from _leaves(part)
    else:
        yield reply


def text(value: bytes | str) -> str:
    """Return a text of a reply as str. Bytes that are not UTF-8 are escaped; a str stays as it is."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
