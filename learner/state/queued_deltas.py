"""The newest deltas on the queue server itself, for actors that fetch them from there."""

from pathlib import Path

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.errors import CommandRefused, NotPermitted, WrongType
from penstock.common.log import get_logger
from penstock.common.wire.messages import Delta

_EXPIRE_S = 3600
_MOST_FULL = 0.8
"""Part of the server's maxmemory that may be used with a delta. The rest is for the run's work."""

log = get_logger(__name__)


class QueuedDeltas:
    """Keeps deltas in the run's hash `deltas`, `most` bytes of them at most (RUN_DELTA_MIB).

    The hash expires an hour after the last delta.
    """

    def __init__(self, connection: Connection, keys: Keys, most: int) -> None:
        self._connection, self._key, self._most = connection, keys.deltas, most
        self._held: dict[str, Delta] = {}
        self._logged = ""

    def put(self, delta: Delta, file: Path) -> None:
        """Put a delta, the content of `file`, on the server, if there is room for it.

        The oldest ones go, and what another learner left. What the server refuses is logged once: an
        actor finds the delta elsewhere. Raise OSError if the file cannot be read, ServerUnavailable.
        """
        try:
            self._make_room(delta.size)
            if delta.size > self._most or not self._has_memory(delta.size):
                return
            with file.open("rb") as source:
                for name, size in delta.parts():
                    if not self._has_memory(size):  # others may have filled it meanwhile
                        return
                    self._connection.execute("HSET", self._key, name, source.read(size))
                    self._connection.execute("EXPIRE", self._key, _EXPIRE_S)
        except (NotPermitted, CommandRefused, WrongType) as error:
            self._report(f"The deltas of the weights are not put on the queue server: {error}")
            return
        self._held[delta.hash] = delta

    def _make_room(self, size: int) -> None:
        """Delete the oldest deltas from the server until there is room for one more, and all else."""
        while self._held and sum(one.size for one in self._held.values()) + size > self._most:
            del self._held[next(iter(self._held))]
        held = {name.encode() for one in self._held.values() for name, _ in one.parts()}
        try:
            others = set(self._connection.execute("HKEYS", self._key)) - held
        except WrongType:  # another client's key
            self._connection.execute("DEL", self._key)
            return self._held.clear()
        if others:
            self._connection.execute("HDEL", self._key, *others)

    def _has_memory(self, size: int) -> bool:
        """Return whether the server has memory for so many bytes more, else delete all deltas there."""
        info = self._connection.execute("INFO", "memory")
        limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
        if limit == 0 or used + size <= _MOST_FULL * limit:
            self._logged = ""
            return True
        self._connection.execute("DEL", self._key)
        self._held.clear()
        self._report(
            f"The queue server uses {used:,} of {limit:,} bytes (maxmemory), and gets no deltas of the "
            f"weights, such as one of {size:,} bytes: raise maxmemory, or set RUN_DELTA_MIB=0."
        )
        return False

    def _report(self, fault: str) -> None:
        """Log a fault, unless the last one began with the same words."""
        if fault[:30] != self._logged:
            self._logged = fault[:30]
            log.warning(fault)
