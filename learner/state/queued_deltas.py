"""The newest deltas on the queue server itself, for actors that fetch them from there."""

from pathlib import Path

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.log import get_logger
from penstock.common.wire.messages import DELTA_PART, Delta

_EXPIRE_S = 3600
_MOST_FULL = 0.8
"""Part of the server's maxmemory that may be used with a delta. The rest is for the run's work."""

log = get_logger(__name__)


class QueuedDeltas:
    """Keeps deltas in the run's hash `deltas`, `most` bytes of them at most (RUN_DELTA_MIB).

    The hash expires an hour after the last delta. Each method raises the errors of Connection.execute.
    """

    def __init__(self, connection: Connection, keys: Keys, most: int) -> None:
        self._connection, self._key, self._most = connection, keys.deltas, most
        self._held: dict[str, Delta] = {}
        self._is_full = False

    def put(self, delta: Delta, file: Path) -> bool:
        """Put a delta, the content of `file`, on the server; return whether there was room.

        The oldest ones go, and what another learner left. Raise OSError if the file cannot be read.
        """
        if delta.size > self._most or not self._has_memory(delta.size):
            return False
        self._held[delta.hash] = delta
        while sum(one.size for one in self._held.values()) > self._most:
            del self._held[next(iter(self._held))]
        self._delete_others()
        with file.open("rb") as source:
            for field in delta.fields:
                self._connection.execute("HSET", self._key, field, source.read(DELTA_PART))
        self._connection.execute("EXPIRE", self._key, _EXPIRE_S)
        return True

    def _delete_others(self) -> None:
        """Delete all parts on the server but those of the held deltas."""
        held = {field.encode() for one in self._held.values() for field in one.fields}
        if others := set(self._connection.execute("HKEYS", self._key)) - held:
            self._connection.execute("HDEL", self._key, *others)

    def _has_memory(self, size: int) -> bool:
        """Return whether the server has memory for so many bytes more; log it if that has changed."""
        info = self._connection.execute("INFO", "memory")
        limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
        is_full = limit > 0 and used + size > _MOST_FULL * limit
        if is_full and not self._is_full:
            log.warning(
                f"The queue server uses {used:,} of {limit:,} bytes (maxmemory): deltas of the weights, "
                f"such as one of {size:,} bytes, are left to the file server. Raise maxmemory, or set "
                "RUN_DELTA_MIB=0."
            )
        self._is_full = is_full
        return not is_full
