"""A look at a run every two seconds, for `penstock up` and `queues watch`."""

import threading
import time
from collections.abc import Callable

from penstock.common.broker.connection import Connection
from penstock.common.errors import ConfigError, PenstockError, RunNotReady, ServerUnavailable
from penstock.common.monitor.limit import Cause, Fault, LimitWatch
from penstock.common.monitor.overview import Overview, read_overview
from penstock.common.monitor.screen import duration, progress_text

_EVERY_S, _SILENT_S, _JOIN_S = 2.0, 6.0, 5.0


class RunWatch:
    """Looks at the run named `run` on the server that `connect` connects to, and names what limits it.

    Commands in its sentences name the run's `folder`. Nothing is connected before the first look.
    """

    def __init__(self, connect: Callable[[], Connection], run: str, folder: str = "") -> None:
        self._connect, self._run = connect, (run, folder)
        self._connection: Connection | None = None
        self._limit = LimitWatch()
        self._absent_since = time.monotonic()

    def look(self) -> tuple[Overview | None, str]:
        """Return the run's overview and the sentence on what limits it, or None and what is missing.

        No error is raised for a server that does not answer, or a run that is not there yet.
        """
        try:
            if self._connection is None:
                self._connection = self._connect()
            now = read_overview(self._connection, *self._run)
        except (ConfigError, ServerUnavailable):
            self.close()
            self._connection = None  # the next server may be at another address, with another password
            return None, self._absent("the queue server")
        except RunNotReady:
            what = "the learner, which imports its libraries and claims the run"
            return None, Cause(self._absent(what), "learner")
        except PenstockError as error:
            return None, f"The run cannot be read: {error}"
        self._absent_since = time.monotonic()
        return now, self._limit.describe(now)

    def _absent(self, what: str) -> str:
        """Return the sentence that `what` is waited for, and since when."""
        return f"Waiting for {what}, since {duration(time.monotonic() - self._absent_since)}."

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()


class PeriodicOverview:
    """Reads a run's overview every two seconds in a thread, so that a hanging server blocks no caller.

    A context, which starts the thread. At its end the connection is closed, unless a look still hangs.
    """

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch
        self._seen: tuple[Overview | None, str] = (None, "Looking for the run.")
        self._seen_at = time.monotonic()
        self._ended, self._looked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="looks", daemon=True)

    def __enter__(self) -> "PeriodicOverview":
        """Start the thread and return self."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, in up to 5 s. An error of the block passes."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._watch.close()

    def _look(self) -> None:
        """Look every two seconds until the context ends."""
        while True:
            self._seen = self._watch.look()
            self._seen_at = time.monotonic()
            self._looked.set()
            if self._ended.wait(_EVERY_S):
                return

    def wait(self) -> None:
        """Wait for the first look, for up to 6 s."""
        self._looked.wait(_SILENT_S)

    def latest(self) -> tuple[Overview | None, str]:
        """Return what the last look found; None and how long none has ended, after 6 s without one."""
        age_s = time.monotonic() - self._seen_at
        if age_s > _SILENT_S:
            return None, Fault(f"The queue server does not answer, since {duration(age_s)}.")
        return self._seen


def progress_line(now: Overview | None, sentence: str) -> str:
    """Return one line on a run: step, reward, held-out, time left, then the `sentence`.

    Example: "step 37 of 100, reward 0.580, held-out 0.610, 53 s left. The learner is the limit: ..."
    """
    return f"{progress_text(now)}. {sentence}" if now and now.progress else sentence
