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

_JOIN_S = 5.0


class KeeperThread:
    """A thread, `name`, that calls `keep` every `interval_s` seconds from `start` to `stop`.

    No error of `keep` ends it: a main loop that worked on without its leases would have its work taken
    away. A PenstockError is logged as a warning, which begins with `failed`, since the main loop meets
    the same server and reports it, any other error with its traceback.
    """

    def __init__(
        self, name: str, interval_s: float, keep: Callable[[], None],
        failed: str = "The leases were not renewed",
    ) -> None:  # fmt: skip
        self._interval_s, self._keep, self._failed = interval_s, keep, failed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raise RuntimeError if it was started before."""
        self._thread.start()

    def end(self) -> None:
        """End the thread after the present call of `keep`. That may call this; nothing is waited for."""
        self._ended.set()

    def stop(self) -> None:
        """End the thread, and wait up to 5 s for its end. Raise RuntimeError if it was never started."""
        self.end()
        self._thread.join(_JOIN_S)

    def check(self) -> None:
        """Raise PenstockError if the thread was started and has died, as for lack of memory."""
        if self._thread.ident is not None and not self._ended.is_set() and not self._thread.is_alive():
            raise PenstockError(f"the thread {self._thread.name} has died: start this process again")

    def _run(self) -> None:
        """Call `keep` until the end, whatever it raises."""
        while not self._ended.wait(self._interval_s):
            try:
                self._keep()
            except PenstockError as error:
                log.warning(shorten(f"{self._failed}: {error}"))
            except Exception:  # whatever it is, the work must not be lost with this thread
                log.exception(f"{self._failed}: the next time follows.")


class LeaseKeeper:
    """Renews the leases of held entries every quarter of `lease_s`, in a thread that `start` begins.

    `progress` returns a number that grows while the process works; the thread calls it. While entries
    are held and the number has stayed the same for `stall_timeout_s`, no lease is renewed.
    """

    def __init__(self, lease_s: float, progress: Callable[[], int], stall_timeout_s: float) -> None:
        self._progress = progress
        self._stall = Deadline(stall_timeout_s, longest_gap_s=lease_s / 4)
        self._held: dict[tuple[WorkStream, str], Callable[[], None] | None] = {}
        self._lock = threading.Lock()
        self._thread = KeeperThread("leases", lease_s / 4, self._renew)

    def start(self) -> None:
        """Start the thread that renews the leases. Raise RuntimeError if it was started before."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that `start` began, and wait at most 5 s for its end.

        Without a `start` before, threading raises RuntimeError. Entries are not given back: their leases
        expire, and other processes take them.
        """
        self._thread.stop()

    def check(self) -> None:
        """Raise PenstockError if the thread has died; its errors do not end it."""
        self._thread.check()

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

    def finish(self, stream: WorkStream, entry: Entry) -> None:
        """Renew the lease of a held `entry` until `release`, without a call of `on_lost` if it is gone.

        The caller hands the entry on, puts it back or buries it. The server may answer late.
        """
        with self._lock:
            if (stream, entry.id) in self._held:
                self._held[stream, entry.id] = None

    def holds(self, stream: WorkStream, entry: Entry) -> bool:
        """Return whether the lease of `entry` is renewed."""
        with self._lock:
            return (stream, entry.id) in self._held

    def release(self, stream: WorkStream, entry: Entry) -> None:
        """Stop renewing the lease of `entry` of `stream`, if it is held. The server is not called."""
        with self._lock:
            self._held.pop((stream, entry.id), None)

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
            entries = [entry for (owner, entry), _ in held if owner is stream]
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
