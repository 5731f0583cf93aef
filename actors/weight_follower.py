"""Keeping the engine at the version that the learner announced last.

An announcement names a version and the hash of its weights. An actor looks for them in the run's own
folder, whatever path is announced: whoever can write to the queue server cannot choose a file.
"""

import asyncio
import time
from dataclasses import replace

from penstock.actors.engine import WEIGHTS_FILE, Engine, WeightsRejected
from penstock.actors.held_tickets import HeldTickets
from penstock.common.broker.run_view import RunView
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, EngineFailed
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import get_logger
from penstock.common.wire.messages import Weights

log = get_logger(__name__)


class WeightFollower:
    """Changes the weights of `engine` to the announced version, except while an eval ticket is running.

    The announced version counts, not the highest: after 2.7, a restarted learner may announce 3.5.
    `view` reads the announcement, `held` has the running tickets, and `folder` is the run's, which has
    the weights. `learner_timeout_s` (RUN_JOIN_TIMEOUT_S) limits the wait for usable weights,
    `take_timeout_s` (ACTOR_START_TIMEOUT_S) a change of weights. `taking` is True during a change.
    """

    def __init__(
        self,
        engine: Engine,
        view: RunView,
        held: HeldTickets,
        folder: RunFolder,
        learner_timeout_s: float,
        take_timeout_s: float,
    ) -> None:
        self.taking = False
        self._engine = engine
        self._view = view
        self._held = held
        self._folder = folder
        self._deadline = Deadline(learner_timeout_s, longest_gap_s=take_timeout_s)
        self._take_timeout_s = take_timeout_s
        self._reported = ""

    async def poll(self) -> bool:
        """Load newly announced weights unless an eval ticket runs; return whether weights were loaded.

        Refused weights are logged. Raise EngineFailed if the engine breaks. After `learner_timeout_s`,
        raise DeadlineExceeded if no weights or heartbeats came, WeightsRejected if all were refused.
        """
        weights = await asyncio.to_thread(self._view.weights)
        if weights is None:
            await self._check_learner()
            return False
        if weights.version == self._engine.version or self._held.pins_version():
            self._deadline.restart()
            return False
        try:
            await self._take(weights)
        except WeightsRejected as error:
            self._refuse(weights, error)
            return False
        self._deadline.restart()
        return True

    async def _take(self, weights: Weights) -> None:
        """Load announced weights from the run's folder into the engine; `taking` is True meanwhile.

        Raise WeightsRejected, with the engine unchanged, for unusable weights, EngineFailed if the load
        fails or takes more than ACTOR_START_TIMEOUT_S.
        """
        began = time.monotonic()
        self.taking = True
        try:
            async with asyncio.timeout(self._take_timeout_s):
                await self._engine.take_weights(find_weights(weights, self._folder))
        except TimeoutError as error:
            raise EngineFailed(
                f"the engine did not take version {weights.version} within {self._take_timeout_s:g} s "
                "(ACTOR_START_TIMEOUT_S): start the actor again, or raise the setting"
            ) from error
        finally:
            self.taking = False
        log.debug(f"Took weights {weights.version} in {time.monotonic() - began:.3f} s.")

    async def _check_learner(self) -> None:
        """Raise DeadlineExceeded if the learner's last heartbeat is RUN_JOIN_TIMEOUT_S old.

        A new heartbeat starts the time again. Raise ServerUnavailable and the other errors of
        Connection.execute.
        """
        sign = await asyncio.to_thread(self._view.learner)
        if self._deadline.expired(progress=sign):
            raise DeadlineExceeded(
                "no first weights were announced, and no heartbeat came for "
                f"{self._deadline.limit_s:g} s (RUN_JOIN_TIMEOUT_S): {sign}; see what the learner does, "
                "or start it again"
            )

    def _refuse(self, weights: Weights, reason: WeightsRejected) -> None:
        """Raise `reason` if no usable weights came for RUN_JOIN_TIMEOUT_S, else log it as a warning.

        A reason with the text of the last logged one is not logged again. `weights` are those refused.
        """
        if self._deadline.expired():
            raise reason
        if str(reason) != self._reported:
            self._reported = str(reason)
            log.warning(
                f"Refused weights {weights.version}; the engine stays at {self._engine.version}.",
                cause=str(reason),
            )


def find_weights(weights: Weights, folder: RunFolder) -> Weights:
    """Return a copy of announced weights with the path that their version has in the run's folder.

    The announced path is not used. Raise WeightsRejected if the file there is a link that leads out of
    the folder of versions. Whether there is a file is not checked.
    """
    path = folder.version(weights.version.incarnation, weights.version.step)
    if not (path / WEIGHTS_FILE).resolve().is_relative_to(folder.versions.resolve()):
        raise WeightsRejected(
            f"{path / WEIGHTS_FILE} leads out of {folder.versions}; weights are read from the run's "
            "folder only: put the file there instead of the link"
        )
    return replace(weights, path=str(path))
