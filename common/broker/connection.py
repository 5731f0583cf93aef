"""The only module that imports redis: one server, commands that survive its absence.

redis-py's own retries are off, because it would repeat what must not be repeated. Everything sent
through here may be sent again after a lost reply: the protocol's functions find nothing left to do,
and a read whose reply was lost leaves entries that the lease brings back.
"""

import threading
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.common.errors import ConfigError, RunNotReady, RunTaken, ServerUnavailable
from penstock.common.failpoint import failpoint
from penstock.common.log import get_logger

LIBRARY = "penstock_2"
BLOCK_MS = 1000
"""Longest blocking read; far below the socket's time-out."""

_SOCKET_TIMEOUT_S = 10.0
_RETRY_EVERY_S = 0.2
_REPORT_EVERY_S = 10.0
_OLDEST = (7, 0)
_TIME_STOPS = (7, 2)
"""From this version on, no time passes within a transaction."""
_DISCARDED = "Transaction discarded because of: "

Command = tuple[Any, ...]
"""Its name and arguments."""

log = get_logger(__name__)


class Connection:
    """A queue server that may go away and come back.

    `restarts` counts how often another server process answered than before: after kill -9 it may have
    lost acknowledged writes, so whoever relies on them looks again (PROTOCOL: a server that comes back
    is not trusted). `transacts` says whether it takes transactions within which no time passes.
    """

    def __init__(
        self,
        url: str,
        connect_timeout_s: float,
        server_timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> None:
        self.address = _without_password(url)
        self.restarts = 0
        self._server_timeout_s = server_timeout_s
        self._takes_multi = False
        self._new_socket = threading.Event()
        self._stopping = stopping or threading.Event()
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=min(connect_timeout_s, _SOCKET_TIMEOUT_S),
                retry=Retry(NoBackoff(), 0),
                redis_connect_func=self._on_connect,
            )
        except ValueError as error:
            raise ConfigError(f"REDIS_URL {self.address!r}: {error}") from error
        self._server_id = ""
        info = self._retrying(lambda: self._client.info("server"), connect_timeout_s, first=True)
        self._server_id = info["run_id"]
        self._new_socket.clear()
        self._check_version(info)
        self._check_eviction(connect_timeout_s)

    def _on_connect(self, connection: Any) -> None:
        connection.on_connect()
        self._takes_multi = _takes_multi(connection)
        self._new_socket.set()

    @property
    def transacts(self) -> bool:
        """Whether `transact_all` may be used: not on old servers, nor where MULTI is refused."""
        return self._time_stops and self._takes_multi

    def execute(self, *command: Any) -> Any:
        """Send one command that may be repeated; waits for a lost server."""
        failpoint(f"{_name(command)}.before")
        reply = self._retrying(lambda: self._client.execute_command(*command), self._server_timeout_s)
        failpoint(f"{_name(command)}.after")
        return reply

    def transact_all(self, transactions: Sequence[Sequence[Command]]) -> list[list[Any]]:
        """Send transactions that may be repeated, in one round trip; the replies to each one's commands.

        An error is raised as by `execute`. A transaction with a command that the server refuses is not
        done; one with a command that fails while it runs is done but for that command, and may be
        done so again. Others may have been done then. The failpoints around them have the name of the
        first one's last command.
        """
        if not transactions:
            return []
        replies: dict[int, list[Any]] = {}
        name = _name(transactions[0][-1])
        failpoint(f"{name}.before")
        while len(replies) < len(transactions):  # some were done: the others have the whole time again
            self._retrying(lambda: self._send_rest(transactions, replies), self._server_timeout_s)
        failpoint(f"{name}.after")
        return [replies[number] for number in range(len(transactions))]

    def call(self, function: str, keys: list[str], args: list[Any]) -> Any:
        """Call one of the protocol's functions."""
        return self.execute(*function_call(function, keys, args))

    def _send_rest(
        self, transactions: Sequence[Sequence[Command]], replies: dict[int, list[Any]]
    ) -> None:
        """Send those without replies, each as soon as it is packed: the server works meanwhile.

        (redis-py's pipeline packs all before it sends any.) Raises the first error if none was done.
        """
        rest = [number for number in range(len(transactions)) if number not in replies]
        errors = []
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            if not self.transacts:
                raise ConfigError(f"the queue server at {self.address} refuses MULTI by now")
            for number in rest:
                packed = connection.pack_commands([("MULTI",), *transactions[number], ("EXEC",)])
                # A health check in between would take the reply to a command for its own.
                connection.send_packed_command(packed, check_health=False)
            for number in rest:
                try:
                    replies[number] = _read_transaction(connection, len(transactions[number]))
                except redis.exceptions.ResponseError as error:
                    errors.append(error)
        except BaseException:
            connection.disconnect()  # else the next command would be given the replies to these
            raise
        finally:
            pool.release(connection)
        if errors and len(errors) == len(rest):
            raise errors[0]

    def load_functions(self) -> None:
        """Put the protocol's functions on the server; only the learner does."""
        source = files("penstock.common.broker").joinpath("functions.lua").read_text()
        self.execute("FUNCTION", "LOAD", "REPLACE", source)

    def info(self) -> dict[str, Any]:
        """The server's INFO."""
        return self._retrying(self._client.info, self._server_timeout_s)

    def uptime(self) -> tuple[str, int]:
        """The server process that answers, and the ms it is up at least: it counts begun seconds."""
        info = self._retrying(lambda: self._client.info("server"), self._server_timeout_s)
        return info["run_id"], 1000 * max(0, int(info["uptime_in_seconds"]) - 1)

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()

    def _retrying(self, send: Any, timeout_s: float, first: bool = False) -> Any:
        lost_at: float | None = None
        reported_at = 0.0
        while True:
            try:
                reply = send()
                if self._new_socket.is_set() and not first:
                    self._notice_restart()
                if lost_at is not None:
                    log.info("queue server answers again", waited_s=round(time.monotonic() - lost_at, 1))
                return reply
            except redis.exceptions.AuthenticationError as error:
                raise ConfigError(f"queue server {self.address}: {error}; see REDIS_URL") from error
            except redis.exceptions.BusyLoadingError as error:
                cause: Exception = error
            except redis.exceptions.ResponseError as error:
                _raise_translated(error, self.address)
                cause = error
            except (
                redis.exceptions.ConnectionError,
                redis.exceptions.TimeoutError,
                OSError,
            ) as error:
                cause = error
            now = time.monotonic()
            lost_at = now if lost_at is None else lost_at
            if now - lost_at >= timeout_s:
                raise ServerUnavailable(
                    f"the queue server at {self.address} did not answer for {timeout_s:g} s ({cause}); "
                    "start it, or set REDIS_URL to one that runs"
                ) from cause
            if self._stopping.is_set():
                raise ServerUnavailable(f"told to stop while {self.address} was away") from cause
            if now - reported_at >= _REPORT_EVERY_S and not first:
                left_s = round(timeout_s - (now - lost_at))
                log.warning(
                    "waiting for the queue server",
                    address=self.address,
                    gives_up_in_s=left_s,
                    cause=str(cause),
                )
                reported_at = now
            time.sleep(_RETRY_EVERY_S)

    def _notice_restart(self) -> None:
        self._new_socket.clear()
        info = self._client.info("server")
        if info["run_id"] != self._server_id:
            self._server_id = info["run_id"]
            self._check_version(info)
            self.restarts += 1
            log.warning("the queue server was restarted", address=self.address)

    def _check_version(self, info: dict[str, Any]) -> None:
        found = str(info["redis_version"])
        version = tuple(int(part) for part in found.split(".")[:2])
        self._time_stops = version >= _TIME_STOPS
        if version < _OLDEST:
            raise ConfigError(
                f"the queue server at {self.address} is version {found}; penstock needs Redis or Valkey "
                f"{_OLDEST[0]}.{_OLDEST[1]} or newer"
            )

    def _check_eviction(self, timeout_s: float) -> None:
        memory = self._retrying(lambda: self._client.info("memory"), timeout_s)
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"the queue server at {self.address} may evict keys (maxmemory-policy {policy}) and so "
                "lose work: set maxmemory-policy noeviction"
            )


