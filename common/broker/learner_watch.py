"""Actors and rewarders notice when their learner has stopped, hangs, or is gone."""

import time

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import LearnerSign, RunView
from penstock.common.broker.waiting import describe_waiting
from penstock.common.config.settings import RunSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded
from penstock.common.log import get_logger

_LOOK_EVERY_S = 1.0

log = get_logger(__name__)


class LearnerWatch:
    """Looks for the learner's sign of life, which it gives as long as it gets on.

    That it is busy for long (an Update, an evaluation) is no reason to leave: it says so itself, up to
    LEARNER_STALL_TIMEOUT_S for each thing it does.
    """

    def __init__(self, connection: Connection, keys: Keys, run: RunSettings) -> None:
        self._connection = connection
        self._keys = keys
        self._view = RunView(connection, keys)
        self._run = run
        self._deadline = Deadline(run.progress_timeout_s)
        self._look_at = 0.0

    def look(self) -> None:
        """Look, at most once a second.

        Raises DeadlineExceeded after RUN_PROGRESS_TIMEOUT_S without a sign.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        sign = self._view.learner()
        if self._deadline.expired(progress=sign):
            raise DeadlineExceeded(
                f"no sign of life from the learner for {self._deadline.waited_s:.0f} s "
                f"(RUN_PROGRESS_TIMEOUT_S): {self._waits_for(sign)}. See what that process does, or "
                "start it again"
            )
        if self._deadline.report_due():
            waited_s = round(self._deadline.waited_s)
            log.warning(
                "no sign of life from the learner", waited_s=waited_s, what=self._waits_for(sign)
            )

    def _waits_for(self, sign: LearnerSign) -> str:
        weights = self._view.weights()
        version = f"version {weights.version}" if weights else "no version"
        waiting = describe_waiting(self._connection, self._keys, self._run.lease_s)
        return f"{sign}, {version} is announced; {waiting}"
