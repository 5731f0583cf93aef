"""Looks at a run's streams while it goes on, and says what no run may ever show.

twice   a ticket lies on two entries at one instant, or is back after it had ended
lost    a ticket that was on a stream is on none, and its end is not in the journal
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import redis

from penstock.common.broker.keys import Keys
from tests.judge import read_records

_LOOK = """
local tickets = {}
for _, stream in ipairs(KEYS) do
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    if entry[2][1] == 't' then table.insert(tickets, entry[2][2]) end
  end
end
return tickets
"""


class Watch:
    """Sees every ticket that ever lay on a stream while it looked; `found` are kinds and sentences."""

    def __init__(self, url: str, keys: Keys, run_folder: Path) -> None:
        self.found: set[tuple[str, str]] = set()
        self.live: Counter[str] = Counter()
        self._client = redis.Redis.from_url(url.partition("?")[0])
        self._streams = (*keys.work_streams, *keys.outcome_streams)
        self._run_folder = run_folder
        self._seen: set[str] = set()
        self._ended: set[str] = set()

    def look(self) -> None:
        """One instant of the streams; then the journal, which must know what is gone from them."""
        try:
            tickets = self._client.eval(_LOOK, len(self._streams), *self._streams)
        except redis.exceptions.RedisError:  # the server is away
            return
        self.live = Counter(ticket.decode() for ticket in tickets)
        for ticket, count in self.live.items():
            if count > 1:
                self.found.add(("twice", f"{ticket} lay on {count} entries at one instant"))
        for ticket in self._ended & self.live.keys():
            self.found.add(("twice", f"{ticket} came back after its end"))
        gone = self._seen - self.live.keys()
        if gone:
            ends = {ticket for _, record in read_records(self._run_folder) for ticket in record["ends"]}
            self._ended |= gone & ends
            gone -= ends
        for ticket in gone:
            self.found.add(("lost", f"{ticket} left the streams without an end in the journal"))
        self._seen = set(self.live)

    def disturb(self) -> None:
        """Another client writes an entry to each stream that no role can read."""
        with contextlib.suppress(redis.exceptions.RedisError):  # the server is away
            for stream in self._streams:
                self._client.xadd(stream, {"x": "y"}, nomkstream=True)

    def write(self, *command: str) -> None:
        """Another client sends a command."""
        self._client.execute_command(*command)

    def forget(self) -> None:
        """The server lost what it held: nothing that was seen has to be there."""
        self._seen.clear()
        self._ended.clear()
