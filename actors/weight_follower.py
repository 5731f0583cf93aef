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
    """Changes the engine's weights to the announced version, except while an eval ticket is running.

    The announced version counts, not the highest: after 2.7, a restarted learner may announce 3.5.
    `taking` is True while the engine changes its weights.
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
        """Take the announced version if the engine has another and no eval ticket runs. Return whether.

        Raise EngineFailed if the engine broke, or as RunView.weights. After `learner_timeout_s` raise
        DeadlineExceeded without announcement and heartbeat, WeightsRejected without usable weights.
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
        """Load announced weights from the run's folder into the engine.

        Raise WeightsRejected for unusable weights, EngineFailed after a failed load or the timeout.
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
        """Raise DeadlineExceeded after RUN_JOIN_TIMEOUT_S without a heartbeat, or as RunView.learner."""
        sign = await asyncio.to_thread(self._view.learner)
        if self._deadline.expired(progress=sign):
            raise DeadlineExceeded(
                f"no first weights were announced: {sign}, and sent no heartbeat for "
                f"{self._deadline.limit_s:g} s (RUN_JOIN_TIMEOUT_S); see what that process does, or "
                "start the learner again"
            )

    def _refuse(self, weights: Weights, reason: WeightsRejected) -> None:
        """Log each `reason` once; raise it if no usable weights came for RUN_JOIN_TIMEOUT_S."""
        if self._deadline.expired():
            raise reason
        if str(reason) != self._reported:
            self._reported = str(reason)
            log.warning(
                f"Refused weights {weights.version}; the engine stays at {self._engine.version}.",
                cause=str(reason),
            )


def find_weights(weights: Weights, folder: RunFolder) -> Weights:
    """Return announced weights with the path that their version has in the run's folder.

    Raise WeightsRejected if the file there is a link that leads out of the folder of versions.
    """
    path = folder.version(weights.version.incarnation, weights.version.step)
    if not (path / WEIGHTS_FILE).resolve().is_relative_to(folder.versions.resolve()):
        raise WeightsRejected(
            f"{path / WEIGHTS_FILE} leads out of {folder.versions}; weights are read from the run's "
            "folder only: put the file there instead of the link"
        )
    return replace(weights, path=str(path))
