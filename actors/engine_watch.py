"""Is the engine alive, and how fast: what the leases, the watch and the log lines go by."""

import time

from penstock.actors.engine import Engine
from penstock.actors.held_tickets import HeldTickets
from penstock.actors.weight_follower import WeightFollower
from penstock.common.deadline import Deadline
from penstock.common.errors import EngineFailed
from penstock.common.log import get_logger

_REPORT_S = 10.0

log = get_logger(__name__)


class EngineWatch:
    """Fails when the engine has work and produces nothing; reports now and then."""

    def __init__(
        self, engine: Engine, held: HeldTickets, follower: WeightFollower, stall_timeout_s: float
    ) -> None:
        self.completions = 0
        self._engine = engine
        self._held = held
        self._follower = follower
        self._stall = Deadline(stall_timeout_s)
        self._idle_checks = 0
        self._reported = (time.monotonic(), 0, engine.tokens_generated())

    def progress(self) -> int:
        """Grows while the engine samples, has nothing to sample, or takes weights in time."""
        if self._follower.taking or not self._held.running:
            self._idle_checks += 1
        return self._engine.tokens_generated() + self._idle_checks

    def check(self) -> None:
        """Raise EngineFailed when there was no progress for too long."""
        if self._stall.expired(self.progress()):
            raise EngineFailed(
                f"the engine has {len(self._held.running)} tickets and sampled no token for "
                f"{self._stall.limit_s:g} s (ACTOR_STALL_TIMEOUT_S)"
            )

    def report(self) -> None:
        """Log the rates since the last line, if that is long enough ago."""
        now, tokens = time.monotonic(), self._engine.tokens_generated()
        then, completions_then, tokens_then = self._reported
        if now - then < _REPORT_S:
            return
        log.info(
            "generating",
            version=str(self._engine.version),
            completions_per_s=round((self.completions - completions_then) / (now - then), 1),
            tokens_per_s=round((tokens - tokens_then) / (now - then)),
            running=len(self._held.running),
            waiting=len(self._held.waiting),
        )
        self._reported = (now, self.completions, tokens)
