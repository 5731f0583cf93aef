"""A check of the learner's heartbeat, by which actors and rewarders notice that the learner is gone."""

import time

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import LearnerStatus, RunView
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, WrongType
from penstock.common.log import get_logger, shorten
from penstock.common.monitor.waiting import describe_waiting

_POLL_EVERY_S = 1.0

log = get_logger(__name__)


class LearnerWatch:
    """Checks the learner's heartbeat for an actor or a rewarder.

    `run` has the timeout (RUN_PROGRESS_TIMEOUT_S), which starts when the watch is created, and the
    length of a lease. A busy learner is no reason to leave: in an Update or an evaluation its heartbeat
    continues, for up to LEARNER_STALL_TIMEOUT_S per phase.
    """

    def __init__(self, connection: Connection, keys: Keys, run: RunSettings) -> None:
        self._connection = connection
        self._keys = keys
        self._view = RunView(connection, keys)
        self._run = run
        self._deadline = Deadline(run.progress_timeout_s)
        self._poll_at = 0.0

    def check(self) -> None:
        """Read the learner's heartbeat; a call within a second of the last reading does nothing.

        Log a warning for each 30 s without a new heartbeat. Raise DeadlineExceeded after
        RUN_PROGRESS_TIMEOUT_S without one; a gap between calls counts as at most 5 s. Both name who
        holds open tickets. Raise ServerUnavailable or another error of Connection.execute.
        """
        if time.monotonic() < self._poll_at:
            return
        self._poll_at = time.monotonic() + _POLL_EVERY_S
        status = self._view.learner()
        if self._deadline.expired(progress=status):
            raise DeadlineExceeded(
                f"no heartbeat from the learner for {self._deadline.waited_s:.0f} s "
                f"(RUN_PROGRESS_TIMEOUT_S): {self._describe(status)}. See what that process does, or "
                "start the learner again"
            )
        if self._deadline.report_due():
            missing = f"No heartbeat from the learner for {self._deadline.waited_s:.0f} s"
            log.warning(shorten(f"{missing}: {self._describe(status)}"))

    def _describe(self, status: LearnerStatus) -> str:
        """Return a clause: the learner as in `status`, the announced weights, who holds open tickets.

        If a key has another type than expected, the error's text replaces the last part. Raise
        RunNotReady if the learner's functions are not on the server, ServerUnavailable, or another error
        of Connection.call.
        """
        weights = self._view.weights()
        version = f"weights {weights.version} are announced" if weights else "no weights are announced"
        try:
            waiting = describe_waiting(self._connection, self._keys, self._run.lease_s)
        except WrongType as error:
            waiting = str(error)
        return f"{status}, {version}; {waiting}"
