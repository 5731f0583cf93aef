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

from penstock.common.deadline import Deadline
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

Command = tuple[Any, ...]
"""Its name and arguments."""

log = get_logger(__name__)


class Connection:
    """A queue server that may go away and come back.

    `restarts` counts how often another server process answered than before: after kill -9 it may have
    lost acknowledged writes, so whoever relies on them looks again (PROTOCOL: a server that comes back
    is not trusted).
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

    def _on_connect(self, connection: redis.Connection) -> None:
        connection.on_connect()
        self._new_socket.set()

    def execute(self, *command: Any) -> Any:
        """Send one command that may be repeated; waits for a lost server."""
        failpoint(f"{_name(command)}.before")
        reply = self._retrying(lambda: self._client.execute_command(*command), self._server_timeout_s)
        failpoint(f"{_name(command)}.after")
        return reply

    def call(self, function: str, keys: list[str], args: list[Any]) -> Any:
        """Call one of the protocol's functions."""
        return self.execute(*_function_call(function, keys, args))

    def call_each(self, function: str, keys: list[str], calls: Sequence[list[Any]]) -> list[Any]:
        """Call a function once per list of arguments, in one round trip. Return the replies in order.

        The whole pipeline is sent again when the connection is lost or the server refuses a call for
        lack of memory, so the function must be idempotent. The failpoints are those of one call.
        """
        commands = [_function_call(function, keys, args) for args in calls]
        failpoint(f"{function}.before")
        replies = self._retrying(lambda: self._send_all(commands), self._server_timeout_s)
        failpoint(f"{function}.after")
        return replies

    def _send_all(self, commands: list[Command]) -> list[Any]:
        """Send the commands as one pipeline and return their replies. Raise the first error."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        # With raise_on_error redis-py puts the command before the error's text, which is read here.
        replies = pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def load_functions(self) -> None:
        """Put the protocol's functions on the server; only the learner does."""
        source = files("penstock.common.broker").joinpath("functions.lua").read_text()
        self.execute("FUNCTION", "LOAD", "REPLACE", source)

    def uptime(self) -> tuple[str, int]:
        """The server process that answers, and the ms it is up at least: it counts begun seconds."""
        info = self._retrying(lambda: self._client.info("server"), self._server_timeout_s)
        return info["run_id"], 1000 * max(0, int(info["uptime_in_seconds"]) - 1)

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()

    def _retrying(self, send: Any, timeout_s: float, first: bool = False) -> Any:
        lost: Deadline | None = None
        while True:
            try:
                reply = send()
                if self._new_socket.is_set() and not first:
                    self._notice_restart()
                if lost is not None:
                    log.info("queue server answers again", waited_s=round(lost.waited_s, 1))
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
            report = lost is None or lost.report_due(_REPORT_EVERY_S)
            lost = lost or Deadline(timeout_s, longest_gap_s=2 * _SOCKET_TIMEOUT_S)
            if lost.remaining_s == 0:
                raise ServerUnavailable(
                    f"the queue server at {self.address} did not answer for {timeout_s:g} s ({cause}); "
                    "start it, or set REDIS_URL to one that runs"
                ) from cause
            if self._stopping.is_set():
                raise ServerUnavailable(f"told to stop while {self.address} was away") from cause
            if report and not first:
                log.warning(
                    "waiting for the queue server",
                    address=self.address,
                    gives_up_in_s=round(lost.remaining_s),
                    cause=str(cause),
                )
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


def text(value: bytes | str) -> str:
    """What the server sent as a string."""
    return value.decode() if isinstance(value, bytes) else value


def _function_call(function: str, keys: list[str], args: list[Any]) -> Command:
    """The command that calls one of the protocol's functions."""
    return ("FCALL", f"{LIBRARY}_{function}", len(keys), *keys, *args)


def _name(command: Command) -> str:
    return command[1].removeprefix(f"{LIBRARY}_") if command[0] == "FCALL" else command[0]


def _raise_translated(error: redis.exceptions.ResponseError, address: str) -> None:
    """Raise what the reply means; return where waiting can help (the server is out of memory)."""
    text = str(error)
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
