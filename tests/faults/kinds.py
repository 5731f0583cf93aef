"""The kinds of faults: how each begins and ends, whom it may befall, and how long it lasts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from penstock.common.broker.connection import Connection
from penstock.common.errors import CommandRefused, PenstockError
from tests.faults.proxy import Weather
from tests.faults.world import ACTOR, LEARNER, ROLES, SERVER, World

Begin = Callable[[World, str], AbstractContextManager[None]]
STRANGE = (b"-STRANGE words of a server\r\n", b"HTTP/1.1 502 Bad Gateway\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: `begin(world, role)` is its context. It befalls one of `roles`.

    It lasts one of `seconds`, or `long_s` now and then; `whole_s` in the full form. `ends` has the exit
    codes that a process may end with: it is started again.
    """

    name: str
    begin: Begin
    roles: tuple[str, ...] = ROLES
    seconds: float = 5.0
    long_s: float = 0.0
    whole_s: float = 0.0
    ends: frozenset[int] = frozenset()
    on_host: bool = False


def weather(**options: float | bool | bytes) -> Begin:
    """A network with this weather."""

    @contextmanager
    def begin(world: World, role: str) -> Iterator[None]:
        given = dict(options)
        if "answer" in given:
            given["answer"] = world.random.choice(STRANGE)
        world.proxies[role].weather = Weather(**given)  # type: ignore[arg-type]
        try:
            yield
        finally:
            world.proxies[role].weather = Weather()

    return begin


@contextmanager
def forgotten(world: World, role: str) -> Iterator[None]:
    """Connections that are gone without FIN."""
    world.proxies[role].forget()
    yield


@contextmanager
def stopped(world: World, role: str) -> Iterator[None]:
    """A process that does nothing, with all its sockets open."""
    pid = world.pid_of(role)
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGCONT)


def clock(seconds: int) -> Begin:
    """The clock of a role, or the server, in another hour, and back."""

    @contextmanager
    def begin(world: World, role: str) -> Iterator[None]:
        world.hosts[role].set_clock(seconds)
        try:
            yield
        finally:
            world.hosts[role].mend()

    return begin


def config(name: str, value: str, normal: str) -> Begin:
    """A server with another setting for a while."""

    @contextmanager
    def begin(world: World, _: str) -> Iterator[None]:
        world.admin.execute("CONFIG", "SET", name, value)
        try:
            yield
        finally:
            world.admin.execute("CONFIG", "SET", name, normal)

    return begin


@contextmanager
def replica(world: World, _: str) -> Iterator[None]:
    """A server that is the replica of a dead one."""
    world.admin.execute("REPLICAOF", "127.0.0.1", 1)
    try:
        yield
    finally:
        world.admin.execute("REPLICAOF", "NO", "ONE")


@contextmanager
def busy(world: World, _: str) -> Iterator[None]:
    """A script that runs until it is killed; the server says BUSY after 1 s."""
    world.admin.execute("CONFIG", "SET", "busy-reply-threshold", 1000)
    other = Connection(world.server.url, 30, 0.1)

    def loop() -> None:
        with contextlib.suppress(PenstockError):
            other.execute("EVAL", "while true do end", 0)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        while _kill_script(world.admin) or thread.is_alive():
            time.sleep(0.1)
        other.close()


def _kill_script(connection: Connection) -> bool:
    """Whether a script ran, which is killed."""
    try:
        connection.execute("SCRIPT", "KILL")
    except CommandRefused:  # NOTBUSY
        return False
    return True


def killed(*, emptied: bool) -> Begin:
    """A server that is killed and started again, without its data if `emptied`."""

    @contextmanager
    def begin(world: World, _: str) -> Iterator[None]:
        world.server.kill()
        try:
            yield
        finally:
            if emptied:
                world.server.empty()
            world.server.start()

    return begin


def disk(error: str) -> Begin:
    """A disk of a role, or the server, that fails with this error."""

    @contextmanager
    def begin(world: World, role: str) -> Iterator[None]:
        world.hosts[role].fail(error)
        try:
            yield
        finally:
            world.hosts[role].mend()

    return begin


@contextmanager
def server_disk(world: World, role: str) -> Iterator[None]:
    """The server's disk full for a while, and then what docs/operations.md tells the operator to do."""
    with disk("ENOSPC")(world, role):
        yield
    deadline = time.monotonic() + 3.0
    while world.admin.execute("INFO")["aof_last_write_status"] != "ok":
        if time.monotonic() > deadline:  # a sync failed, which the server never tries again
            world.admin.execute("CONFIG", "SET", "appendonly", "no")
            world.admin.execute("CONFIG", "SET", "appendonly", "yes")
        time.sleep(0.2)


_ANY = (*ROLES, SERVER)
_DISK = (LEARNER, ACTOR)
_FAILS = frozenset({71, 74})
KINDS = {
    kind.name: kind
    for kind in (
        Kind("latency", weather(latency_s=0.5), seconds=10.0),
        Kind("black hole", weather(up_cut=True, down_cut=True), long_s=40.0, whole_s=90.0),
        Kind("requests cut", weather(up_cut=True), long_s=40.0),
        Kind("replies cut", weather(down_cut=True), long_s=40.0),
        Kind("3 KB/s", weather(bytes_per_s=3000), seconds=10.0),
        Kind("resets", weather(resets=True)),
        Kind("strange replies", weather(answer=b"-"), ends=frozenset({69})),
        Kind("connections lost", forgotten, seconds=0.1),
        Kind("stopped", stopped, _ANY, long_s=40.0, whole_s=100.0),
        Kind("clock +1 h", clock(3600), _ANY, on_host=True),
        Kind("clock -1 h", clock(-3600), _ANY, on_host=True),
        Kind("memory full", config("maxmemory", "1", "0"), (SERVER,), long_s=40.0),
        Kind("READONLY", replica, (SERVER,), long_s=40.0),
        Kind("NOREPLICAS", config("min-replicas-to-write", "1", "0"), (SERVER,)),
        Kind("BUSY", busy, (SERVER,), long_s=40.0),
        Kind("killed", killed(emptied=False), (SERVER,), long_s=40.0),
        Kind("emptied", killed(emptied=True), (SERVER,), ends=frozenset({75})),
        Kind("MISCONF", server_disk, (SERVER,), long_s=40.0, on_host=True),
        Kind("disk full", disk("ENOSPC"), (LEARNER,), long_s=40.0, on_host=True),
        Kind("EIO", disk("EIO"), _DISK, long_s=40.0, ends=_FAILS, on_host=True),
        Kind("ESTALE", disk("ESTALE"), _DISK, long_s=40.0, ends=_FAILS, on_host=True),
        Kind("EROFS", disk("EROFS"), (LEARNER,), long_s=40.0, ends=_FAILS, on_host=True),
    )
}


def possible(world: World) -> list[Kind]:
    """The kinds that can be had here: those of disk and clock need a C compiler."""
    return [kind for kind in KINDS.values() if world.hosts or not kind.on_host]
