"""The engine's progress: whether leases are renewed, whether the actor ends, what is logged."""

import time

from penstock.actors.engine import Engine
from penstock.actors.held_tickets import HeldTickets
from penstock.actors.rollout_groups import Completions
from penstock.actors.weights.follower import WeightFollower
from penstock.common.deadline import Deadline
from penstock.common.errors import EngineFailed
from penstock.common.log import get_logger

_REPORT_S = 10.0

log = get_logger(__name__)


class EngineWatch:
    """Detects an engine that has tickets and samples nothing for `stall_timeout_s`; logs its speed.

    `groups` samples the rollouts with `engine`, `held` has the tickets, and `follower` changes the
    weights.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Completions,
        held: HeldTickets,
        follower: WeightFollower,
        stall_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._held = held
        self._follower = follower
        self._stall = Deadline(stall_timeout_s)
        self._idle_checks = 0
        self._reported = (time.monotonic(), engine.tokens_generated(), engine.prefix_cache())

    def progress(self) -> int:
        """Return a counter that grows with the sampled tokens, and stays equal while the engine hangs.

        Each call while nothing is sampled, weights are loaded, or every rollout waits for a tool adds 1
        as well: loading, tools, and the queue server that gets finished groups have timeouts of their
        own. An agent that gave its call up does not wait for a tool until the engine samples again.
        """
        if self._follower.taking or not self._held.sampling or self._groups.waits_for_tools():
            self._idle_checks += 1
        return self._engine.tokens_generated() + self._idle_checks

    def check(self) -> None:
        """Raise EngineFailed if `progress` has been equal in all calls for ACTOR_STALL_TIMEOUT_S."""
        if self._stall.expired(self.progress()):
            raise EngineFailed(
                f"the engine has {len(self._held.running)} tickets and sampled no token for "
                f"{self._stall.limit_s:g} s (ACTOR_STALL_TIMEOUT_S): start the actor again, or raise "
                "the setting if a token can take that long here"
            )

    def report(self) -> None:
        """Log running completions, tokens/s, prefix cache hits, the weights, and waiting tickets.

        Speed and hits, the share of prompt tokens, are those since the last log. Do nothing within 10 s
        of it.
        """
        now, tokens, (hits, misses) = (
            time.monotonic(), self._engine.tokens_generated(), self._engine.prefix_cache()
        )  # fmt: skip
        then, tokens_then, (hits_then, misses_then) = self._reported
        if now - then >= _REPORT_S:
            self._reported = (now, tokens, (hits, misses))
            completions = sum(job.ticket.num_generations for job in self._held.running)
            speed = (tokens - tokens_then) / (now - then)
            asked = hits + misses - hits_then - misses_then
            log.info(
                f"Generating {completions} completions, {speed:.0f} tokens/s (weights "
                f"{self._engine.version}; {len(self._held.waiting)} tickets wait; prefix cache hits "
                f"{(hits - hits_then) / max(1, asked):.0%})."
            )
