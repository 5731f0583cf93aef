"""How many processes each `penstock up` of a run is to have, and has, on the queue server.

The hash `supervisors` has a status of each `penstock up` by name, such as "up-host12-4711-a3f09c", which
it renews each second. The hash `scale` has the requests: field "up-host12-4711-a3f09c/actor" is "3" for
three actors. A request is for one `penstock up`, and ends with it.
"""

from dataclasses import dataclass

from penstock.common.broker.connection import Connection, text
from penstock.common.broker.keys import Keys
from penstock.common.broker.process_status import LATEST_MS, read_statuses, server_time_ms
from penstock.common.errors import ConfigError
from penstock.common.wire.codec import encode
from penstock.common.wire.limits import LONGEST_NAME, MOST_NAMES, check_range, require

MOST = 4096
"""Most processes of a role that one `penstock up` starts."""

_GONE_MS = 10_000


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """A `penstock up` at the server's time `at_ms`: by role how many processes it keeps running."""

    host: str
    at_ms: int
    processes: dict[str, int]

    def __post_init__(self) -> None:
        """Raise MalformedMessage for long texts, or numbers that no `penstock up` writes."""
        require(len(self.processes) <= MOST_NAMES, "a status: found roles", len(self.processes))
        for name in (self.host, *self.processes):
            require(len(name) <= LONGEST_NAME, "a status: expected a short text, found", name)
        check_range("at_ms", self.at_ms, 0, LATEST_MS)
        for count in self.processes.values():
            check_range("a count", count, 0, MOST)


class Scale:
    """The requested and running processes of a run. The methods raise Connection.execute's errors."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection, self._keys = connection, keys

    def write_status(self, name: str, host: str, processes: dict[str, int]) -> None:
        """Write the status of the `penstock up` called `name` on `host`."""
        status = SupervisorStatus(host, server_time_ms(self._connection), processes)
        self._connection.execute("HSET", self._keys.supervisors, name, encode(status))

    def leave(self, name: str) -> None:
        """Remove the status of `name`."""
        self._connection.execute("HDEL", self._keys.supervisors, name)

    def requests(self, name: str) -> dict[str, int]:
        """Return by role how many processes the `penstock up` called `name` is to have.

        What another client wrote in another form is left out.
        """
        found = {}
        for field, count in self._connection.execute("HGETALL", self._keys.scale).items():
            up, _, role = text(field).rpartition("/")
            if up == name and count.isdigit() and len(count) < 5:
                found[role] = min(int(count), MOST)
        return found

    def running(self) -> dict[str, SupervisorStatus]:
        """Return the status of each `penstock up` that runs, by name."""
        now_ms = server_time_ms(self._connection)
        statuses, _ = read_statuses(self._connection, self._keys.supervisors, SupervisorStatus)
        return {name: one for name, one in statuses.items() if abs(now_ms - one.at_ms) < _GONE_MS}

    def request(self, name: str, role: str, count: int) -> None:
        """Ask the `penstock up` called `name` for `count` processes of `role`. Forget gone ones."""
        fields, running = self._connection.execute("HGETALL", self._keys.scale), self.running()
        if old := [one for one in fields if text(one).rpartition("/")[0] not in running]:
            self._connection.execute("HDEL", self._keys.scale, *old)
        statuses = self._connection.execute("HGETALL", self._keys.supervisors)
        if gone := [one for one in statuses if text(one) not in running]:
            self._connection.execute("HDEL", self._keys.supervisors, *gone)
        self._connection.execute("HSET", self._keys.scale, f"{name}/{role}", count)

    def choose(self, host: str, role: str) -> str:
        """Return the name of the `penstock up` that is called `host` or runs there, and has `role`.

        With `host` "" there must be only one. Raise ConfigError, with all that there are, for none or
        several.
        """
        ups = self.running()
        fitting = [
            name for name, one in ups.items() if role in one.processes and host in ("", name, one.host)
        ]
        if len(fitting) == 1:
            return fitting[0]
        there = "; ".join(f"{name} with {', '.join(one.processes)}" for name, one in ups.items())
        raise ConfigError(
            f"found {len(fitting)} `penstock up` with the role {role}{f' on {host}' if host else ''} "
            f"to scale, expected one. There are: {there or 'none'}. Name one with --host"
        )
