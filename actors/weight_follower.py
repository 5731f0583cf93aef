"""Keeping the engine on the announced version."""

import asyncio
import time

from penstock.actors.engine import Engine, WeightsRejected
from penstock.actors.held_tickets import HeldTickets
from penstock.common.broker.run_view import RunView
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded, EngineFailed
from penstock.common.log import get_logger
from penstock.common.wire.messages import Weights

log = get_logger(__name__)


class WeightFollower:
    """Takes what the learner announces: never a maximum, and not while an eval ticket is sampled.

    `taking` is True while the engine changes its weights.
    """

    def __init__(
        self,
        engine: Engine,
        view: RunView,
        held: HeldTickets,
        learner_timeout_s: float,
        take_timeout_s: float,
    ) -> None:
        self.taking = False
        self._engine = engine
        self._view = view
        self._held = held
        self._deadline = Deadline(learner_timeout_s, longest_gap_s=take_timeout_s)
        self._take_timeout_s = take_timeout_s
        self._reported = ""

    async def poll(self) -> bool:
        """Take the announced version if it is another one; True if it was taken.

        Raises DeadlineExceeded when the learner announced nothing and sent no heartbeat for
        `learner_timeout_s`, WeightsRejected when no announced weights were usable for that long, and
        EngineFailed when the engine broke.
        """
        weights = await asyncio.to_thread(self._view.weights)
        if weights is None:
            await self._wait_for_learner()
            return False
        if weights.version == self._engine.version or self._held.pins_version():
            self._deadline.restart()
            return False
        try:
            await self._take(weights)
        except WeightsRejected as error:
            self._refuse(error)
            return False
        self._deadline.restart()
        return True

    async def _take(self, weights: Weights) -> None:
        began = time.monotonic()
        self.taking = True
        try:
            async with asyncio.timeout(self._take_timeout_s):
                await self._engine.take_weights(weights)
        except TimeoutError as error:
            raise EngineFailed(
                f"the engine did not take version {weights.version} within {self._take_timeout_s:g} s"
            ) from error
        finally:
            self.taking = False
        took_s = round(time.monotonic() - began, 3)
        log.debug("weights taken", version=str(weights.version), took_s=took_s)

    async def _wait_for_learner(self) -> None:
        """Nothing was announced: it may be long in coming, as long as the learner gets on."""
        sign = await asyncio.to_thread(self._view.learner)
        if self._deadline.expired(progress=sign):
            raise DeadlineExceeded(
                f"the actor waited for the first weights in vain: {sign}, and gave no sign of "
                f"life for {self._deadline.limit_s:g} s (RUN_JOIN_TIMEOUT_S)"
            )

    def _refuse(self, reason: WeightsRejected) -> None:
        """Raise the reason when it has lasted too long; a new announcement may mend it."""
        if self._deadline.expired():
            raise reason
        if str(reason) != self._reported:
            self._reported = str(reason)
            log.warning("weights refused", cause=str(reason), stays_at=str(self._engine.version))
