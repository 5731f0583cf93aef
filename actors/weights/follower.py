"""Keeping the engine at the version that the learner announced last.

An announcement names a version and the hash of its weights. Their file is fetched, if need be, while
requests go on; only the change of the weights waits for them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.actors.engine import Engine, WeightsRejected, within_limit
from penstock.actors.held_tickets import HeldTickets
from penstock.actors.weights.probing import mean_difference
from penstock.actors.weights.source import WeightSource
from penstock.common.broker.run_view import RunView
from penstock.common.deadline import Deadline, run_aside
from penstock.common.errors import ConfigError, DeadlineExceeded, Disagreement, PenstockError
from penstock.common.log import get_logger
from penstock.common.transfer.download import CacheUnusable, FetchFailed
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Weights

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_RESTORED_S, _LONGEST_LEASE_S = 2.0, 120.0

log = get_logger(__name__)


async def _discard_nothing() -> None:
    """Do nothing: nothing runs."""


class WeightFollower:
    """Changes the weights of `engine` to the announced version, except while an eval ticket is running.

    The announced version counts, not the highest: after 2.7, a restarted learner may announce 3.5.
    `view` reads the announcement, `held` has the running tickets, and `source` finds the weights.
    `learner_timeout_s` (RUN_JOIN_TIMEOUT_S) limits the wait for usable weights, `take_timeout_s`
    (ACTOR_START_TIMEOUT_S) a change of weights. `taking` is True during a change, which ends with the
    proof that the engine computes what the learner computes: a mean difference of at most `probe_limit`
    (0: no proof). If it fails, `discard` ends all that runs, and nothing may start while `wrong`, nor
    before the weights that an engine has from an earlier follower are proven. The
    learner, whose lease is `lease_s`, restores its announcement in a quarter of it.
    """

    def __init__(
        self,
        engine: Engine,
        view: RunView,
        held: HeldTickets,
        source: WeightSource,
        learner_timeout_s: float,
        take_timeout_s: float,
        probe_limit: float = 0.0,
        discard: Callable[[], Awaitable[None]] = _discard_nothing,
        lease_s: float = 0.0,
    ) -> None:
        self.taking, self.wrong = False, engine.version is not None  # proven by the first poll
        self._probe_limit, self._discard = probe_limit, discard
        self._proof: asyncio.Future[bool] | None = None
        self._proven: Version | None = None
        self._doubted, self._lease_s = False, lease_s
        self._difference = 0.0
        self._engine = engine
        self._view = view
        self._held = held
        self._source = source
        self._deadline = Deadline(learner_timeout_s, longest_gap_s=_LONGEST_PAUSE_S)
        self._take_timeout_s = take_timeout_s
        self._reported = ""
        self._not_fetched: Weights | None = None
        self._fetch_at = self._pause_s = self._behind_since = 0.0

    @property
    def behind_s(self) -> float:
        """Return the seconds since the first try of new weights that failed; 0 if the last did not."""
        return time.monotonic() - self._behind_since if self._behind_since else 0.0

    async def poll(self) -> bool:
        """Load newly announced weights unless an eval ticket runs; return whether weights were loaded.

        Refused weights are logged. Raise EngineFailed if the engine breaks, Disagreement if it computes
        another model with the weights, also after they were fetched and loaded once more, ConfigError if
        it refuses all texts of the probe, or if the first weights cannot be written. After
        `learner_timeout_s`, raise DeadlineExceeded if no weights or heartbeats came, WeightsRejected if
        all were refused.
        """
        weights = await asyncio.to_thread(self._view.weights)
        if weights is None:
            await self._check_learner()
            return False
        if weights.version == self._engine.version == self._proven or self._held.pins_version():
            self._deadline.restart()
            self._behind_since = 0.0
            return False
        if time.monotonic() < self._fetch_at and weights == self._not_fetched:
            return False
        try:
            found = await asyncio.wrap_future(run_aside(partial(self._source.find, weights)))
            if self._held.pins_version():  # by an eval ticket that began meanwhile
                return False
            await self._take_proven(weights, found)
        except FetchFailed as error:
            await self._try_later(weights, error)
            return False
        except WeightsRejected as error:
            self._source.distrust(weights)
            self._pause(weights)
            self._refuse(weights, error)
            return False
        self._deadline.restart()
        self._behind_since = 0.0
        return True

    async def _try_later(self, weights: Weights, reason: FetchFailed) -> None:
        """Log why weights were not fetched, and do not fetch them for 1 s, later for up to 30 s.

        The engine goes on with the version that it has. Without one, raise DeadlineExceeded if the
        learner's last heartbeat is RUN_JOIN_TIMEOUT_S old, and ConfigError if nothing can be written.
        """
        self._pause(weights)
        self._report(weights, reason)
        if self._engine.version is None:
            if isinstance(reason, CacheUnusable):
                raise ConfigError(str(reason)) from reason
            await self._check_learner()
        else:
            self._deadline.restart()

    def _pause(self, weights: Weights) -> None:
        """Let `poll` leave these weights alone for 1 s, doubled at each failure up to 30 s."""
        again = weights == self._not_fetched
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if again else _FIRST_PAUSE_S
        self._not_fetched, self._fetch_at = weights, time.monotonic() + self._pause_s
        self._behind_since = self._behind_since or time.monotonic()

    async def proven(self) -> bool:
        """Return whether tokens that are sampled so far may leave the actor.

        Wait while weights are loaded and proven. False: they may be of wrong weights.
        """
        return self._proof is None or await asyncio.shield(self._proof)

    async def _take_proven(self, weights: Weights, found: Weights) -> None:
        """Load weights, `found` on this host, and prove that the engine computes what the learner does.

        If it does not, end all that runs, find the weights elsewhere if possible, and load them again.
        Raise WeightsRejected if the first load failed, or if the weights are not announced any more:
        another client wrote that. Otherwise raise Disagreement if the second load failed too,
        ConfigError if the engine refuses all texts of the probe, and EngineFailed.
        """
        self.taking = True
        try:
            await self._take_twice(weights, found)
        except (ConfigError, Disagreement) as error:
            await self._doubt(weights, error)
        finally:
            self.taking = False
            self._settle(False)

    async def _doubt(self, weights: Weights, error: ConfigError | Disagreement) -> None:
        """End all that runs, wait until the learner has restored its announcement, and read it again.

        Raise WeightsRejected if it differs from `weights`: another client may have announced them. Raise
        the `error` of their proof if it is the same, or if the weights before were doubted too.
        """
        self.wrong, self._proven = True, None
        self._settle(False)
        await self._discard()
        await asyncio.sleep(_RESTORED_S + min(self._lease_s, _LONGEST_LEASE_S) / 4)
        now = await asyncio.to_thread(self._view.weights)
        if self._doubted or (now and encode(now) == encode(weights)):
            raise error
        self._doubted = True
        raise WeightsRejected(f"another client announced the weights {weights.version}") from error

    async def _take_twice(self, weights: Weights, found: Weights) -> None:
        """Load and prove weights, and do both once more if the proof fails.

        Raise Disagreement if that fails too, and the other errors of `_is_right`.
        """
        if await self._is_right(weights, found):
            return
        self._source.distrust(weights)
        try:
            found = await asyncio.wrap_future(run_aside(partial(self._source.find, weights)))
            if await self._is_right(weights, found, again=True):
                return
        except (FetchFailed, WeightsRejected) as error:
            raise Disagreement(
                f"the engine computed another model with the weights {weights.version}, and they "
                f"cannot be loaded once more: {error}"
            ) from error
        raise Disagreement(self._describe(weights))

    async def _is_right(self, weights: Weights, found: Weights, again: bool = False) -> bool:
        """Load weights, `found` on this host, and return whether the engine computes what it should.

        If not, nothing may start any more, and all that runs is ended. Raise WeightsRejected, with the
        engine unchanged, ConfigError if it refuses all texts of the probe, and EngineFailed.
        """
        self._proof = asyncio.get_running_loop().create_future()
        try:
            await self._take(found, again)
        except WeightsRejected:
            self._settle(not self.wrong)  # what is sampled so far is of the weights before
            raise
        self.wrong = False
        probes = weights.probes if self._probe_limit else ()
        scoring = mean_difference(self._engine, probes)
        self._difference = await within_limit(scoring, self._take_timeout_s, "score the new weights")
        right = self._difference <= self._probe_limit or not self._probe_limit
        self.wrong = not right
        self._proven = weights.version if right else None
        self._doubted = self._doubted and not right
        self._settle(right)
        if not right:
            log.error(self._describe(weights))
            await self._discard()
        return right

    def _settle(self, proven: bool) -> None:
        """Answer those who wait for the proof, unless it is answered."""
        if self._proof is not None and not self._proof.done():
            self._proof.set_result(proven)

    def _describe(self, weights: Weights) -> str:
        """Return, for people, how far the engine is from the learner with `weights`."""
        return (
            f"with the weights {weights.version} the engine's log-probabilities differ from the "
            f"learner's by {self._difference:.3g} on average, expected at most {self._probe_limit:g} "
            "(ACTOR_PROBE_LIMIT): the file is right, but the engine computes another model. Compare "
            "vLLM's version, precision and ACTOR_ENGINE_ARGS with a run that works, or raise the limit"
        )

    async def _take(self, weights: Weights, again: bool) -> None:
        """Load weights that are on this host into the engine, also if it has them if `again`.

        Raise WeightsRejected, with the engine unchanged, for unusable weights, EngineFailed if the load
        fails or takes more than ACTOR_START_TIMEOUT_S.
        """
        began = time.monotonic()
        taking = self._engine.take_weights(weights, again)
        await within_limit(taking, self._take_timeout_s, f"take version {weights.version}")
        log.debug(f"Took weights {weights.version} in {time.monotonic() - began:.3f} s.")

    async def _check_learner(self) -> None:
        """Raise DeadlineExceeded if the learner's last heartbeat is RUN_JOIN_TIMEOUT_S old.

        A new heartbeat starts the time again. Raise ServerUnavailable and the other errors of
        Connection.execute.
        """
        status = await asyncio.to_thread(self._view.learner)
        if self._deadline.expired(progress=status):
            raise DeadlineExceeded(
                "no first weights were announced, and no heartbeat came for "
                f"{self._deadline.limit_s:g} s (RUN_JOIN_TIMEOUT_S): {status}; see what the learner "
                "does, or start it again"
            )

    def _refuse(self, weights: Weights, reason: WeightsRejected) -> None:
        """Raise `reason` if no usable weights came for RUN_JOIN_TIMEOUT_S, else log it as a warning.

        A reason with the text of the last logged one is not logged again. `weights` are those refused.
        """
        if self._deadline.expired():
            raise reason
        self._report(weights, reason)

    def _report(self, weights: Weights, reason: PenstockError) -> None:
        """Log why weights were not loaded, unless the text is that of the last such log line."""
        if str(reason) != self._reported:
            self._reported = str(reason)
            log.warning(
                f"Weights {weights.version} are not loaded; the engine stays at {self._engine.version}.",
                cause=str(reason),
            )
