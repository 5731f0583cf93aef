"""Renewal of the leases of held entries, in a thread beside the main loop.

A thread that renewed for ever beside a hung engine would withhold the work from other processes. So
leases are renewed only while `progress` grows. After `stall_timeout_s` without growth they expire.
"""

import threading
from collections.abc import Callable

from penstock.common.broker.work_stream import Entry, WorkStream
from penstock.common.deadline import Deadline
from penstock.common.errors import PenstockError
from penstock.common.log import get_logger, shorten

log = get_logger(__name__)


class LeaseKeeper:
    """Renews the leases of held entries every quarter of `lease_s`, in a thread that `start` begins.

    `progress` returns a number that grows while the process works; the thread calls it. While entries
    are held and the number has stayed the same for `stall_timeout_s`, no lease is renewed.
    """

    def __init__(self, lease_s: float, progress: Callable[[], int], stall_timeout_s: float) -> None:
        self._interval_s = lease_s / 4
        self._progress = progress
        self._stall = Deadline(stall_timeout_s, longest_gap_s=self._interval_s)
        self._held: dict[tuple[WorkStream, str], Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Start the thread that renews the leases. Raise RuntimeError if it was started before."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that `start` began, and wait at most 5 s for its end.

        Without a `start` before, threading raises RuntimeError. Entries are not given back: their leases
        expire, and other processes take them.
        """
        self._stop.set()
        self._thread.join(timeout=5)

    def hold(self, stream: WorkStream, entry: Entry, on_lost: Callable[[], None]) -> None:
        """Renew the lease of `entry`, which was taken from `stream`, from now on until `release`.

        If a renewal finds that this process no longer holds the entry, as another one took it over or it
        is gone, log a warning, call `on_lost` once, in the keeper's thread, and hold the entry no
        longer. If no entry was held, the timeout for missing progress starts anew. The server is not
        called.
        """
        with self._lock:
            if not self._held:
                self._stall.restart()
            self._held[stream, entry.id] = on_lost

    def release(self, stream: WorkStream, entry: Entry) -> None:
        """Stop renewing the lease of `entry` of `stream`, if it is held. The server is not called."""
        with self._lock:
            self._held.pop((stream, entry.id), None)

    def _run(self) -> None:
        """Renew the leases every quarter of a lease until `stop` is called.

        A PenstockError of a renewal is logged as a warning, and the next renewal tries again.
        """
        while not self._stop.wait(self._interval_s):
            try:
                self._renew()
            except PenstockError as error:  # the loop meets the same server and reports it
                log.warning(shorten(f"Leases were not renewed: {error}"))

    def _renew(self) -> None:
        """Renew the leases of all held entries once; of none if `_stalled` finds no progress.

        An entry that another process has taken over, or that is gone, is held no longer: log a warning
        and call its `on_lost`. Raise ServerUnavailable or another error of Connection.call.
        """
        if self._stalled():
            return
        with self._lock:
            held = list(self._held.items())
        for stream in {stream for (stream, _), _ in held}:
            entries = {entry: lost for (owner, entry), lost in held if owner is stream}
            for entry, owned in zip(entries, stream.renew(entries), strict=True):
                with self._lock:
                    on_lost = None if owned else self._held.pop((stream, entry), None)
                if on_lost is not None:
                    log.warning("A lease expired and another process took the work.", entry=entry)
                    on_lost()

    def _stalled(self) -> bool:
        """Return whether entries are held while `progress` stood still for over the stall timeout.

        If so, log an error, at each call. While no entry is held, the timeout starts anew and the result
        is False. `progress` is called once.
        """
        progress = self._progress()
        with self._lock:
            if not self._held:
                self._stall.restart()
            if not self._stall.expired(progress):
                return False
            stalled_s, entries = round(self._stall.waited_s), len(self._held)
        log.error(f"No progress for {stalled_s} s: {entries} leases are left to expire.")
        return True