def function_call(function: str, keys: list[str], args: list[Any]) -> Command:
    """The command that calls one of the protocol's functions."""
    return ("FCALL", f"{LIBRARY}_{function}", len(keys), *keys, *args)


def _takes_multi(connection: Any) -> bool:
    """Whether this user may begin transactions; raises NoPermissionError if it may not end them.

    Asked on each new socket: behind a MULTI that is refused the commands would run one by one.
    """
    try:
        connection.send_command("MULTI", check_health=False)
        connection.read_response()
    except redis.exceptions.ResponseError:
        return False
    connection.send_command("EXEC", check_health=False)
    connection.read_response()
    return True


def _read_transaction(connection: Any, commands: int) -> list[Any]:
    """The replies to the commands; raises the first error, when all answers have been read."""
    errors: list[Exception] = []
    replies: list[Any] = []
    for _ in range(commands + 2):  # OK, QUEUED for each, and what EXEC gives
        try:
            replies = connection.read_response()
        except redis.exceptions.ResponseError as error:
            errors.append(error)
    if not errors:
        errors = [reply for reply in replies if isinstance(reply, Exception)]
    if errors:
        raise errors[0]
    return replies


def _name(command: Command) -> str:
    return command[1].removeprefix(f"{LIBRARY}_") if command[0] == "FCALL" else command[0]


def _raise_translated(error: redis.exceptions.ResponseError, address: str) -> None:
    """Raise what the reply means; return where waiting can help (the server is out of memory)."""
    text = str(error).removeprefix(_DISCARDED)
    if text.startswith("FENCED"):
        raise RunTaken(
            f"{text.removeprefix('FENCED ')}: this learner was superseded and stops"
        ) from error
    if text.startswith("TAKEN"):
        raise RunTaken(f"{text.removeprefix('TAKEN ')} ({address})") from error
    if text.startswith("FOREIGN"):
        raise ConfigError(
            f"{text.removeprefix('FOREIGN ')} ({address}): choose another RUN_NAME, use another server, "
            "or discard what it holds with `queues discard`"
        ) from error
    if text.startswith("NOTREADY"):
        raise RunNotReady(f"{address}: {text.removeprefix('NOTREADY ')}") from error
    if text.startswith("NOGROUP") or "Function not found" in text:
        raise RunNotReady(f"the learner has not set the run up on {address} (yet)") from error
    if isinstance(error, redis.exceptions.NoPermissionError) or text.startswith("NOPERM"):
        raise ConfigError(f"the queue server {address} refuses this user: {error}") from error
    if isinstance(error, redis.exceptions.OutOfMemoryError) or text.startswith(("OOM", "MISCONF")):
        return
    raise error


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url
