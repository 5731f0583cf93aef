"""When an actor's engine uses the device that the learner uses by turns with it.

sleeping -> (the device is free) -> awake -> (the learner waits for it; what runs ends) -> sleeping
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.actors.engine import Engine
from penstock.actors.held_tickets import HeldTickets
from penstock.common.errors import EngineFailed
from penstock.common.shared_device import SharedDevice


class DeviceUser:
    """Lets `engine` sleep while the learner uses `device`; None: the engine has its own, and is awake.

    `held` has the tickets: none may start unless `awake`. `sleep_level` is ACTOR_SLEEP_LEVEL, and
    `timeout_s` (ACTOR_START_TIMEOUT_S) bounds falling asleep and waking up. `is_ending` tells that the
    worker ends. The engine is awake at first if the device is in use.
    """

    def __init__(
        self,
        engine: Engine,
        held: HeldTickets,
        device: SharedDevice | None,
        sleep_level: int,
        timeout_s: float,
        is_ending: Callable[[], bool],
    ) -> None:
        self._engine, self._held, self._device = engine, held, device
        self._sleep_level, self._timeout_s, self._is_ending = sleep_level, timeout_s, is_ending
        self._leaves = False

    @property
    def awake(self) -> bool:
        """Return whether tickets may start and weights may change now."""
        return self._device is None or (self._device.in_use and not self._leaves)

    async def poll(self) -> bool:
        """Let the engine sleep if the learner waits for the device and nothing runs, or wake it up.

        Return whether it woke up. A sleeping one waits here for the device, until the worker ends. Raise
        EngineFailed if the engine fails or takes more than ACTOR_START_TIMEOUT_S.
        """
        if self._device is None:
            return False
        if not self._device.in_use:
            woke = await asyncio.to_thread(self._device.take, self._is_ending)
            if woke:
                await self._within_limit(self._engine.wake())
            return woke
        self._leaves = self._leaves or self._device.is_wanted()
        if self._leaves and not self._held.running:
            await self._within_limit(self._engine.sleep(self._sleep_level))
            self._device.release()
            self._leaves = False
        return False

    async def _within_limit(self, change: Awaitable[None]) -> None:
        """Await a change of the engine. Raise EngineFailed after ACTOR_START_TIMEOUT_S."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await change
        except TimeoutError as error:
            raise EngineFailed(
                f"the engine did not fall asleep or wake up within {self._timeout_s:g} s "
                "(ACTOR_START_TIMEOUT_S): start the actor again, or raise the setting"
            ) from error
