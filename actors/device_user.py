"""When an actor's engine uses the device that the learner uses by turns with it.

asleep -> (the device is free) -> awake -> (the learner waits for it; what runs ends) -> asleep
"""

import asyncio
from collections.abc import Callable

from penstock.actors.engine import Engine, within_limit
from penstock.common.shared_device import SharedDevice


class DeviceUser:
    """Lets `engine` sleep while the learner uses `device`; None: the engine has its own, and is awake.

    `sleep_level` is ACTOR_SLEEP_LEVEL, and `timeout_s` (ACTOR_START_TIMEOUT_S) bounds falling asleep and
    waking up. The engine is awake at first, and uses the device. Tickets may start while `awake`.
    """

    def __init__(
        self, engine: Engine, device: SharedDevice | None, sleep_level: int, timeout_s: float
    ) -> None:
        self._engine, self._device = engine, device
        self._sleep_level, self._timeout_s = sleep_level, timeout_s
        self._changing = asyncio.Lock()
        self.awake = True

    async def poll(self, is_busy: Callable[[], bool], is_ending: Callable[[], bool]) -> bool:
        """Let the engine sleep if the learner waits for the device and nothing runs, or wake it up.

        `is_busy` tells whether something runs: then the engine is not `awake` for more, and falls asleep
        at a later call. Return whether it woke up. One that is asleep waits here for the device, until
        `is_ending`. A change that has begun is completed, also if this call is cancelled. Raise
        EngineFailed if the engine fails or takes more than ACTOR_START_TIMEOUT_S.
        """
        if self._device is None:
            return False
        return await asyncio.shield(asyncio.ensure_future(self._poll(is_busy, is_ending)))

    async def _poll(self, is_busy: Callable[[], bool], is_ending: Callable[[], bool]) -> bool:
        """Do the work of `poll`, with a device; concurrent calls wait for each other."""
        assert self._device is not None
        async with self._changing:
            if self._device.in_use:
                if not self.awake or self._device.is_wanted():
                    self.awake = False
                    if not is_busy():
                        await self._fall_asleep()
                return False
            if not await asyncio.to_thread(self._device.take, is_ending):
                return False
            await within_limit(self._engine.wake(), self._timeout_s, "wake up")
            self.awake = True
            return True

    async def leave(self) -> None:
        """Fall asleep and leave the device, unless it is left; nothing may run. `poll` comes back.

        Raise EngineFailed if the engine fails or takes more than ACTOR_START_TIMEOUT_S.
        """
        if self._device is None:
            return
        async with self._changing:
            if self._device.in_use:
                self.awake = False
                await self._fall_asleep()

    async def _fall_asleep(self) -> None:
        """Let the engine sleep, and leave the device. Raise EngineFailed if it does not."""
        assert self._device is not None
        await within_limit(self._engine.sleep(self._sleep_level), self._timeout_s, "fall asleep")
        self._device.release()
