"""Checks of the queue server: that of REDIS_URL, or the program for one of the run's own."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.server_binary import find_binary
from penstock.common.config.redis_url import ServerAddress
from penstock.common.errors import ConfigError, NotPermitted, PenstockError, ServerUnavailable
from penstock.deploy.doctor.finding import Finding
from penstock.deploy.doctor.machine import MIB
from penstock.deploy.doctor.settings import Settings

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_PINGS = 100
_SLOW_MS = 20.0
_LARGEST_VALUE = 64 * MIB
_LEAST_MEMORY = 64 * MIB
_WHY = "no role can start without a queue server"
_TOKEN = 32  # bytes of a token in a group on the server, with its log-probability and version


class _Examined(Connection):
    """A connection to a server whose eviction policy is reported here, not raised."""

    def _check_eviction(self, timeout_s: float) -> None:
        """Do nothing. The time `timeout_s` is not used."""


def check_server(settings: Settings, removal: str, overcommit: Path = _OVERCOMMIT) -> Iterator[Finding]:
    """Yield findings on the queue server that the settings name, or on the program of the run's own.

    `removal` is the remedy that takes REDIS_URL away, after which `penstock up` starts a server.
    `overcommit` is the kernel's file of vm.overcommit_memory.
    """
    try:
        if not settings.redis_url:
            find_binary()
            return
        server = _connect(settings)
    except ServerUnavailable as error:
        yield Finding("server", "error", str(error), _WHY, removal)
    except (ConfigError, OSError, subprocess.TimeoutExpired) as error:
        correct = "do: correct REDIS_URL, or the server"
        remedy = correct if settings.redis_url else "type: pip install 'penstock[queue]'"
        yield Finding("server", "error", str(error), _WHY, remedy)
    else:
        yield from _check_connected(server, settings, overcommit)


def _connect(settings: Settings) -> Connection:
    """Return a connection to the server of the settings. Raise the errors of Connection."""
    run = settings.run
    timeouts = run.connect_timeout_s, run.server_timeout_s
    return _Examined(settings.redis_url, *timeouts, None, run.allow_open_server)


def _check_connected(server: Connection, settings: Settings, overcommit: Path) -> Iterator[Finding]:
    """Yield findings on a server that answers, and close the connection. The others as check_server."""
    try:
        yield from _check_memory(server, settings)
        yield from _check_configuration(server)
        yield from _check_latency(server)
        yield from _check_overcommit(server, overcommit)
    except PenstockError as error:
        remedy = "do: give this user the rights of a learner (`queues acl`)"
        yield Finding("server", "error", str(error), _WHY, remedy)
    finally:
        server.close()


def _check_memory(server: Connection, settings: Settings) -> Iterator[Finding]:
    """Yield findings on the server's memory and its part. Raise as Connection.execute does."""
    info = _info(server)
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found = f"the queue server {server.address} has maxmemory-policy {policy}"
        why = "it deletes keys when its memory is full, and so loses work: every role refuses it"
        yield _set(server, "error", found, why, "maxmemory-policy", "noeviction")
    learner = settings.learner
    tokens = learner.max_prompt_length + learner.num_generations * learner.max_completion_length
    needed = max(_LEAST_MEMORY, learner.credit * tokens * _TOKEN + int(info.get("used_memory", 0)))
    if 0 < int(info.get("maxmemory", 0)) < needed:
        found = f"the queue server {server.address} may use {int(info['maxmemory']) // MIB} MiB"
        why = f"the run's open tickets take up to {needed // MIB} MiB: a full server halts the run"
        yield _set(server, "warning", found, why, "maxmemory", str(needed))
    if info.get("role") not in (None, "master"):
        found = f"the queue server {server.address} is a replica"
        why = "it takes no writes"
        yield Finding("server", "error", found, why, _typed(server.server, "REPLICAOF NO ONE"))


def _check_configuration(server: Connection) -> Iterator[Finding]:
    """Yield findings on what the server stores and takes. Raise as Connection.execute does."""
    try:
        configuration = _configuration(server)
    except NotPermitted:
        return  # a role's user may not ask, and need not
    if configuration.get("appendonly") == "no" and not configuration.get("save"):
        found = f"the queue server {server.address} stores nothing on its disk"
        why = "when it restarts, work in flight is lost and done again"
        yield _set(server, "warning", found, why, "appendonly", "yes")
    if int(configuration.get("proto-max-bulk-len", _LARGEST_VALUE)) < _LARGEST_VALUE:
        found = f"the queue server {server.address} takes values of few bytes (proto-max-bulk-len)"
        why = "a group with long completions is too large for it and ends dead"
        yield _set(server, "warning", found, why, "proto-max-bulk-len", str(512 * MIB))


def _check_latency(server: Connection) -> Iterator[Finding]:
    """Yield a finding if the median of 100 calls takes over 20 ms. Raise as Connection.execute does."""
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        server.execute("PING")
        times.append(1000 * (time.perf_counter() - start))
    if (median := statistics.median(times)) > _SLOW_MS:
        found = f"the queue server {server.address} answers after {median:.0f} ms"
        why = "each group costs several calls, so actors and rewarders wait"
        remedy = "do: use a server that is nearer, or with less load"
        yield Finding("server", "warning", found, why, remedy)


def _check_overcommit(server: Connection, overcommit: Path) -> Iterator[Finding]:
    """Yield a finding if the kernel may refuse a server on this machine the copy that it saves from.

    `overcommit` is the file of vm.overcommit_memory. A server elsewhere, over TCP, is left out.
    """
    local = server.server.scheme == "unix" or server.server.host in ("localhost", "127.0.0.1", "::1")
    try:
        mode = overcommit.read_text().strip()
    except OSError:  # no Linux
        return
    if local and mode != "1":
        found = f"vm.overcommit_memory is {mode}, on the machine of the queue server"
        why = "with much data in memory, the server may not be able to write its file anew"
        yield Finding("overcommit", "info", found, why, "type: sysctl vm.overcommit_memory=1")


def _info(server: Connection) -> dict[str, Any]:
    """Return the server's INFO by name. Raise as Connection.execute does."""
    reply = server.execute("INFO")
    assert isinstance(reply, dict)
    return reply


def _configuration(server: Connection) -> dict[str, str]:
    """Return the parameters of the server that matter here. Raise as Connection.execute does."""
    names = ("appendonly", "save", "proto-max-bulk-len")
    reply = server.execute("CONFIG", "GET", *names)
    if isinstance(reply, dict):
        return {text(name): text(value) for name, value in reply.items()}
    words = [text(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _set(server: Connection, severity: Any, found: str, why: str, name: str, value: str) -> Finding:
    """Return a finding whose remedy sets a parameter of the server."""
    return Finding("server", severity, found, why, _typed(server.server, f"CONFIG SET {name} {value}"))


def _typed(address: ServerAddress, command: str) -> str:
    """Return the remedy that sends a command by redis-cli, or by valkey-cli if that alone is here.

    A password is not shown: PASSWORD stands for it.
    """
    program = (
        "valkey-cli" if shutil.which("valkey-cli") and not shutil.which("redis-cli") else "redis-cli"
    )
    place = f"-s {address.path}" if address.scheme == "unix" else f"-h {address.host} -p {address.port}"
    login = "" if address.password is None else "REDISCLI_AUTH=PASSWORD "
    user = f" --user {address.username}" if address.username else ""
    tls = " --tls" if address.scheme == "rediss" else ""
    return f"type: {login}{program} {place}{user}{tls} {command}"
